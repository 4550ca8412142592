"""Decoder layers in few operations: the same states, for every family that has such layers, and for no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from decode.cache import TreeCache
from decode.tree import search_tree
from medusa_heads import fused
from medusa_heads.attention import FOLDED, register
from medusa_heads.base import Base
from medusa_heads.fused import FusedLayer, RotaryTables
from medusa_heads.prepack import can_prepack
from tests.conftest import tiny_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_prepack(CPU, torch.float32), reason="this torch cannot pack for this CPU")
HALF = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not can_prepack(CPU, torch.bfloat16), reason="this CPU has no bfloat16 arithmetic"),
)

IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(3))
TREE = search_tree([[0.5, 0.3, 0.2], [0.4, 0.3], [0.4, 0.2]], 14)
FUSED = ["llama", "llama-untied-biased", "qwen2", "qwen3", "mistral-window", "gemma"]
OTHERS = ["gemma2", "gemma3", "gpt_neox", "gpt2", "phi"]


def randomized(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model with small layers (so that they matter to each other) and norms that are not all one."""
    model = tiny_model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.rand(parameter.shape))
    return model.to(dtype)


def packed(model: Any) -> Base:
    register()
    model.set_attn_implementation(FOLDED)
    return Base.from_model(model, prepack=True)


def layers_of(base: Base) -> list[FusedLayer]:
    return [module for module in base.decoder.modules() if isinstance(module, FusedLayer)]


def tree_states(base: Base) -> Tensor:
    """Of two rows of different lengths, a tree behind each, after another tree of which a path was kept."""
    cache = TreeCache(base.num_layers, batch_size=2, capacity=16)
    base.forward(IDS, cache=cache)
    cache.commit([range(9), range(6)])
    states = []
    for tokens in (torch.arange(TREE.size) + 5, torch.arange(TREE.size) + 40):
        positions = cache.positions(torch.tensor(TREE.depths))
        output = base.forward(
            tokens.expand(2, -1),
            position_ids=positions,
            attention_mask=cache.visible(TREE.ancestor_mask),
            key_positions=cache.key_positions(positions),
            cache=cache,
            layers=(1,),
        )
        states += [output.last_hidden_state, *output.layer_states]
        cache.commit([TREE.path(TREE.size - 1), [0]])
    return torch.cat(states)


def close(ours: Tensor, theirs: Tensor) -> None:
    bound = 1e-4 if theirs.dtype == torch.float32 else 0.06
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("family", FUSED)
def test_layers_of_these_families_are_fused_and_states_of_trees_stay(family: str, dtype: torch.dtype) -> None:
    base = packed(randomized(family, dtype))
    assert len(layers_of(base)) == base.num_layers
    close(tree_states(base), tree_states(Base.from_model(randomized(family, dtype))))


@pytest.mark.parametrize("family", FUSED)
def test_a_pass_without_a_cache_and_one_with_transformers_own(family: str) -> None:
    base, bare = packed(randomized(family)), Base.from_model(randomized(family))
    close(base.forward(IDS).last_hidden_state, bare.forward(IDS).last_hidden_state)
    padded = torch.ones_like(IDS)
    padded[1, 5:] = 0
    ours, theirs = (b.forward(IDS, attention_mask=padded).last_hidden_state for b in (base, bare))
    close(ours[padded.bool()], theirs[padded.bool()])
    caches = DynamicCache(config=base.config), DynamicCache(config=bare.config)
    for piece in (IDS[:, :6], IDS[:, 6:7], IDS[:, 7:]):
        start = torch.tensor(caches[0].get_seq_length())
        positions = (start + torch.arange(piece.shape[1])).expand(2, -1)
        ours, theirs = (
            b.forward(piece, position_ids=positions, cache=c).last_hidden_state
            for b, c in zip((base, bare), caches, strict=True)
        )
        close(ours, theirs)


@pytest.mark.parametrize("family", OTHERS)
def test_layers_of_these_families_keep_their_own_forward(family: str) -> None:
    folds = randomized(family)._supports_sdpa
    base = packed(randomized(family)) if folds else Base.from_model(randomized(family), prepack=True)
    assert not layers_of(base)
    close(tree_states(base), tree_states(Base.from_model(randomized(family))))


def test_a_fused_layer_is_still_one_of_its_family() -> None:
    base = packed(randomized("llama"))
    kind = type(tiny_model("llama").model.layers[0])
    assert all(isinstance(layer, kind) for layer in base.decoder.layers)
    out = base.decoder(input_ids=IDS, output_hidden_states=True)
    assert len(out.hidden_states) == base.num_layers + 1, "transformers still finds the layers whose states it notes"


def changed(change: Any) -> Base:
    """A packed llama whose second layer's own forward was changed."""
    model = randomized("llama")
    change(model.model.layers[1])
    return packed(model)


def scaled_residual(layer: Any) -> None:
    kind = type(layer)

    class Scaled(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            return hidden_states + 0.9 * (kind.forward(self, hidden_states, **given) - hidden_states)

    layer.__class__ = Scaled


def clamped_values(layer: Any) -> None:
    """No probe reaches the clamp: only the operation shows it."""
    kind = type(layer)

    class Clamped(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            return kind.forward(self, hidden_states.clamp(-1e4, 1e4), **given)

    layer.__class__ = Clamped


def scaled_twice(layer: Any) -> None:
    layer.self_attn.scaling = 0.11  # read by both forwards: nothing to see


def unturned(layer: Any) -> None:
    kind = type(layer)

    class Unturned(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            cos, sin = given["position_embeddings"]
            return kind.forward(
                self, hidden_states, **{**given, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
            )

    layer.__class__ = Unturned


def more_parts(layer: Any) -> None:
    layer.mlp.extra = nn.Linear(2, 2)


def own_parameter(layer: Any) -> None:
    layer.self_attn.sinks = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize("change", [scaled_residual, clamped_values, unturned, more_parts, own_parameter])
def test_a_layer_that_differs_keeps_its_own_forward_and_the_others_are_fused(change: Any) -> None:
    base = changed(change)
    assert [isinstance(layer, FusedLayer) for layer in base.decoder.layers] == [True, False]
    assert not hasattr(base.decoder.layers[1], "block")
    bare = randomized("llama")
    change(bare.model.layers[1])
    close(tree_states(base), tree_states(Base.from_model(bare)))


def test_what_a_layer_holds_is_followed() -> None:
    base, bare = changed(scaled_twice), randomized("llama")
    scaled_twice(bare.model.layers[1])
    assert len(layers_of(base)) == 2
    close(tree_states(base), tree_states(Base.from_model(bare)))


def test_without_folded_attention_nothing_is_fused() -> None:
    assert not layers_of(Base.from_model(randomized("llama"), prepack=True))


def test_tables_turn_as_transformers_does_and_leave_values() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 5, 8, generator=generator) for n in (4, 2, 2))
    cos, sin = (torch.randn(2, 5, 4, generator=generator).repeat(1, 1, 2) for _ in range(2))
    tables = RotaryTables(turned=6, still=2)
    heads = torch.cat((q, k, v), dim=1).transpose(1, 2)
    c, s = tables.of(cos, sin)
    turned = (heads * c + heads.roll(4, -1) * s).transpose(1, 2)
    expected = torch.cat((*apply_rotary_pos_emb(q, k, cos, sin), v), dim=1)
    torch.testing.assert_close(turned, expected)
    assert tables.of(cos, sin)[0] is c, "laid out once for all layers of a pass"
    assert tables.of(cos.clone(), sin)[0] is not c


def test_probes_leave_no_hooks() -> None:
    base = packed(randomized("llama"))
    assert fused.fuse_layers(base.decoder, lambda: None) == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.decoder.layers)
