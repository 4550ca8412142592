"""scripts/peers/setup.py: what it would run, without running it."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def setup() -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / "peers" / "setup.py"
    spec = importlib.util.spec_from_file_location("peers_setup", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was to be run."""
    ran: list[list[str]] = []

    def run(command: list[Any], **_: Any) -> None:
        ran.append([str(part) for part in command])
        if "broken" in ran[-1]:
            raise subprocess.CalledProcessError(3, command)

    monkeypatch.setattr(setup.subprocess, "run", run)
    monkeypatch.setattr(setup.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(setup.platform, "system", lambda: "Linux")
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(setup, "convert_embedded", Path.touch)
    return ran


def test_llama_cpp_is_installed_at_one_version_with_the_binaries_of_the_cpu_alone(
    setup: ModuleType, commands: list[list[str]], tmp_path: Path
) -> None:
    assert setup.main(["--directory", str(tmp_path), "--only", "llama.cpp"]) == 0
    (command,) = commands
    assert command[:2] == ["/bin/npm", "install"] and command[-2:] == ["--prefix", str(tmp_path / "llama.cpp")]
    assert {"--omit=optional", "--ignore-scripts"} <= set(command)
    assert [part for part in command if part.count("@") and part.endswith(setup.NODE_LLAMA)] == [
        f"node-llama-cpp@{setup.NODE_LLAMA}",
        f"@node-llama-cpp/linux-x64@{setup.NODE_LLAMA}",
    ]
    assert (tmp_path / "smollm2-135m.bf16.gguf").exists()


def test_vllm_is_installed_and_what_does_not_load_beside_it_goes(
    setup: ModuleType, commands: list[list[str]], tmp_path: Path
) -> None:
    assert setup.main(["--directory", str(tmp_path), "--only", "vllm", "--pip=--extra-index-url=URL"]) == 0
    python = str(tmp_path / "vllm" / "bin" / "python")
    assert commands[0] == [python, "-m", "pip", "install", "--extra-index-url=URL", setup.VLLM]
    assert commands[1] == [python, "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"]


def test_errors_are_one_line(
    setup: ModuleType,
    commands: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert setup.main(["--directory", str(tmp_path), "--only", "vllm", "--pip=broken"]) == 2
    assert capsys.readouterr().err.endswith(f"broken {setup.VLLM} ended with code 3\n")
    monkeypatch.setattr(setup.shutil, "which", lambda _: None)
    assert setup.main(["--directory", str(tmp_path), "--only", "llama.cpp"]) == 2
    assert capsys.readouterr().err == "error: llama.cpp needs Node 20 or newer with npm, and npm was not found\n"
    monkeypatch.setattr(setup.platform, "machine", lambda: "riscv64")
    assert setup.main(["--directory", str(tmp_path), "--only", "llama.cpp"]) == 2
    assert "no binaries for the CPU of Linux on riscv64" in capsys.readouterr().err
