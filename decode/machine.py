"""What a figure was measured on: machine and versions, for result files and for profiles of a machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import medusa_heads

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def processor() -> str:
    """The processor's name, as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Physical memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads in use, memory, accelerator."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def versions() -> dict[str, str | None]:
    """Versions of this project (with its commit, from a checkout) and of what it stands on."""
    found: dict[str, str | None] = {"python": platform.python_version(), "medusa-heads": medusa_heads.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"commit": commit()}


def commit() -> str | None:
    """The checkout's commit, marked where tracked files differ from it; None outside a checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def load_average() -> float | None:
    """Processes that ran or waited over the last minute: more than cores in use means a disturbed measurement."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
