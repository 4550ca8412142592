"""Decoder layers in few operations.

A layer of a small base computes for microseconds and is called through seven modules, each with keyword arguments,
wrappers and views of its own; over one token that takes as long as its matrix products. Layers that are the usual
block (norm, rotary attention over grouped queries, norm, gated MLP, both added to what came in) here run as one
forward of about twenty operations on the layer's own modules: queries, keys and values are turned together, and the
rotation's tables are laid out once a pass for all layers.

No family is named. A layer is taken only if it has the block's parts and no others, calls no operation that the block
does not have (a clamp, a cap), and gives the same output on probes, a tree behind a cache among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_heads.attention import folded_attention
from medusa_heads.prepack import PackedSibling

PROBE_SCALES = (0.02, 1.0)
"""Of the layers' probed inputs: at the first an output is nearly all attention and MLP, at the second what is added to
it weighs as much."""

TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 3e-5}
"""By how much outputs may differ, relative to what the layer adds to its input: several times what rounding does."""

OPERATIONS = frozenset(["add", "mul", "neg", "cat", "packed_linear", "_linear_pointwise"])
"""What the block computes with, besides its norms, its activation and the attention."""

MOVES = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "transpose", "slice", "split_with_sizes", "split", "unsqueeze", "expand"),
        *("clone", "contiguous", "copy_", "detach", "detach_", "lift_fresh", "select", "_to_copy"),
    }
)
"""What changes no number."""


class RotaryTables:
    """cos and sin as a layer's queries, keys and values are multiplied with them together, kept for one pass.

    With d the size of a head and x a query or key, transformers turns x · cos + (−x₂, x₁) · sin; (x₂, x₁) is x rolled
    by d/2, and the sign goes into sin. Values are turned by nothing: cos 1, sin 0.
    """

    def __init__(self, turned: int, still: int):
        self.turned, self.still = turned, still
        self._held: tuple[Tensor, Tensor, Tensor] | None = None

    def of(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, d) each → (B, T, turned + still heads, d) each."""
        held = self._held
        if held is None or held[0] is not cos:
            half = cos.shape[-1] // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
            still = cos.new_zeros((*cos.shape[:2], self.still, cos.shape[-1]))
            held = (
                cos,
                torch.cat((cos[:, :, None].expand(-1, -1, self.turned, -1), still + 1), dim=2),
                torch.cat((signed[:, :, None].expand(-1, -1, self.turned, -1), still), dim=2),
            )
            self._held = held
        return held[1], held[2]


@dataclass(frozen=True, slots=True)
class Block:
    """A layer's parts as plain functions: looking up and calling modules is a good part of a small layer's time."""

    norm: Callable[[Tensor], Tensor]
    qkv: Callable[[Tensor], Tensor]
    head_norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None
    tables: RotaryTables
    output: Callable[[Tensor], Tensor]
    middle_norm: Callable[[Tensor], Tensor]
    gate_up: Callable[[Tensor], Tensor]
    act: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]
    heads: int
    groups: int
    """Key heads."""
    size: int
    """Of a head."""
    scaling: float
    index: int


def block_of(layer: Any, tables: RotaryTables) -> Block:
    """The parts of a layer that `_has_parts`."""
    attention, mlp = layer.self_attn, layer.mlp
    normed = "q_norm" in _children(attention)
    return Block(
        norm=layer.input_layernorm.forward,
        qkv=attention.q_proj.siblings.joint.forward,
        head_norms=(attention.q_norm.forward, attention.k_norm.forward) if normed else None,
        tables=tables,
        output=attention.o_proj.forward,
        middle_norm=layer.post_attention_layernorm.forward,
        gate_up=mlp.gate_proj.siblings.joint.forward,
        act=mlp.act_fn.forward,
        down=mlp.down_proj.forward,
        heads=tables.turned - tables.still,
        groups=tables.still,
        size=attention.head_dim,
        scaling=attention.scaling,
        index=attention.layer_idx,
    )


class FusedLayer(nn.Module):
    """What a decoder layer's class becomes: the layer's own modules and parameters, another forward.

    Mixed in before the layer's own class, so that whoever looks for layers of that class finds it. A compiler sees the
    layer's own forward.
    """

    block: Block
    self_attn: nn.Module

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """As the layer's own: (B, T, h) → (B, T, h)."""
        if torch.compiler.is_compiling():
            return super().forward(hidden_states, **given)
        block = self.block
        batch, length, _ = hidden_states.shape
        q, k, v = _attended(block, hidden_states, given)
        out, _ = folded_attention(self.self_attn, q, k, v, given["attention_mask"], scaling=block.scaling)
        middle = hidden_states + block.output(out.reshape(batch, length, -1))
        gate, up = block.gate_up(block.middle_norm(middle)).chunk(2, -1)
        return middle + block.down(block.act(gate) * up)


def _attended(block: Block, hidden_states: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, T, d), and the keys and values (B, G, S, d) that they see: the cache's, these tokens' among
    them."""
    batch, length, _ = hidden_states.shape
    sizes = (block.heads, block.groups, block.groups)
    heads = block.qkv(block.norm(hidden_states)).view(batch, length, -1, block.size)
    if block.head_norms is not None:
        q, k, v = heads.split(sizes, dim=2)
        heads = torch.cat((block.head_norms[0](q), block.head_norms[1](k), v), dim=2)
    cos, sin = block.tables.of(*given["position_embeddings"])
    turned = torch.addcmul(heads * cos, heads.roll(block.size // 2, -1), sin).transpose(1, 2)
    store: Any = given.get("past_key_values") if given.get("cache") is None else given["cache"]
    room = None if not hasattr(store, "room") else store.room(block.index, length)
    if room is not None:
        target, k, v = room
        target.copy_(turned[:, block.heads :].view(batch, 2, block.groups, length, block.size).transpose(0, 1))
        return turned[:, : block.heads], k, v
    q, k, v = turned.split(sizes, dim=1)
    if store is not None:
        k, v = store.update(k, v, block.index)
    return q, k, v


@dataclass
class _Calls:
    """What one layer was given and gave, call by call."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    arguments: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """How many went in by place, and those by name."""
    operations: set[str] = field(default_factory=set)


def fuse_layers(decoder: nn.Module, run: Callable[[], object]) -> int:
    """Has the decoder's layers that are the usual block run as `FusedLayer`, in place. Returns how many.

    Args:
        run: passes of the decoder that call each layer, behind an empty cache and behind one that holds tokens.
    """
    candidates: list[Any] = [
        module for module in decoder.modules() if not isinstance(module, FusedLayer) and _has_parts(module)
    ]
    if not candidates:
        return 0
    before = [_calls(candidates, run, scale) for scale in PROBE_SCALES]
    layers = [layer for layer in candidates if all(_as_expected(layer, calls[layer]) for calls in before)]
    tables: dict[tuple[int, int], RotaryTables] = {}
    for layer in layers:
        q, k, _ = (size // layer.self_attn.head_dim for size in layer.self_attn.q_proj.siblings.sizes)
        layer.block = block_of(layer, tables.setdefault((q, k), RotaryTables(q + k, k)))
        layer.__class__ = type(f"Fused{type(layer).__name__}", (FusedLayer, type(layer)), {})
    after = [_calls(candidates, run, scale) for scale in PROBE_SCALES]
    agreeing = [x for x in layers if all(_agree(b[x], a[x]) for b, a in zip(before, after, strict=True))]
    for layer in set(layers) - set(agreeing):
        layer.__class__ = type(layer).__mro__[2]
        del layer.block
    return len(agreeing)


class _Watch(TorchDispatchMode):
    """Notes the operations called while a module is the innermost of those inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[tuple[nn.Module, set[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            self.inside[-1][1].add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _calls(layers: Sequence[Any], run: Callable[[], object], scale: float) -> dict[nn.Module, _Calls]:
    """The layers' calls in `run`, each given random states of that scale in place of the layer's before it."""
    calls = {layer: _Calls() for layer in layers}
    generator = torch.Generator().manual_seed(0)
    watch = _Watch()

    def give(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        states = (scale * torch.randn(states.shape, generator=generator)).to(states)
        calls[layer].inputs.append(states)
        calls[layer].arguments.append((len(args), kwargs))
        watch.inside.append((layer, calls[layer].operations))
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    def take(layer: nn.Module, args: Any, output: Any) -> None:
        watch.inside.pop()
        calls[layer].outputs.append(output)

    handles = [layer.register_forward_pre_hook(give, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(take) for layer in layers]
    for part in (part for layer in layers for part in _shared_parts(layer)):
        handles.append(part.register_forward_pre_hook(lambda module, _: watch.inside.append((module, set()))))
        handles.append(part.register_forward_hook(lambda *_: watch.inside.pop() and None))
    try:
        with watch:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _shared_parts(layer: Any) -> list[nn.Module]:
    """Modules that the fused forward calls as the layer's own does, whatever they compute."""
    return [module for name, module in layer.named_modules() if name.endswith("norm")] + [layer.mlp.act_fn]


def _as_expected(layer: Any, calls: _Calls) -> bool:
    """Whether the layer is called as the fused forward is, gives states, and computes nothing that the block does
    not."""
    foreign = [x for x in calls.operations - OPERATIONS - MOVES if "scaled_dot_product" not in x]
    for places, named in calls.arguments:
        tables = named.get("position_embeddings")
        if places > 1 or "attention_mask" not in named or not isinstance(tables, tuple) or len(tables) != 2:
            return False
        if tables[0].shape[-1] != layer.self_attn.head_dim:
            return False
    return not foreign and all(isinstance(output, Tensor) for output in calls.outputs)


def _agree(before: _Calls, after: _Calls) -> bool:
    for given, theirs, ours in zip(before.inputs, before.outputs, after.outputs, strict=True):
        added = (theirs.float() - given.float()).norm()
        if not (ours.float() - theirs.float()).norm() <= TOLERANCE[theirs.dtype] * added:
            return False
    return True


def _has_parts(module: Any) -> bool:
    """Whether a module has the parts of the block and none else, packed as the fused forward wants them."""
    if set(_children(module)) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = module.self_attn, module.mlp
    if set(_children(attention)) - {"q_norm", "k_norm"} != {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return False
    if set(_children(mlp)) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    size = getattr(attention, "head_dim", None)
    norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if name in _children(attention)]
    own = [x for part in (module, attention, mlp) for x in (*part._parameters.values(), *part._buffers.values())]
    return (
        all(x is None for x in own)
        and isinstance(size, int)
        and isinstance(getattr(attention, "layer_idx", None), int)
        and isinstance(getattr(attention, "scaling", None), float)
        and len(norms) != 1
        and all(tuple(weight.shape) == (size,) for norm in norms for weight in norm.parameters())
        and _packed_together([attention.q_proj, attention.k_proj, attention.v_proj])
        and _packed_together([mlp.gate_proj, mlp.up_proj])
        and attention.k_proj.out_features == attention.v_proj.out_features
        and all(p.out_features % size == 0 for p in (attention.q_proj, attention.k_proj))
        and mlp.gate_proj.out_features == mlp.up_proj.out_features
    )


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Without those that do nothing when a model answers."""
    return {n: m for n, m in module.named_children() if not isinstance(m, nn.Dropout | nn.Identity)}


def _packed_together(projections: Sequence[nn.Module]) -> bool:
    """Whether these are all the parts of one product, in this order."""
    first = projections[0]
    return isinstance(first, PackedSibling) and [
        (p.siblings, p.index) if isinstance(p, PackedSibling) else None for p in projections
    ] == [(first.siblings, i) for i in range(len(first.siblings.sizes))]
