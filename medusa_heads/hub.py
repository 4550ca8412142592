"""Saving, loading and sharing heads, on huggingface_hub's own mixin.

A heads' directory holds `config.json`, `model.safetensors` and, as training leaves them, `tree.json` (the draft tree),
`metrics.json`, `training_config.yaml` and `README.md` (the model card). It is written beside its place, checked and
renamed, so that a directory with that name is always whole.
"""

from __future__ import annotations

import functools
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub import ModelHubMixin
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medusa_heads.config import OWN_TYPE, HeadsConfig, config_from_dict
from medusa_heads.draft_model import drafting_in
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.fetching import EXTRAS, WEIGHTS, heads_directory, one_line
from medusa_heads.formats import base_of_foreign, foreign_facts, is_own, read_foreign
from medusa_heads.formats.checkpoint import CONFIG, read_json
from medusa_heads.formats.reading import Reading
from medusa_heads.placing import placed

if TYPE_CHECKING:
    from medusa_heads.base import Base

LOG = logging.getLogger(__name__)

H = TypeVar("H", bound="HeadsHubMixin")


def read_config(directory: Path) -> HeadsConfig:
    """The config of a directory in this project's layout."""
    path = directory / CONFIG
    if not path.is_file():
        raise HeadsError(f"{directory} has no {CONFIG}: not a directory of heads")
    try:
        return config_from_dict(read_json(path))
    except (ConfigError, TypeError) as error:
        raise HeadsError(f"{path}: {error}") from None


def open_heads(directory: Path, base: Base | None = None, named: str | None = None) -> Reading:
    """The heads of a directory in this project's layout or another's, as tensors; the latter are logged with what they
    were taken for.

    Args:
        base: what some formats leave to the base is taken from it.
        named: a base whose config is asked for that instead, if it lies on this machine.
    """
    _check_is_heads(directory)
    if is_own(directory):
        weights = directory / WEIGHTS
        return Reading(OWN_TYPE, read_config(directory), read_weights(weights), weights)
    reading = read_foreign(directory, base, named)
    LOG.warning("%s", reading)
    return reading


def base_of(directory: Path) -> tuple[str | None, str | None]:
    """The name and revision of the base that heads or a draft model say they belong to; no weights are read for it."""
    _check_is_heads(directory)
    drafting = drafting_in(directory)
    if drafting is not None:
        return drafting.base_model_name_or_path, drafting.base_revision
    if not is_own(directory):
        return base_of_foreign(directory), None
    config = read_config(directory)
    return config.base_model_name_or_path, config.base_revision


def family_of(directory: Path) -> str:
    """The family of heads that a directory holds, in this project's layout or another's; no weights are read for it."""
    _check_is_heads(directory)
    return read_config(directory).family if is_own(directory) else foreign_facts(directory)[0]


def _check_is_heads(directory: Path) -> None:
    if not (directory / CONFIG).is_file():
        raise HeadsError(f"{directory} has no {CONFIG}: not a directory of heads")


def weights_file(directory: Path) -> Path:
    """The file that heads are told from others by: the weights, or the index of them."""
    return directory / WEIGHTS if is_own(directory) else foreign_facts(directory)[1]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. No pickle is ever read here."""
    if not path.is_file():
        raise HeadsError(f"{path.parent} has no {path.name}")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise HeadsError(f"{path} is damaged or no safetensors file: {error}") from None


def load_exact(module: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Loads tensors into a module; a missing, unexpected or misshapen one is an error that names it."""
    expected = module.state_dict()
    missing = sorted(set(expected) - set(tensors))
    unexpected = sorted(set(tensors) - set(expected))
    if missing or unexpected:
        raise HeadsError(f"{where}: missing tensors {missing or 'none'}, unexpected tensors {unexpected or 'none'}")
    for key, tensor in tensors.items():
        if tensor.shape != expected[key].shape:
            raise HeadsError(
                f"{where}: {key} has shape {tuple(tensor.shape)}; config asks {tuple(expected[key].shape)}"
            )
        if tensor.is_floating_point() != expected[key].is_floating_point():
            raise HeadsError(f"{where}: {key} has dtype {tensor.dtype}; the module's is {expected[key].dtype}")
    module.load_state_dict(dict(tensors), assign=True)


def check_base(config: HeadsConfig, base: Base, check_weights: bool = True) -> None:
    """Raises HeadsError, naming both sides, unless the heads were trained on this base."""
    ours = base.fingerprint()
    names = ["hidden_size", "vocab_size", "tokenizer_hash"] + (["weights_hash"] if check_weights else [])
    for name in names:
        trained_on = getattr(config, name)
        if trained_on is not None and ours[name] is not None and trained_on != ours[name]:
            raise HeadsError(
                f"these heads belong to another base: {name} is {trained_on!r} for {config.base_model_name_or_path!r}, "
                f"on which they were trained, and {ours[name]!r} for {base.name!r}"
            )


class HeadsHubMixin(ModelHubMixin, library_name="medusa-heads", tags=["medusa-heads", "speculative-decoding"]):
    """`from_pretrained`, `save_pretrained` and `push_to_hub` for heads."""

    config: HeadsConfig

    def check_loaded(self) -> None:
        """Raises ValueError where loaded tensors fit the config in shape but not in content."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[H],
        name: str | Path,
        *,
        base: Base | None = None,
        check_weights: bool = True,
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        dtype: torch.dtype | None = None,
    ) -> H:
        """Heads from a directory, an embedded name or a Hub id, in this project's layout or another's that
        `medusa_heads.formats` knows.

        Args:
            base: check that the heads were trained on it, and put them on its device in its dtype.
            check_weights: False accepts a base whose norms differ (a fine-tune of the trained one).
            dtype: default the base's, or without a base the file's.

        Raises:
            HeadsError: not found, damaged, tensors missing, unexpected or misshapen, or another base.
        """
        directory = heads_directory(
            name,
            revision=revision,
            subfolder=subfolder,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
        )
        return cls.from_reading(open_heads(directory, base), base=base, check_weights=check_weights, dtype=dtype)

    @classmethod
    def from_reading(
        cls: type[H],
        reading: Reading,
        *,
        base: Base | None = None,
        check_weights: bool = True,
        dtype: torch.dtype | None = None,
    ) -> H:
        """Heads from tensors that are read already; arguments and errors as in `from_pretrained`."""
        config = reading.config
        ours = getattr(cls, "config_class", None)
        if ours is not None and not isinstance(config, ours):
            raise HeadsError(f"{reading.where.parent} holds {config.family} heads, which {cls.__name__} does not read")
        if base is not None:
            check_base(config, base, check_weights)
        heads = cls(config)
        module: Any = heads
        load_exact(module, reading.tensors, str(reading.where))
        floats = {p.dtype for p in module.parameters()}
        if len(floats) > 1:  # copies of a base's weights in another dtype than the heads'
            module.to(functools.reduce(torch.promote_types, floats))
        try:
            heads.check_loaded()
        except ValueError as error:
            raise HeadsError(f"{reading.where}: {error}") from None
        if base is not None:
            module.to(device=base.device, dtype=dtype or base.dtype)
        elif dtype is not None:
            module.to(dtype=dtype)
        return module.eval()

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        extras: Mapping[str, str] | None = None,
        dtype: torch.dtype | None = torch.bfloat16,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **push_options: Any,
    ) -> str | None:
        """Writes the heads' directory; it appears whole or not at all.

        A directory that holds anything but heads is never replaced.

        Args:
            extras: further files by name, as text: tree.json, metrics.json, training_config.yaml, README.md. Files of
                a directory that is overwritten and not named here are gone.
            dtype: of the stored weights; None keeps them as they are.
        """
        target = Path(save_directory)
        unknown = sorted(set(extras or {}) - set(EXTRAS))
        if unknown:
            raise ValueError(f"unknown files {unknown}; a heads' directory holds {EXTRAS} beside config and weights")
        with placed(target, {CONFIG, WEIGHTS, *EXTRAS}) as scratch:
            self._save_pretrained(scratch, dtype=dtype)
            for name, text in (extras or {}).items():
                (scratch / name).write_text(text, encoding="utf-8")
            type(self).from_pretrained(scratch)
        if push_to_hub:
            return self.push_directory(target, repo_id or target.name, **push_options)
        return None

    def _save_pretrained(self, save_directory: Path, dtype: torch.dtype | None = torch.bfloat16) -> None:
        module: Any = self
        tensors = {}
        for key, tensor in module.state_dict().items():
            if tensor.numel() == 0:
                raise HeadsError(f"{key} is empty: gather sharded parameters before saving")
            stored = tensor.detach().to("cpu", copy=True).contiguous()
            tensors[key] = stored.to(dtype) if dtype is not None and stored.is_floating_point() else stored
        (save_directory / CONFIG).write_text(json.dumps(self.config.to_dict(), indent=2) + "\n")
        save_file(tensors, save_directory / WEIGHTS, metadata={"format": "pt"})

    def push_to_hub(self, repo_id: str, *, extras: Mapping[str, str] | None = None, **options: Any) -> str:
        """Uploads the heads with their model card. `options` go to `HfApi.create_repo` and `upload_folder`.

        Returns the commit's address. Without a README.md among `extras`, the card is written from the config.
        """
        from medusa_heads.card import model_card

        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / "heads"
            files = dict(extras or {})
            module: Any = self
            files.setdefault("README.md", model_card(self.config, module.num_parameters, repo=repo_id))
            self.save_pretrained(directory, extras=files)
            return self.push_directory(directory, repo_id, **options)

    @staticmethod
    def push_directory(
        directory: Path,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload heads",
    ) -> str:
        """Uploads a heads' directory as it is; returns the commit's address, or raises HeadsError."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        try:
            repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            info = api.upload_folder(
                repo_id=repo, folder_path=directory, commit_message=commit_message, revision=revision
            )
        except (HTTPError, OSError, ValueError) as error:
            raise HeadsError(f"cannot push the heads to {repo_id!r}: {one_line(error)}") from error
        return str(info.commit_url)
