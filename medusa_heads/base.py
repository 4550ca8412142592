"""The frozen base language model behind one small interface.

The only module that knows how transformers' causal LMs are called: heads, drafters and the trainer ask a `Base` for
embeddings, hidden states and vocabulary logits, and for a forward pass over a tree of tokens.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from medusa_heads.attention import FOLDED, fold_mask
from medusa_heads.chat import Message, render_chat
from medusa_heads.errors import ConfigError, UnsupportedModelError
from medusa_heads.fused import fuse_layers
from medusa_heads.norms import fuse_norms
from medusa_heads.prepack import can_prepack, is_plain, pack_linears, pack_siblings

ATTENTION_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class BaseOutput:
    """States of one forward pass; B rows of T tokens, hidden size h."""

    last_hidden_state: Tensor
    """(B, T, h), after the final norm: what the vocabulary projection reads."""
    layer_states: tuple[Tensor, ...] = ()
    """(B, T, h) for each layer asked for: the state *entering* that layer (0 is the embedding)."""


class Base:
    """A causal LM of transformers, frozen. Build it with `Base.load` or `Base.from_model`."""

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None):
        model.eval().requires_grad_(False)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.config = model.config.get_text_config()
        self.layer_kinds = _layer_kinds(self.config)
        self.sliding_window: int | None = getattr(self.config, "sliding_window", None)
        self._decoder = model.get_decoder()
        self.parameter_names = tuple(name for name, _ in self._decoder.named_parameters())
        """Of the decoder as it was loaded: packing hides some."""
        self._projection: nn.Module = model.get_output_embeddings()
        if self._projection is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no output embeddings to draft or verify with")
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._compiled: Any = None
        self.fixed_shapes = False
        """Whether the decoder should pad passes over trees to few shapes: compiled for a device that records them."""
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.hidden_size = int(self.config.hidden_size)
        self.num_layers = int(self.config.num_hidden_layers)
        self.vocab_size, features = _shape(self._projection)
        if features != self.hidden_size:
            raise UnsupportedModelError(
                f"{type(model).__name__} projects from {features} features, not from its hidden size "
                f"{self.hidden_size}: heads on hidden states cannot use its projection"
            )

    @classmethod
    def load(cls, name: str = "smollm2-135m", **options: Any) -> Base:
        """Loads an embedded name, a local directory, a Hub id or a `.gguf` file; see `medusa_heads.loading.load`."""
        from medusa_heads.loading import load

        return load(name, **options)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any = None, *, name: str = "", prepack: bool = False) -> Base:
        """Wraps a model that is already in memory. With `prepack` its linear layers are replaced by packed ones."""
        base = cls(model, tokenizer, name or str(getattr(model, "name_or_path", "")), None)
        if prepack:
            base.prepack()
        return base

    def prepack(self) -> int:
        """Packs the linear layers for the CPU, in place, and has norms and decoder layers computed in few operations.
        Returns how many linear layers; 0 where nothing can be packed."""
        _ = self.weights_hash, self.projection_weight
        if not can_prepack(self.device, self.dtype):
            return 0
        probe = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        count = pack_siblings(self._decoder, lambda: self.forward(probe))
        count += pack_linears(self.model, keep=self._projection)
        fuse_norms(self._decoder)
        if self.config._attn_implementation == FOLDED:
            fuse_layers(self._decoder, self._probe)
        self._projection = self.model.get_output_embeddings()
        return count

    def _probe(self) -> None:
        """A pass over five tokens, and one over a tree of three behind them."""
        cache = DynamicCache()
        positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6]], device=self.device)
        sees = torch.ones((1, 8, 8), dtype=torch.bool, device=self.device).tril()
        sees[0, 7, 6] = False  # its sibling
        for first, last in ((0, 5), (5, 8)):
            self.forward(
                torch.zeros((1, last - first), dtype=torch.long, device=self.device),
                position_ids=positions[:, first:last],
                attention_mask=sees[:, first:last, :last],
                key_positions=positions[:, :last],
                cache=cache,
            )

    def compile(self, *, fixed_shapes: bool | None = None, backend: Any = "inductor") -> None:
        """Has passes over trees (`forward` with `step`) run through `torch.compile`, from the first one on.

        Args:
            fixed_shapes: whether the decoder pads them to few shapes; default: on a GPU, whose CUDA graphs are recorded
                by shape.
            backend: of `torch.compile`.
        """
        from medusa_heads.compiling import CompiledDecoder

        gpu = self.device.type == "cuda"
        self.fixed_shapes = gpu if fixed_shapes is None else fixed_shapes
        cuda_graphs = gpu and self.fixed_shapes and backend == "inductor"
        self._compiled = CompiledDecoder(self._decoder, cuda_graphs=cuda_graphs, backend=backend)

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @property
    def device(self) -> torch.device:
        """Where hidden states come out: the device of the vocabulary projection."""
        weight: Any = self._projection.weight
        return weight.device

    @property
    def dtype(self) -> torch.dtype:
        weight: Any = self._projection.weight
        return weight.dtype if is_plain(weight) else self.model.dtype

    @property
    def max_positions(self) -> int | None:
        """Longest context the base was made for, in tokens."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return None if limit is None else int(limit)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text: the generation config's, else the model's, else the tokenizer's."""
        generation = getattr(self.model, "generation_config", None)
        for owner in (generation, self.config, self.tokenizer):
            ids = getattr(owner, "eos_token_id", None)
            if ids is not None:
                return tuple(ids) if isinstance(ids, Sequence) else (int(ids),)
        return ()

    @cached_property
    def projection_weight(self) -> Tensor:
        """(V, h), rows of the vocabulary projection as the checkpoint has them; of a quantised one unpacked: what its
        layer makes of each unit vector."""
        weight: Any = self._projection.weight
        if is_plain(weight):
            return weight.detach()
        with torch.no_grad():
            columns = self._projection(torch.eye(self.hidden_size, dtype=self.dtype, device=self.device))
        bias = self.projection_bias
        return (columns if bias is None else columns - bias).T.contiguous()

    @property
    def projection_bias(self) -> Tensor | None:
        """(V,) or None."""
        bias = getattr(self._projection, "bias", None)
        return None if bias is None else bias.detach()

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm whose output is the last hidden state; None where the decoder has none of its own."""
        children = list(self._decoder.named_children())
        return next((module for name, module in reversed(children) if "norm" in name or name == "ln_f"), None)

    @property
    def decoder(self) -> Any:
        """The model without its vocabulary projection: token ids or embeddings to states."""
        return self._decoder

    @property
    def query_groups(self) -> int:
        """Query heads that share a key head."""
        heads = int(self.config.num_attention_heads)
        return heads // int(getattr(self.config, "num_key_value_heads", None) or heads)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings: (...) → (..., h)."""
        return self.model.get_input_embeddings()(input_ids)

    def project(self, hidden_states: Tensor) -> Tensor:
        """Vocabulary logits: (..., h) → (..., V) in the base's dtype, equal to the base's own `logits`."""
        return self.rescale(self._projection(hidden_states))

    def project_rows(self, hidden_states: Tensor, ids: Tensor) -> Tensor:
        """Logits of the tokens `ids` alone: (..., h) → (..., len(ids))."""
        bias = self.projection_bias
        rows = torch.nn.functional.linear(
            hidden_states, self.projection_weight[ids], None if bias is None else bias[ids]
        )
        return self.rescale(rows)

    def rescale(self, logits: Tensor) -> Tensor:
        """What some families do to their logits after the projection, by the names their configs give it."""
        scale = getattr(self.config, "logit_scale", None)
        if scale is not None:
            logits = logits * scale
        divisor = getattr(self.config, "logits_scaling", None)
        if divisor is not None:
            logits = logits / divisor
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def decoder_layers(self) -> tuple[str, nn.ModuleList]:
        """The decoder's list of layers and its name there. Raises UnsupportedModelError where it cannot be told."""
        lists = [
            (name, module)
            for name, module in self._decoder.named_children()
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers
        ]
        if len(lists) != 1:
            raise UnsupportedModelError(
                f"{type(self._decoder).__name__} has {len(lists)} lists of {self.num_layers} modules: its layers "
                "cannot be told from others"
            )
        return lists[0]

    def first_layers(self, count: int) -> Base:
        """The base cut to its first `count` layers, before the same final norm and projection. All modules are shared,
        so that nothing is copied and what one computes is what the other does.

        Raises ConfigError for a count that is none, UnsupportedModelError where the layers cannot be told.
        """
        if not 0 < count < self.num_layers:
            raise ConfigError(f"the base has {self.num_layers} layers: its first {count} are not a part of them")
        name, layers = self.decoder_layers()
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = count
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            config.layer_types = list(kinds)[:count]
        decoder = copy.copy(self._decoder)
        decoder._modules = {**self._decoder._modules, name: nn.ModuleList(layers[:count])}
        decoder.config = config
        part = copy.copy(self)
        part._decoder, part.config, part.num_layers = decoder, config, count
        part._compiled, part.fixed_shapes = None, False
        part.layer_kinds = _layer_kinds(config)
        outside = self.num_parameters - sum(p.numel() for p in layers.parameters())
        part.num_parameters = outside + sum(p.numel() for p in layers[:count].parameters())
        return part

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        key_positions: Tensor | None = None,
        cache: Any = None,
        layers: Sequence[int] = (),
        step: bool = False,
    ) -> BaseOutput:
        """One pass over `input_ids` (B, T). Computes no logits.

        Args:
            position_ids: (B, T); default 0 … T - 1.
            attention_mask: None, causal over what the cache holds; (B, T) of 0/1, padding without a cache; or
                boolean (B, T, S), which of the S cache slots (the new tokens' own included) each token sees.
            key_positions: (B, S), the position of the token in each slot. Needed with a (B, T, S) mask where the
                base has sliding-window layers.
            cache: a transformers `Cache`, filled in place.
            layers: states to return beside the last; number i is the state entering layer i, and the number of layers
                stands for the last state itself.
            step: a pass of decoding, one of many alike: compiled, after `compile`. What it returns may be overwritten
                by the next one.
        """
        if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
        mask: Any = attention_mask
        if attention_mask is not None and attention_mask.dim() == 3:
            mask = self._layer_masks(attention_mask, position_ids, key_positions)
        arguments: dict[str, Any] = {"use_cache": cache is not None, self._cache_argument: cache}
        if layers:
            arguments["output_hidden_states"] = True
        decoder = self._compiled if step and self._compiled is not None else self._decoder
        out = decoder(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, **arguments)
        last = out.last_hidden_state
        return BaseOutput(last, tuple(last if i == self.num_layers else out.hidden_states[i] for i in layers))

    def _layer_masks(self, visible: Tensor, positions: Tensor | None, key_positions: Tensor | None) -> Any:
        """The 4-D mask that the model's attention wants; for a mixture of layer kinds, one for each kind."""
        masks = {}
        for kind in self.layer_kinds:
            seen = visible
            if kind == "sliding_attention":
                if positions is None or key_positions is None or self.sliding_window is None:
                    raise ValueError("a base with sliding-window layers needs position_ids and key_positions")
                distance = positions[:, :, None] - key_positions[:, None, :]
                seen = visible & (distance < self.sliding_window)
            masks[kind] = self._as_attention_mask(seen[:, None])
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_attention_mask(self, visible: Tensor) -> Tensor:
        if self.config._attn_implementation == FOLDED:
            return fold_mask(visible, self.query_groups, self.dtype)
        if self.config._attn_implementation != "eager":
            return visible
        hidden = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return hidden.masked_fill_(~visible, torch.finfo(self.dtype).min)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the base's own chat template: the one path for training and decoding."""
        if self.tokenizer is None:
            raise ConfigError(f"the base {self.name!r} was built without a tokenizer: it cannot render a chat")
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(f"the tokenizer of {self.name!r} has no chat template")
        return render_chat(self.tokenizer, messages, add_generation_prompt=add_generation_prompt)

    @cached_property
    def tokenizer_hash(self) -> str | None:
        """Fingerprint of the vocabulary, added tokens included."""
        if self.tokenizer is None:
            return None
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]

    @cached_property
    def weights_hash(self) -> str:
        """Fingerprint of the weights: the norms of all layers, rounded to bfloat16.

        Norms stay as they are when a model is quantised or loaded in another dtype, and differ between models.
        """
        digest = hashlib.sha256()
        for name, parameter in sorted(self._decoder.named_parameters()):
            if parameter.dim() == 1 and ("norm" in name.lower() or "ln_" in name):
                digest.update(parameter.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    def fingerprint(self) -> dict[str, Any]:
        """What heads remember of their base."""
        return {
            "base_model_name_or_path": self.name,
            "base_revision": self.revision,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "tokenizer_hash": self.tokenizer_hash,
            "weights_hash": self.weights_hash,
        }


def _shape(linear: Any) -> tuple[int, int]:
    """(rows, columns) of a linear layer's matrix, whatever its weight is packed into."""
    if is_plain(linear.weight):
        return int(linear.weight.shape[0]), int(linear.weight.shape[1])
    return int(linear.out_features), int(linear.in_features)


def _layer_kinds(config: Any) -> tuple[str, ...]:
    """The kinds of attention among the base's layers. Raises where one of them cannot take a tree."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    distinct = tuple(dict.fromkeys(kinds))
    unknown = [kind for kind in distinct if kind not in ATTENTION_KINDS]
    if unknown:
        raise UnsupportedModelError(
            f"the base ({config.model_type}) has layers of kind {', '.join(unknown)}: their state depends on the order "
            "of all tokens before, so branches of a tree cannot be scored in one pass"
        )
    return distinct
