"""What every family of heads must show in training; what is Medusa's alone is in `test_train_heads`."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

import train.train_heads as script
from decode.drafters import DraftRow, load_drafter
from decode.engine import Decoder, GenerationSettings
from medusa_heads import Base
from medusa_heads.families import load_heads
from tests.train.helpers import save_tiny_base, tiny_config
from tests.train.runs import assert_same_weights, launch, logged, make_place, repeated, run, weights
from train import features
from train.data import encode_rows, load_chat_rows
from train.features import FeaturesError
from train.simulate import walk_rows
from train.states import LiveStates

EAGLE1 = {
    "heads": {"family": "eagle", "version": 1},
    "loss": {"unroll": 3, "teacher_weight": 1.0, "feature_weight": 1.0, "feature_noise": 0.2},
}
EAGLE3 = {
    "heads": {"family": "eagle", "version": 3, "layers": [0, 1]},
    "loss": {"unroll": 3, "acceptance_weight": 0.5, "acceptance": "log", "teacher_weight": 1.0, "sampled_rows": 30},
}
HYDRA = {"heads": {"family": "hydra", "num_heads": 3, "num_layers": 2}, "loss": {"teacher_weight": 0.5}}
PREFIXED = {"heads": {"family": "hydra", "num_heads": 3, "prefix_attention": True, "own_projection": True}}
LAST = {"heads": {"family": "eagle", "version": 3, "layers": [1, 2]}, "loss": {"unroll": 3}}
FAMILIES = {"eagle1": EAGLE1, "eagle3": EAGLE3, "eagle3-last": LAST, "hydra": HYDRA, "hydra-prefix": PREFIXED}
"""Those that read more than single states."""
ALL = {"medusa": {}, **FAMILIES}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny base, chat rows, and the states of all positions."""
    return make_place(tmp_path_factory.mktemp("families"), positions="all", layers=[0, 1])


def whole(directory):
    return {"directory": str(directory / "states"), "dtype": "float32", "positions": "all", "layers": [0, 1]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_learns_resumes_bit_for_bit_and_leaves_a_drafter(place, tmp_path, family, monkeypatch):
    settings = {**FAMILIES[family], "features": whole(place), "checkpoint_every": 5, "epochs": 8}
    settings["optimizer"] = {"learning_rate": 1e-2, "warmup_steps": 2}
    out = run(place, tmp_path / "whole", max_steps=10, **settings)
    losses = [row["loss"] for row in logged(out)]
    assert losses[-1] < losses[0]

    real = script.save_checkpoint

    def save_and_die(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "save_checkpoint", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            run(place, tmp_path / "parts", max_steps=10, **settings)
    torch.manual_seed(999)
    assert_same_weights(out, run(place, tmp_path / "parts", max_steps=10, **settings))

    metrics = json.loads((out / "metrics.json").read_text())
    assert len(metrics["evaluation"]["greedy"]["top_accuracy"]) == 3
    assert len(metrics["evaluation"]["greedy"]["conditional_accuracy"][2]) == 10
    grown = metrics["dynamic_acceptance_length_by_nodes"]["greedy"]
    assert grown["8"] >= 1.0 and metrics["tree_acceptance_length"]["greedy"] == grown["6"]
    base = Base.load(str(place / "base"), dtype="float32")
    drafter = load_drafter(str(out), base)
    assert (drafter.choice.likeliest.depth, drafter.choice.likeliest.nodes) == (3, 6)
    card = (out / "README.md").read_text()
    assert f"{metrics['tree_acceptance_length']['greedy']:.2f}" in card and f"{metrics['parameters']:,}" in card


@pytest.mark.parametrize("family", ["medusa", "eagle1", "eagle3", "hydra-prefix"])
def test_live_states_train_the_same_heads_as_cached_ones(place, tmp_path, family):
    settings = {**ALL[family], "max_steps": 1, "positions_per_step": 10_000}
    out = run(place, tmp_path / "live", features={"directory": None}, **settings)
    training = json.loads((out / "metrics.json").read_text())["training"]
    assert training["base_tokens_per_second"] > training["tokens_per_second"] > 0
    assert 0 < training["share_of_base_speed"] < 1
    live, cached = weights(out), weights(run(place, tmp_path / "cached", features=whole(place), **settings))
    for key in live:
        torch.testing.assert_close(live[key].float(), cached[key].float(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["medusa", "eagle1", "hydra-prefix"])
def test_two_processes_train_what_one_does(place, tmp_path, family):
    outputs = []
    for processes, accumulation in ((1, 1), (2, 2)):
        output = tmp_path / f"by-{processes}"
        data = tiny_config(
            place,
            output=str(output),
            gradient_accumulation_steps=accumulation,
            max_steps=4,
            **{**ALL[family], "features": whole(place)},
        )
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
        done = launch(["--config", str(tmp_path / "c.yaml")], processes)
        assert done.returncode == 0, done.stderr[-2000:]
        assert f"{processes} process(es)" in done.stdout
        outputs.append(output)
    one, two = map(weights, outputs)
    for key in one:
        torch.testing.assert_close(one[key].float(), two[key].float(), rtol=1e-2, atol=2e-5)
    for a, b in zip(*map(logged, outputs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["accuracy_head_0"] == pytest.approx(b["accuracy_head_0"])


def test_a_cache_of_answers_is_refused_where_whole_rows_are_read(place, tmp_path):
    short = {"directory": str(tmp_path / "states"), "dtype": "float32"}
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(tiny_config(place, features=short)))
    assert features.main(["--config", str(tmp_path / "f.yaml")]) == 0
    for settings, message in ((HYDRA, "positions: all.*positions: answers"), (EAGLE3, "layer_0, layer_1")):
        with pytest.raises(FeaturesError, match=message):
            run(place, tmp_path / "heads", features=short, **settings)


OVERFIT = {
    "eagle1": {"heads": {"family": "eagle", "version": 1}, "loss": {"unroll": 3}},
    "eagle3": {"heads": {"family": "eagle", "version": 3, "layers": [0, 1]}, "loss": {"unroll": 3}},
    "eagle3-last": {"heads": {"family": "eagle", "version": 3, "layers": [0, 2]}, "loss": {"unroll": 3}},
    "hydra": {"heads": {"family": "hydra", "num_heads": 3, "num_layers": 2}},
    "hydra-prefix": {"heads": {"family": "hydra", "num_heads": 3, "num_layers": 2, "prefix_attention": True}},
}
ALONE = {"features": {"directory": None}, "log_every": 100, "epochs": 300}


@pytest.mark.parametrize("family", OVERFIT)
def test_heads_overfitted_on_one_answer_get_the_full_depth_accepted(tmp_path, family):
    """The base's own greedy answer is learned by heart; then every round accepts three tokens and gets one more."""
    save_tiny_base(tmp_path / "base")
    base = Base.load(str(tmp_path / "base"), dtype="float32")
    prompt = base.render_chat([{"role": "user", "content": "go"}])
    new = 33
    answer = Decoder(base).generate(prompt, GenerationSettings(max_new_tokens=new, eos_token_ids=())).token_ids
    text = base.tokenizer.decode(answer, skip_special_tokens=False)
    assert base.tokenizer(text, add_special_tokens=False)["input_ids"] == answer
    repeated(tmp_path, text)
    out = run(
        tmp_path,
        tmp_path / "heads",
        data={"paths": [str(tmp_path / "rows.jsonl")], "held_out": 0.0},
        optimizer={"learning_rate": 0.01, "warmup_steps": 5},
        evaluation={"tree_nodes": 4, "tree_width": 1},
        **OVERFIT[family],
        **ALONE,
    )
    drafter = load_drafter(str(out), base)
    result = Decoder(base, drafter).generate(prompt, GenerationSettings(max_new_tokens=new, eos_token_ids=()))
    assert result.token_ids == answer
    assert result.stats.base_forwards == 1 + (new - 1) // 4  # one token from the prefill, then four a round
    # What training said it would be: the same rounds, walked along the text.
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["tree_acceptance_length"]["greedy"] == pytest.approx(new / result.stats.base_forwards)


@pytest.mark.parametrize("family", OVERFIT)
def test_on_periodic_text_each_step_learns_its_own_offset(tmp_path, family):
    """A step that is off by one would learn another token of the period: 7 distinct letters, offsets 2 to 4."""
    save_tiny_base(tmp_path / "base")
    period = "abcdefg"
    repeated(tmp_path, period * 6)
    out = run(
        tmp_path,
        tmp_path / "heads",
        data={"paths": [str(tmp_path / "rows.jsonl")], "held_out": 0.0},
        optimizer={"learning_rate": 0.01, "warmup_steps": 5},
        **OVERFIT[family],
        **{**ALONE, "epochs": 150},
    )
    base = Base.load(str(tmp_path / "base"), dtype="float32")
    prompt = base.render_chat([{"role": "user", "content": "go"}])
    text = prompt + base.tokenizer(period * 6, add_special_tokens=False)["input_ids"]
    drafter = load_drafter(str(out), base, width=1, nodes=4)
    for t in range(len(prompt) - 1, len(text) - 5):
        session = drafter.start([DraftRow(text[: t + 1], 0.0, torch.Generator())])
        states = base.forward(torch.tensor([text[: t + 1]]), layers=drafter.layers)
        session.observe(states, torch.tensor([text[: t + 1]]), [list(range(t + 1))])
        assert session.draft([text[t + 1]]).tokens[0].tolist() == text[t + 1 : t + 5], t
    assert load_heads(out).num_parameters == json.loads((out / "metrics.json").read_text())["parameters"]


def test_walking_a_text_counts_what_decoding_it_does(place, tmp_path):
    """Unfinished heads, whose rounds accept now none and now some: greedy decoding of the same answer takes as many
    forwards of the base."""
    out = run(place, tmp_path / "heads", max_steps=12, features=whole(place), **EAGLE1)
    base = Base.load(str(place / "base"), dtype="float32")
    prompt = base.render_chat([{"role": "user", "content": "tell me"}])
    drafter = load_drafter(str(out), base, depth=3, width=4, nodes=30)
    settings = GenerationSettings(max_new_tokens=40, eos_token_ids=())
    result = Decoder(base, drafter).generate(prompt, settings)
    answer = base.tokenizer.decode(result.token_ids, skip_special_tokens=False)
    row = {"id": "a", "finished": False, "temperature": 0.0}
    messages = [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": answer}]
    (tmp_path / "row.jsonl").write_text(json.dumps({**row, "messages": messages}) + "\n")
    examples, _ = encode_rows(base, load_chat_rows([tmp_path / "row.jsonl"]))
    assert list(examples[0].input_ids) == prompt + result.token_ids
    walk = walk_rows(drafter, base, LiveStates(base, examples), [0])
    assert (walk.tokens, walk.forwards) == (40, result.stats.base_forwards)
    assert result.stats.base_forwards < 40
