"""A small causal LM of a base's own kind: a few of its layers, before its own final norm and vocabulary projection.

Only the layers and the final norm are the draft model's. Whatever else the base's decoder has (embeddings, learned or
rotary positions) is the base's, used in place: no model file of transformers is copied or touched, and what one
computes from the same weights is what the other does. Saved, it is an ordinary causal LM directory of transformers,
the base's embeddings and projection included, which knows by the key `drafting` of its config how to draft.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa_heads.errors import ConfigError, HeadsError, UnsupportedModelError
from medusa_heads.formats.checkpoint import CONFIG, read_json
from medusa_heads.placing import placed

if TYPE_CHECKING:
    from medusa_heads.base import Base

KEY = "drafting"
"""Of config.json: the fields of `Drafting`."""
FILES = (
    *(CONFIG, "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "chat_template.jinja"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("metrics.json", "training_config.yaml", "README.md"),
)
"""What a draft model's directory may hold."""


@dataclass(frozen=True)
class Drafting:
    """What a draft model of this project's records beside its weights.

    Raises HeadsError for values that are none.
    """

    base_model_name_or_path: str
    """The base that it was trained to draft for."""
    depth: int
    """Tokens that a draft goes ahead at most, the nodes that are read in a pass, and the nodes of a tree, its root
    included: the limits that gained most on held-out text."""
    width: int
    nodes: int
    draft_ids: tuple[int, ...] | None = None
    """Tokens that it drafts, in order of their frequency; None: all."""
    base_revision: str | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise HeadsError(f"{KEY}: {name} of a draft must be at least 1, not {value!r}")
        names = (self.base_model_name_or_path, self.base_revision or "")
        if not all(isinstance(name, str) for name in names):
            raise HeadsError(f"{KEY}: a base has a name, not {self.base_model_name_or_path!r}")
        ids = self.draft_ids
        if ids is None:
            return
        if not isinstance(ids, (list, tuple)) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise HeadsError(f"{KEY}: draft_ids must be token ids")
        if not ids or len(set(ids)) != len(ids):
            raise HeadsError(f"{KEY}: draft_ids must name tokens, each once")


def drafting_of(config: Any, where: str) -> Drafting | None:
    """What a config of transformers, or its plain data, says of drafting; None for a model that is no draft model of
    this project's. Raises HeadsError, naming `where`, for what cannot be read."""
    data = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if data is None:
        return None
    try:
        return Drafting(**data)
    except TypeError as error:
        raise HeadsError(f"{where}: {KEY}: {str(error).replace('Drafting.__init__() ', '')}") from None
    except HeadsError as error:
        raise HeadsError(f"{where}: {error}") from None


def drafting_in(directory: Path) -> Drafting | None:
    """The same of a directory's config.json, without loading the model."""
    path = directory / CONFIG
    return drafting_of(read_json(path), str(path)) if path.is_file() else None


def spread_layers(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` layers of `num_layers`, evenly, the first and the last included.

    >>> spread_layers(3, 30)
    (0, 14, 29)
    """
    return tuple(round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count))


def cut_config(config: Any, layers: Sequence[int]) -> Any:
    """The config of a model with these layers of another one's. Lists with one entry a layer (`layer_types` and its
    like) keep the entries of these."""
    total = int(config.num_hidden_layers)
    cut = copy.deepcopy(config)
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == total:
            setattr(cut, name, [value[i] for i in layers])
    cut.num_hidden_layers = len(layers)
    return cut


class Borrowed(nn.Module):
    """A module of the base, called in place: neither trained nor saved nor moved with the module that it stands in."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._lender = (module,)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self._lender[0](*arguments, **options)


class DraftModel(nn.Module):
    """The layers and the final norm of a draft model, over the rest of its base.

    Args:
        base: not packed (`Base.load(prepack=False)`), for its layers are copied; it may be packed afterwards.
        layers: the base's layers to begin as copies of, ascending.
        draft_ids: (R,) tokens to draft from; None: all.

    Raises:
        ConfigError: layers that the base does not have.
        UnsupportedModelError: a base whose layers or final norm cannot be told.
    """

    def __init__(self, base: Base, layers: Sequence[int], draft_ids: Tensor | None = None):
        super().__init__()
        if list(layers) != sorted(set(layers)) or not layers or layers[0] < 0 or layers[-1] >= base.num_layers:
            raise ConfigError(
                f"layers of a draft model are some of the base's 0 … {base.num_layers - 1}, ascending: "
                f"not {list(layers)}"
            )
        norm = base.final_norm
        if norm is None:
            raise UnsupportedModelError(f"{type(base.decoder).__name__} has no final norm for a draft model to take")
        self.base = base
        self.layers = tuple(layers)
        self.draft_ids = None if draft_ids is None else draft_ids.to(base.device)
        self.config = cut_config(base.config, layers)
        _, own = base.decoder_layers()
        parts: dict[str, nn.Module] = {}
        for child, module in base.decoder.named_children():
            if module is own:
                parts[child] = nn.ModuleList(copy.deepcopy(own[i]) for i in layers)
            else:
                parts[child] = copy.deepcopy(module) if module is norm else Borrowed(module)
        decoder = copy.copy(base.decoder)
        decoder._modules = parts
        decoder._parameters, decoder._buffers = dict(decoder._parameters), dict(decoder._buffers)
        decoder.config = self.config
        self.decoder = decoder.float().requires_grad_(True)
        self.trained = tuple(child for child, module in parts.items() if not isinstance(module, Borrowed))

    @property
    def num_parameters(self) -> int:
        """Of the layers and the final norm; embeddings and projection are the base's."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """States (B, T, h) behind the final norm, of texts (B, T) padded on the right, computed in `dtype`."""
        embeddings = self.base.embed(input_ids).to(dtype)
        return self.decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state

    def drafting(self, depth: int, width: int, nodes: int) -> Drafting:
        """What is recorded with the weights."""
        ids = None if self.draft_ids is None else tuple(self.draft_ids.tolist())
        return Drafting(self.base.name, depth, width, nodes, ids, self.base.revision)

    def to_model(self, drafting: Drafting) -> Any:
        """A causal LM of transformers in the base's dtype; the embeddings and the projection are the base's tensors."""
        from transformers import AutoModelForCausalLM

        base = self.base
        config = copy.deepcopy(self.config)
        setattr(config, KEY, {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(drafting).items()})
        vars(config).pop("quantization_config", None)  # how the base's file was packed: these weights are not
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=base.dtype)
        tensors = {
            key: tensor
            for key, tensor in base.decoder.state_dict().items()
            if key.partition(".")[0] not in self.trained
        }
        for key, tensor in self.decoder.state_dict().items():
            if tensor.numel() == 0:
                raise HeadsError(f"{key} is empty: gather sharded parameters before saving")
            tensors[key] = tensor.detach().to(base.dtype) if tensor.is_floating_point() else tensor
        try:
            model.get_decoder().load_state_dict(tensors, strict=True, assign=True)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} of {len(self.layers)} layers has other tensors than its layers in "
                f"{base.name!r}: {' '.join(str(error).split())[:300]}"
            ) from None
        projection = model.get_output_embeddings()
        if config.tie_word_embeddings:
            model.tie_weights()
        else:
            projection.weight = nn.Parameter(base.projection_weight, requires_grad=False)
        if base.projection_bias is not None:
            projection.bias = nn.Parameter(base.projection_bias, requires_grad=False)
        generation = getattr(base.model, "generation_config", None)
        if generation is not None:
            model.generation_config = copy.deepcopy(generation)
        return model.eval()

    def write(self, drafting: Drafting, directory: Path) -> None:
        """The files that `AutoModelForCausalLM` and `AutoTokenizer` load, without transformers' progress bars."""
        from transformers.utils import logging

        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            self.to_model(drafting).save_pretrained(directory)
        finally:
            if shown:
                logging.enable_progress_bar()
        if self.base.tokenizer is not None:
            self.base.tokenizer.save_pretrained(directory)

    def save_pretrained(
        self, save_directory: str | Path, drafting: Drafting, *, extras: Mapping[str, str] | None = None
    ) -> None:
        """Writes a causal LM directory of transformers, the tokenizer's files included; it appears whole or not at all.

        Args:
            extras: further files by name, as text.

        Raises:
            HeadsError: the place holds something other than a draft model of this project's.
        """
        target = Path(save_directory)
        there = [path.name for path in target.iterdir()] if target.is_dir() else []
        if there and drafting_in(target) is None:
            raise HeadsError(f"cannot save a draft model at {target}: it holds something else")
        own = {name for name in there if any(fnmatch(name, pattern) for pattern in FILES)}
        with placed(target, own) as scratch:
            self.write(drafting, scratch)
            for name, text in (extras or {}).items():
                (scratch / name).write_text(text, encoding="utf-8")
            load_draft_model(scratch, self.base)


def load_draft_model(directory: Path, base: Base) -> Base:
    """A saved draft model on its base's device and in its dtype; whatever does not fit is an error."""
    from medusa_heads.base import Base

    return Base.load(str(directory), dtype=base.dtype, device=base.device, local_files_only=True)
