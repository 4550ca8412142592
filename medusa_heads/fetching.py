"""Where heads lie: a directory, an embedded name, or a repository of the Hub, of which only what heads need is
fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from medusa_heads.errors import HeadsError
from medusa_heads.formats import is_own
from medusa_heads.formats.checkpoint import CONFIG, SOURCES, shard_map

WEIGHTS = "model.safetensors"
EXTRAS = ("tree.json", "metrics.json", "training_config.yaml", "README.md")
ASSETS = Path(__file__).parent / "assets"
DEFAULT_HEADS = {"smollm2-135m": "smollm2-135m-medusa"}
"""The heads that the name of an embedded base stands for: the fastest of its embedded ones (docs/paradigms.md)."""

SAFE = tuple(name for names in SOURCES for name in names if ".safetensors" in name)
PICKLES = tuple(name for names in SOURCES for name in names if ".safetensors" not in name)
HEADS_PREFIXES = ("medusa_head.", "medusa_heads.")
"""Names of heads' tensors in a model that is stored together with its base."""


def embedded_heads() -> list[str]:
    """Names of the heads within the package, and of the bases whose name stands for some of them."""
    return sorted({*DEFAULT_HEADS, *(path.parent.name for path in ASSETS.glob(f"*/{CONFIG}"))})


def heads_directory(
    name: str | Path,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """The local directory of heads named by a path, an embedded name or a Hub id; fetched if need be.

    A path wins over an embedded name, and both over the Hub; the name of an embedded base stands for its fastest heads.
    A name without an owner is never asked for there. `revision` belongs to the Hub alone; `subfolder` is a directory
    below the named place. Pickles are fetched only from a repository without safetensors, and of a model that is stored
    together with its base only the shards that hold heads.
    """
    below = _below(subfolder)
    path = Path(name)
    if path.is_dir():
        return _existing(path / below, str(name), subfolder)
    embedded = ASSETS / DEFAULT_HEADS.get(str(name), str(name))
    if (embedded / CONFIG).is_file():
        return embedded / below
    if "/" not in str(name):  # repositories of the Hub are OWNER/NAME
        known = ", ".join(embedded_heads())
        raise HeadsError(f"no heads {str(name)!r}: not a directory, nor OWNER/NAME on the Hub, nor embedded ({known})")

    options: Any = {
        "token": token,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "force_download": force_download,
    }

    def fetch(files: Sequence[str], commit: str | None) -> Path:
        patterns = [str(below / file) for file in files]
        return Path(str(snapshot_download(str(name), revision=commit, allow_patterns=patterns, **options)))

    try:
        root = fetch([CONFIG, *SAFE, *EXTRAS], revision)
        commit, directory = root.name, root / below
        present = [file for file in SAFE if (directory / file).is_file()]
        if not present and not is_own(directory):
            fetch(PICKLES, commit)
            present = [file for file in PICKLES if (directory / file).is_file()]
        shards = [shard for file in present if file.endswith(".index.json") for shard in _shards(directory / file)]
        if shards and not (directory / WEIGHTS).is_file():
            fetch(shards, commit)
    except HFValidationError:
        raise HeadsError(f"no heads at {name}: not a directory, and not a valid repository id") from None
    except LocalEntryNotFoundError:
        raise HeadsError(
            f"no heads {str(name)!r}: not a directory, not in the cache, and the Hub is out of reach"
        ) from None
    except RepositoryNotFoundError:
        raise HeadsError(
            f"no heads {str(name)!r}: not a directory, and the Hub has no such repository for you"
        ) from None
    except RevisionNotFoundError:
        raise HeadsError(f"the heads {str(name)!r} have no revision {revision!r} on the Hub") from None
    except (HTTPError, OSError) as error:
        raise HeadsError(f"cannot fetch the heads {str(name)!r}: {one_line(error)}") from error
    return _existing(directory, str(name), subfolder)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _below(subfolder: str | None) -> PurePosixPath:
    """A relative path that stays below where it starts."""
    path = PurePosixPath(subfolder or "")
    if path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise HeadsError(f"the subfolder {subfolder!r} does not lie below the heads' place")
    return path


def _existing(directory: Path, name: str, subfolder: str | None) -> Path:
    if not directory.is_dir():
        raise HeadsError(f"the heads {name!r} have no subfolder {subfolder!r}")
    return directory


def _shards(index: Path) -> list[str]:
    """The shards that hold heads; all of them where no name tells heads from a base."""
    shards = shard_map(index)
    heads = {shard for name, shard in shards.items() if name.startswith(HEADS_PREFIXES)}
    return sorted(heads or set(shards.values()))
