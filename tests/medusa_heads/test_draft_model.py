"""Draft models as modules: a few layers of any base, saved as transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa_heads.base import Base
from medusa_heads.draft_model import KEY, Drafting, DraftModel, cut_config, drafting_in, drafting_of, spread_layers
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.hub import base_of
from tests.conftest import FAMILIES, tiny_base, tiny_tokenizer

IDS = torch.tensor([[5, 17, 40, 8, 61, 33, 12, 70, 21], [7, 3, 90, 4, 4, 18, 9, 30, 31]])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_are_the_base_and_one_is_saved_and_loaded_as_it_is(family: str, tmp_path: Path) -> None:
    base = tiny_base(family)
    whole = DraftModel(base, range(base.num_layers))
    assert torch.equal(whole(IDS, torch.float32), base.forward(IDS).last_hidden_state)

    draft = DraftModel(base, [base.num_layers - 1])
    draft.save_pretrained(tmp_path / "draft", draft.drafting(depth=4, width=2, nodes=9))
    wanted = base.project(draft(IDS, torch.float32))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    torch.testing.assert_close(model(IDS).logits, wanted, rtol=0, atol=2e-5)
    tied = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    assert (len(tied) == 1) == bool(base.config.tie_word_embeddings)
    loaded = Base.load(str(tmp_path / "draft"), dtype="float32")
    torch.testing.assert_close(loaded.project(loaded.forward(IDS).last_hidden_state), wanted, rtol=0, atol=2e-5)
    assert loaded.num_layers == 1 and loaded.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert base_of(tmp_path / "draft") == (base.name, None)


def test_only_the_layers_and_the_final_norm_are_its_own() -> None:
    base = tiny_base("gpt2")
    draft = DraftModel(base, [0])
    before = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    names = {name.split(".")[1] for name in draft.state_dict()}
    assert names == {"h", "ln_f"} and draft.num_parameters == sum(p.numel() for p in draft.parameters())
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in base.model.state_dict().items())


def test_the_base_may_be_packed_once_the_layers_are_copied(tmp_path: Path) -> None:
    base = tiny_base("qwen2")
    draft = DraftModel(base, [1])
    wanted = draft(IDS, torch.float32)
    draft.save_pretrained(tmp_path / "before", draft.drafting(2, 1, 3))
    assert base.prepack() > 0
    torch.testing.assert_close(draft(IDS, torch.float32), wanted)
    draft.save_pretrained(tmp_path / "after", draft.drafting(2, 1, 3))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after")]
    assert files[0] == files[1]


def test_lists_with_an_entry_a_layer_are_cut_to_the_layers() -> None:
    config = FAMILIES["gemma3"]()
    config.some_layer_sizes = [1, 2, 3]
    config.bad_words = [7, 8, 9]
    cut = cut_config(config, [0, 1])
    assert cut.layer_types == ["sliding_attention", "full_attention"] and cut.num_hidden_layers == 2
    assert cut.some_layer_sizes == [1, 2] and cut.bad_words == [7, 8, 9]
    assert config.num_hidden_layers == 3 and len(config.layer_types) == 3


def test_layers_are_spread_from_the_first_to_the_last() -> None:
    assert [spread_layers(k, 30) for k in (1, 2, 4)] == [(0,), (0, 29), (0, 10, 19, 29)]
    assert spread_layers(5, 5) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("layers", [[], [2], [-1], [1, 0], [0, 0]])
def test_layers_that_the_base_lacks_are_refused(layers: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"some of the base's 0 … 1, ascending"):
        DraftModel(tiny_base(), layers)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"depth": 0}, "depth of a draft must be at least 1, not 0"),
        ({"nodes": "many"}, "nodes of a draft must be at least 1, not 'many'"),
        ({"draft_ids": []}, "must name tokens, each once"),
        ({"draft_ids": [3, 3]}, "must name tokens, each once"),
        ({"draft_ids": "all"}, "must be token ids"),
        ({"draft_ids": [-1]}, "must be token ids"),
        ({"base_model_name_or_path": None}, "a base has a name"),
        ({"speed": 1}, "speed"),
    ],
)
def test_what_a_config_says_of_drafting_is_checked(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    data = {"base_model_name_or_path": "b", "depth": 3, "width": 1, "nodes": 4}
    assert drafting_of({KEY: data}, "x") == Drafting("b", 3, 1, 4)
    (tmp_path / "config.json").write_text(json.dumps({KEY: {**data, **changes}}))
    with pytest.raises(HeadsError, match=complaint) as error:
        drafting_in(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert drafting_of({}, "x") is None
