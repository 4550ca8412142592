"""Medusa heads of other projects: every layout gives the function that its tensors describe."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.base import Base
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.families import load_heads
from medusa_heads.formats import read_foreign
from medusa_heads.hub import base_of
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_base
from tests.medusa_heads.formats.layouts import (
    HIDDEN,
    VOCAB,
    random_tensors,
    sequence_shapes,
    store,
    store_sharded,
    vllm_shapes,
)

X = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
SAID: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/base"}


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base()


def expected(weights: list[list[tuple[Tensor, Tensor]]], projections: list[Tensor]) -> Tensor:
    """(heads, 5, V) of the blocks' weights and biases, and a projection a head."""
    logits = []
    for blocks, projection in zip(weights, projections, strict=True):
        x = X
        for weight, bias in blocks:
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        logits.append(x @ projection.T)
    return torch.stack(logits)


def by_sequence(tensors: dict[str, Tensor], heads: int, layers: int, prefix: str = "") -> list[Any]:
    return [
        [(tensors[f"{prefix}{i}.{j}.linear.weight"], tensors[f"{prefix}{i}.{j}.linear.bias"]) for j in range(layers)]
        for i in range(heads)
    ]


def logits(heads: MedusaHeads, base: Base) -> Tensor:
    with torch.no_grad():
        return heads.head_logits(heads(X), base)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [1, 2])
def test_heads_with_projections_of_their_own(
    tmp_path: Path, base: Base, file: str, layers: int, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = random_tensors(sequence_shapes(3, layers, own=True))
    store(tmp_path, SAID, file, tensors)
    with caplog.at_level(logging.WARNING):
        heads = load_heads(tmp_path, base=base)
    own = [tensors[f"{i}.{layers}.weight"] for i in range(3)]
    torch.testing.assert_close(logits(heads, base), expected(by_sequence(tensors, 3, layers), own))
    assert (heads.config.num_heads, heads.config.num_layers, heads.config.vocab_size) == (3, layers, VOCAB)
    assert heads.config.base_model_name_or_path == "org/base"
    title = "Medusa v0.1" if file.endswith(".pt") else "Medusa, TGI V1"
    assert f"read as {title}; config.json says 2 heads, the tensors are of 3: the tensors count" in caplog.text


def test_heads_that_share_the_bases_projection(tmp_path: Path, base: Base) -> None:
    tensors = random_tensors(sequence_shapes(2, 1, own=False))
    store(tmp_path, SAID | {"version": "2"}, "medusa_lm_head.safetensors", tensors)
    heads = MedusaHeads.from_pretrained(tmp_path, base=base)
    projection = base.projection_weight
    torch.testing.assert_close(logits(heads, base), expected(by_sequence(tensors, 2, 1), [projection] * 2))
    with pytest.raises(
        BaseNeeded, match=r"share the projection of their base \(org/base\) and do not say how many rows"
    ):
        MedusaHeads.from_pretrained(tmp_path)
    store(tmp_path, SAID | {"vocab_size": VOCAB}, "medusa_lm_head.safetensors", tensors)
    assert MedusaHeads.from_pretrained(tmp_path).config.vocab_size == VOCAB


def test_a_merged_model_is_read_of_its_heads_alone_and_is_its_own_base(tmp_path: Path, base: Base) -> None:
    tensors = random_tensors(sequence_shapes(2, 1, own=True, prefix="medusa_head."))
    names = sorted(tensors)
    rest = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), names[0]: tensors[names[0]]}
    shards = {"a.safetensors": rest, "b.safetensors": {name: tensors[name] for name in names[1:]}}
    store_sharded(tmp_path, {"model_type": "llama", "medusa_num_heads": 2, "medusa_num_layers": 1}, shards)
    heads = load_heads(tmp_path, base=base)
    own = [tensors[f"medusa_head.{i}.1.weight"] for i in range(2)]
    torch.testing.assert_close(logits(heads, base), expected(by_sequence(tensors, 2, 1, "medusa_head."), own))
    assert base_of(tmp_path) == (str(tmp_path), None)
    assert heads.config.base_model_name_or_path == str(tmp_path)


@pytest.mark.parametrize(
    ("block", "projection", "title"),
    [
        ("medusa_heads.{i}.{j}.linear", "medusa_heads.{i}.2.weight", "ModelOpt Medusa"),
        ("medusa_heads.{i}.medusa_layers.{j}.linear", "medusa_heads.{i}.lm_head.weight", "TensorRT-LLM Medusa"),
    ],
)
def test_nvidias_names(tmp_path: Path, base: Base, block: str, projection: str, title: str) -> None:
    plain = random_tensors(sequence_shapes(2, 2, own=True))
    named = {}
    for i in range(2):
        for j in range(2):
            for part in ("weight", "bias"):
                named[f"{block.format(i=i, j=j)}.{part}"] = plain[f"{i}.{j}.linear.{part}"]
        named[projection.format(i=i)] = plain[f"{i}.2.weight"]
    config = {"medusa": {"num_medusa_heads": 2, "num_medusa_layers": 2}}
    store(tmp_path, config, "model.safetensors", named | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)})
    assert read_foreign(tmp_path).format == title
    own = [plain[f"{i}.2.weight"] for i in range(2)]
    torch.testing.assert_close(logits(load_heads(tmp_path), base), expected(by_sequence(plain, 2, 2), own))
    store(tmp_path, {"medusa": {"num_medusa_layers": 1}}, "model.safetensors", named)
    with pytest.raises(HeadsError, match="says 1 blocks a head, the tensors are of 2"):
        read_foreign(tmp_path)


def test_blocks_that_are_one_module_may_be_stored_once(tmp_path: Path, base: Base) -> None:
    tensors = random_tensors(sequence_shapes(2, 1, own=False))
    own = random_tensors({"0.3.weight": (VOCAB, HIDDEN), "1.3.weight": (VOCAB, HIDDEN)}, seed=1)
    store(tmp_path, {"medusa_num_layers": 3}, "medusa_lm_head.pt", tensors | own)
    reading = read_foreign(tmp_path)
    assert "each head's 3 blocks are one, of which the file holds a single copy" in reading.notes
    blocks = [head * 3 for head in by_sequence(tensors, 2, 1)]
    found = logits(load_heads(tmp_path), base)
    torch.testing.assert_close(found, expected(blocks, [own["0.3.weight"], own["1.3.weight"]]))


def test_a_number_of_blocks_that_only_the_config_gives_is_ambiguous(tmp_path: Path, base: Base) -> None:
    tensors = random_tensors(sequence_shapes(2, 1, own=False))
    store(tmp_path, SAID | {"medusa_num_layers": 2}, "medusa_lm_head.safetensors", tensors)
    with pytest.raises(HeadsError, match="says 2 blocks a head, the tensors are of 1: ambiguous"):
        load_heads(tmp_path, base=base)


# vLLM


def by_vllm(tensors: dict[str, Tensor], heads: int, layers: int) -> list[Any]:
    zero = torch.zeros(HIDDEN)
    return [
        [
            (tensors[f"blocks.{i}.layers.{j}.weight"], tensors.get(f"blocks.{i}.layers.{j}.bias", zero))
            for j in range(layers)
        ]
        for i in range(heads)
    ]


VLLM: dict[str, Any] = {
    "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "num_heads": 2, "num_hidden_layers": 2, "medusa_fc_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
def test_vllm_heads_with_projections(tmp_path: Path, base: Base, bias: bool) -> None:
    shapes = vllm_shapes(2, 2, {"lm_heads.0.weight": VOCAB, "lm_heads.1.weight": VOCAB}, bias)
    tensors = random_tensors(shapes)
    store(tmp_path, VLLM | {"medusa_fc_bias": bias}, "model.safetensors", tensors)
    own = [tensors[f"lm_heads.{i}.weight"] for i in range(2)]
    heads = load_heads(tmp_path, base=base)
    torch.testing.assert_close(logits(heads, base), expected(by_vllm(tensors, 2, 2), own))


def test_biases_that_vllm_would_drop_are_read_and_said(tmp_path: Path, base: Base) -> None:
    tensors = random_tensors(vllm_shapes(1, 1, {"lm_heads.0.weight": VOCAB}))
    store(tmp_path, {k: v for k, v in VLLM.items() if k != "medusa_fc_bias"}, "model.safetensors", tensors)
    assert "config.json does not set medusa_fc_bias" in str(read_foreign(tmp_path))
    found = logits(load_heads(tmp_path), base)
    torch.testing.assert_close(found, expected(by_vllm(tensors, 1, 1), [tensors["lm_heads.0.weight"]]))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
@pytest.mark.parametrize("cut", [True, False])
def test_vllms_common_projection_over_a_draft_vocabulary(tmp_path: Path, base: Base, name: str, cut: bool) -> None:
    ids = torch.tensor([40, 3, 95, 7])
    tensors = random_tensors(vllm_shapes(2, 2, {}))
    rows = base.projection_weight[ids] if cut else base.projection_weight
    config = VLLM | {"original_lm_head": True, "truncated_vocab_size": 4}
    store(tmp_path, config, "model.safetensors", tensors | {name: rows.clone(), "token_map": ids})
    heads = load_heads(tmp_path, base=base)
    assert not heads.config.own_projection and torch.equal(heads.draft_ids, ids)
    wanted = expected(by_vllm(tensors, 2, 2), [base.projection_weight[ids]] * 2)
    torch.testing.assert_close(logits(heads, base), wanted)
    assert not load_heads(tmp_path).config.own_projection, "taken for the base's own where it is not at hand"


def test_a_common_projection_that_is_not_the_bases_is_kept(tmp_path: Path, base: Base) -> None:
    tensors = random_tensors(vllm_shapes(2, 2, {"lm_head.weight": VOCAB}))
    store(tmp_path, VLLM | {"original_lm_head": True}, "model.safetensors", tensors)
    reading = read_foreign(tmp_path, base)
    assert "its common projection is not that of 'tiny-llama': each head keeps a copy" in reading.notes
    heads = MedusaHeads.from_reading(reading, base=base)
    wanted = expected(by_vllm(tensors, 2, 2), [tensors["lm_head.weight"]] * 2)
    torch.testing.assert_close(logits(heads, base), wanted)


# What does not fit


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("1.0.linear.bias"), r"Medusa names of 2 heads and 1 blocks, but 1\.0\.linear\.bias is missing"),
        (drop("1.1.weight"), r"but 1\.1\.weight is missing"),
        (put("4.0.linear.weight", torch.zeros(HIDDEN, HIDDEN)), r"of 5 heads and 1 blocks, but .* is missing"),
        (put("0.0.linear.scale", torch.zeros(1)), r"unexpected tensors 0\.0\.linear\.scale"),
        (put("00.0.linear.weight", torch.zeros(HIDDEN, HIDDEN)), r"unexpected tensors 00\.0\.linear\.weight"),
        (put("0.0.linear.bias", torch.zeros(31)), r"0\.0\.linear\.bias has shape \(31,\).* should be \(32,\)"),
        (put("0.0.linear.weight", torch.zeros(HIDDEN, 31)), r"0\.0\.linear\.weight has shape \(32, 31\)"),
        (put("1.1.weight", torch.zeros(VOCAB - 1, HIDDEN)), r"1\.1\.weight has shape \(95, 32\)"),
        (put("0.0.linear.bias", torch.zeros(HIDDEN, dtype=torch.int64)), "dtype torch.int64, not a floating"),
        (put("0.0.linear.bias", torch.zeros(HIDDEN).to(torch.float8_e4m3fn)), "a tensor of torch.float8_e4m3fn"),
        (put("0.0.linear.bias", torch.zeros(0)), r"0\.0\.linear\.bias is empty"),
    ],
)
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str, file: str
) -> None:
    tensors = random_tensors(sequence_shapes(2, 1, own=True))
    change(tensors)
    store(tmp_path, SAID, file, tensors)
    with pytest.raises(HeadsError, match=message) as error:
        load_heads(tmp_path)
    assert str(tmp_path / file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        ({"original_lm_head": True}, {}, "original_lm_head is set, and no tensors could be it"),
        ({}, {"lm_head.weight": (VOCAB, HIDDEN)}, "its config does not set original_lm_head"),
        ({"truncated_vocab_size": 3}, {"token_map": (4,)}, "token_map is torch.float32 of shape"),
    ],
)
def test_vllm_configs_and_tensors_that_disagree(
    tmp_path: Path, config: dict[str, Any], extra: dict[str, tuple[int, ...]], message: str
) -> None:
    store(tmp_path, VLLM | config, "model.safetensors", random_tensors(vllm_shapes(2, 2, {}) | extra))
    with pytest.raises(HeadsError, match=message):
        load_heads(tmp_path)


def test_a_draft_vocabulary_of_another_size_than_said(tmp_path: Path) -> None:
    tensors = random_tensors(vllm_shapes(2, 2, {"lm_head.weight": 4})) | {"token_map": torch.tensor([1, 2, 3, 4])}
    config = VLLM | {"original_lm_head": True, "truncated_vocab_size": 3}
    store(tmp_path, config, "model.safetensors", tensors)
    with pytest.raises(HeadsError, match="token_map has 4 ids; truncated_vocab_size is 3"):
        load_heads(tmp_path)


def test_two_heads_in_one_directory_are_ambiguous(tmp_path: Path) -> None:
    store(tmp_path, SAID, "medusa_lm_head.pt", random_tensors(sequence_shapes(2, 1, own=True)))
    store(tmp_path, SAID, "model.safetensors", random_tensors(sequence_shapes(1, 1, own=True, prefix="medusa_head.")))
    with pytest.raises(HeadsError, match=r"could be read in 2 ways \(model.safetensors as medusa, medusa_lm_head.pt"):
        load_heads(tmp_path)


def test_a_twin_that_is_not_read_is_said(tmp_path: Path) -> None:
    tensors = random_tensors(sequence_shapes(2, 1, own=True))
    store(tmp_path, SAID, "medusa_lm_head.pt", tensors)
    store(tmp_path, SAID, "medusa_lm_head.safetensors", tensors)
    assert "medusa_lm_head.pt beside medusa_lm_head.safetensors was not read" in read_foreign(tmp_path).notes


def test_heads_of_another_family_are_told_from_these(tmp_path: Path, base: Base) -> None:
    from medusa_heads.eagle import EagleHeads

    store(tmp_path, SAID, "medusa_lm_head.pt", random_tensors(sequence_shapes(2, 1, own=True)))
    with pytest.raises(HeadsError, match="holds medusa heads, which EagleHeads does not read"):
        EagleHeads.from_pretrained(tmp_path)
