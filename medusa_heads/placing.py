"""Directories that appear whole or not at all: written beside their place, checked, renamed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from medusa_heads.errors import HeadsError


@contextmanager
def placed(target: Path, replaceable: Collection[str]) -> Iterator[Path]:
    """An empty directory to fill; when the block ends without an error it takes the place of `target`.

    Raises HeadsError before anything is written if `target` is no directory, or holds a file whose name is not among
    `replaceable`.
    """
    check_replaceable(target, replaceable)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            file.chmod(0o644)
        _put_in_place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_replaceable(target: Path, replaceable: Collection[str]) -> None:
    if target.exists() and not target.is_dir():
        raise HeadsError(f"cannot save heads at {target}: it is there, and not a directory")
    foreign = sorted({path.name for path in target.iterdir()} - set(replaceable)) if target.exists() else []
    if foreign:
        raise HeadsError(f"cannot save heads at {target}: it holds other files ({', '.join(foreign[:5])})")


def _put_in_place(made: Path, target: Path) -> None:
    """Renames `made` to `target`. A directory that was there is moved aside first, and back if that fails."""
    if not target.exists():
        made.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    old = aside / target.name
    try:
        target.rename(old)
        made.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)
