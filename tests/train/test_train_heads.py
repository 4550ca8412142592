from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

import train.train_heads as script
from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder, GenerationSettings
from medusa_heads import Base, MedusaHeads
from medusa_heads.errors import ConfigError, HeadsError
from tests.train.helpers import save_tiny_base
from tests.train.runs import assert_same_weights, logged, make_place, repeated, run
from train.checkpoint import checkpoints
from train.config import TrainingConfig, build


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny base, chat rows, and the states of both."""
    return make_place(tmp_path_factory.mktemp("training"))


def test_a_run_leaves_a_whole_heads_directory(place, tmp_path):
    out = run(place, tmp_path / "heads", heads={"num_heads": 3, "num_layers": 2, "draft_vocab_size": 6})
    names = {"config.json", "model.safetensors", "tree.json", "metrics.json", "training_config.yaml", "README.md"}
    assert {p.name for p in out.iterdir()} == names
    base = Base.load(str(place / "base"), dtype="float32")
    drafter = MedusaDrafter.from_pretrained(out, base)
    assert drafter.tree.size <= 6 and len(drafter.heads.draft_ids) == 6
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["evaluated_on"] == "held-out rows"
    greedy = metrics["evaluation"]["greedy"]
    assert len(greedy["top_accuracy"]) == 3 and len(greedy["top_accuracy"][0]) == 10
    assert greedy["top_accuracy"][0] == sorted(greedy["top_accuracy"][0])
    assert metrics["parameters"] == 3 * 2 * (32 * 32 + 32)
    assert metrics["training"]["peak_memory_bytes"] > 2**20
    assert all(type(metrics["training"][name]) is int for name in ("steps", "positions", "tokens"))
    assert build(TrainingConfig, yaml.safe_load((out / "training_config.yaml").read_text())).output == str(out)
    losses = [row["loss"] for row in logged(out)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": {"teacher_weight": 1.0}},
        {"loss": {"teacher_weight": 0.5, "teacher_temperature": 0.5, "sampled_rows": 20}},
        {"optimizer": {"name": "muon", "learning_rate": 0.02, "warmup_steps": 2}},
    ],
)
def test_ten_steps_equal_five_and_five_bit_for_bit(place, tmp_path, changes):
    settings = {"epochs": 8, "checkpoint_every": 5, **changes}
    whole = run(place, tmp_path / "whole", max_steps=10, **settings)
    assert logged(whole)[-1]["epoch"] > 1

    output, real, calls = tmp_path / "parts", script.save_checkpoint, []

    def save_and_die(*arguments):
        calls.append(real(*arguments))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "save_checkpoint", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            run(place, output, max_steps=10, **settings)
    assert [c.name for c in calls] == ["checkpoint-0000005"] and not output.exists()
    torch.manual_seed(999)
    assert_same_weights(whole, run(place, output, max_steps=10, **settings))
    done, same = (json.loads((d / "metrics.json").read_text())["training"] for d in (whole, output))
    assert done["steps"] == 10 and all(done[k] == same[k] for k in ("steps", "positions", "tokens"))
    assert same["positions_per_second"] == pytest.approx(same["positions"] / same["seconds"])
    assert [row["step"] for row in logged(output)] == [2, 4, 6, 8, 10]


def test_an_evaluation_that_failed_is_made_again_without_training(place, tmp_path, monkeypatch):
    settings = {"max_steps": 5, "checkpoint_every": 4}
    whole = run(place, tmp_path / "whole", **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(place, tmp_path / "heads", **settings)
    assert not (tmp_path / "heads").exists()
    monkeypatch.setattr(script, "plan_epoch", lambda *arguments: pytest.fail("a step was planned"))
    assert_same_weights(whole, run(place, tmp_path / "heads", **settings))


@pytest.mark.parametrize("known", [True, False])
def test_a_run_resumed_at_its_end_tells_what_the_whole_run_did(place, tmp_path, known):
    settings = {"max_steps": 4, "features": {"directory": None}}
    first = json.loads((run(place, tmp_path / "heads", **settings) / "metrics.json").read_text())["training"]
    record = checkpoints(tmp_path / "heads.run")[-1] / "run.json"
    made = json.loads(record.read_text())
    if not known:  # as an older version wrote it
        del made["totals"]
    record.write_text(json.dumps(made))
    again = json.loads((run(place, tmp_path / "heads", **settings) / "metrics.json").read_text())["training"]
    figures = ("steps", "positions", "tokens", "seconds", "positions_per_second", "tokens_per_second")
    assert [again[name] for name in figures] == ([first[name] for name in figures] if known else [4, *[0] * 5])
    assert first["share_of_base_speed"] > 0 and "share_of_base_speed" not in again


@pytest.mark.parametrize("family", ["medusa", "draft_model"])
def test_an_output_that_may_not_be_replaced_is_refused_before_training(place, tmp_path, monkeypatch, family):
    monkeypatch.setattr(Base, "load", lambda *arguments, **options: pytest.fail("the base was loaded"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("…")
    with pytest.raises(HeadsError, match=r"cannot save .* at .*mine"):
        run(place, tmp_path / "mine", heads={"family": family})
    (tmp_path / "file").write_text("…")
    with pytest.raises(HeadsError, match="not a directory"):
        run(place, tmp_path / "file", heads={"family": family})
    assert not (tmp_path / "mine.run").exists()


def test_ctrl_c_saves_and_the_same_command_goes_on(place, tmp_path):
    whole = run(place, tmp_path / "whole", max_steps=6)
    output, real = tmp_path / "stopped", script.plan_epoch

    def interrupt_in_step_one(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "plan_epoch", interrupt_in_step_one)
        with pytest.raises(SystemExit) as stop:
            run(place, output, max_steps=6)
    assert stop.value.code == 130
    assert [c.name for c in checkpoints(Path(str(output) + ".run"))] == ["checkpoint-0000001"]
    assert_same_weights(whole, run(place, output, max_steps=6))


def test_heads_with_projections_of_their_own_train_them(place, tmp_path):
    out = run(place, tmp_path / "own", max_steps=4, heads={"num_heads": 2, "num_layers": 1, "own_projection": True})
    base = Base.load(str(place / "base"), dtype="float32")
    heads = MedusaHeads.from_pretrained(out, base=base)
    for projection in heads.lm_heads:
        assert (projection.weight - base.projection_weight).abs().max() > 1e-3


def test_a_checkpoint_of_other_settings_is_refused(place, tmp_path):
    run(place, tmp_path / "a", max_steps=4, checkpoint_every=2)
    with pytest.raises(ConfigError, match="optimizer"):
        run(place, tmp_path / "a", max_steps=4, checkpoint_every=2, optimizer={"learning_rate": 0.5})


@pytest.mark.parametrize(("size", "rows"), [(6, 7), (None, 10_000)])
def test_more_sampled_rows_than_there_are_is_refused_before_training(place, tmp_path, size, rows):
    heads = {"num_heads": 2, "num_layers": 1, "draft_vocab_size": size}
    with pytest.raises(ConfigError, match=rf"loss\.sampled_rows is {rows}, but the heads draft from \d+ rows"):
        run(place, tmp_path / "heads", heads=heads, loss={"sampled_rows": rows})
    run(place, tmp_path / "heads", max_steps=1, heads={**heads, "draft_vocab_size": 6}, loss={"sampled_rows": 6})


def test_the_precision_that_a_launch_sets_is_checked_too(place, tmp_path, monkeypatch):
    class Launched(script.Accelerator):
        mixed_precision = "fp16"

    monkeypatch.setattr(script, "Accelerator", Launched)
    with pytest.raises(ConfigError, match="muon does not go with fp16"):
        run(place, tmp_path / "heads", optimizer={"name": "muon"})


@pytest.mark.parametrize("change", ["rows", "sizes", "tokens"])
def test_a_checkpoint_of_other_data_is_refused(place, tmp_path, change):
    def train_on(lines):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = {"paths": [str(tmp_path / "rows.jsonl")], "held_out": 0.2}
        heads = {"num_heads": 2, "num_layers": 1, "draft_vocab_size": 6}
        run(place, tmp_path / "a", max_steps=2, features={"directory": None}, data=data, heads=heads)

    lines = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    train_on(lines)
    train_on(lines)
    if change == "rows":
        lines = lines[::-1]
    for line in lines:
        answer = line["messages"][1]
        if change == "sizes":
            answer["content"] += "a"
        elif change == "tokens":  # as many, but others, and so another draft vocabulary
            answer["content"] = answer["content"].translate(str.maketrans("abcdef", "uvwxyz"))
    with pytest.raises(ConfigError, match=r"the data are others than those that .*checkpoint-0000002 was made with"):
        train_on(lines)


def test_the_command_line_names_what_is_wrong_without_a_traceback(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("output: x\nstep: 3\n")
    assert script.main(["--config", str(tmp_path / "c.yaml")]) == 2
    shown = capsys.readouterr()
    assert "unknown key step" in shown.err and "Traceback" not in shown.err


def test_on_periodic_text_each_head_learns_its_own_offset(tmp_path):
    """A head that is off by one would learn another token of the period: 7 distinct letters, offsets 2 to 5."""
    save_tiny_base(tmp_path / "base")
    period = "abcdefg"
    repeated(tmp_path, period * 8)
    out = run(
        tmp_path,
        tmp_path / "heads",
        features={"directory": None},
        data={"paths": [str(tmp_path / "rows.jsonl")], "held_out": 0.0},
        heads={"num_heads": 4, "num_layers": 1},
        epochs=150,
        optimizer={"learning_rate": 0.02, "warmup_steps": 5},
        log_every=50,
    )
    base = Base.load(str(tmp_path / "base"), dtype="float32")
    heads = MedusaHeads.from_pretrained(out, base=base)
    prompt = base.render_chat([{"role": "user", "content": "go"}])
    answer = base.tokenizer(period * 8, add_special_tokens=False)["input_ids"]
    states = base.forward(torch.tensor([prompt + answer])).last_hidden_state[0]
    guesses = heads.head_logits(heads(states), base).argmax(-1)
    for head in range(4):
        for t in range(len(prompt) - 1, len(prompt) + len(answer) - 2 - head):
            assert guesses[head, t] == answer[t + 2 + head - len(prompt)], (head, t)


def test_heads_overfitted_on_one_answer_get_the_full_depth_accepted(tmp_path):
    """The base's own greedy answer is learned by heart; then every round accepts the whole chain."""
    save_tiny_base(tmp_path / "base")
    base = Base.load(str(tmp_path / "base"), dtype="float32")
    prompt = base.render_chat([{"role": "user", "content": "go"}])
    new = 33
    answer = Decoder(base).generate(prompt, GenerationSettings(max_new_tokens=new, eos_token_ids=())).token_ids
    text = base.tokenizer.decode(answer, skip_special_tokens=False)
    if base.tokenizer(text, add_special_tokens=False)["input_ids"] != answer:
        pytest.fail("the answer does not survive its text; choose another seed for the tiny model")
    repeated(tmp_path, text)
    out = run(
        tmp_path,
        tmp_path / "heads",
        features={"directory": None},
        data={"paths": [str(tmp_path / "rows.jsonl")], "held_out": 0.0},
        heads={"num_heads": 3, "num_layers": 2},
        epochs=300,
        optimizer={"learning_rate": 0.02, "warmup_steps": 5},
        log_every=100,
        evaluation={"tree_nodes": 4},
    )
    drafter = MedusaDrafter.from_pretrained(out, base)
    assert drafter.tree.depth == 3
    result = Decoder(base, drafter).generate(prompt, GenerationSettings(max_new_tokens=new, eos_token_ids=()))
    assert result.token_ids == answer
    # One token from the prefill, then four a round.
    assert result.stats.base_forwards == 1 + (new - 1) // 4


def test_a_checkpoint_goes_on_after_a_setting_was_added_and_refuses_one_that_changed(place, tmp_path):
    settings = {"epochs": 8, "checkpoint_every": 2}
    whole = run(place, tmp_path / "whole", max_steps=4, **settings)
    out = run(place, tmp_path / "heads", max_steps=4, **settings)
    for late in checkpoints(Path(f"{out}.run"))[1:]:
        shutil.rmtree(late)
    record = checkpoints(Path(f"{out}.run"))[0] / "run.json"
    made = json.loads(record.read_text())
    before = yaml.safe_load(made["config"])
    del before["data"]["max_positions"], before["optimizer"]["name"], made["data"]  # as an older version wrote it
    record.write_text(json.dumps(made | {"config": yaml.safe_dump(before)}))
    assert_same_weights(whole, run(place, tmp_path / "heads", max_steps=4, **settings))
    with pytest.raises(ConfigError, match="other settings of data, seed"):
        data = {"paths": [str(place / "rows.jsonl")], "held_out": 0.2, "max_positions": 50}
        run(place, tmp_path / "heads", max_steps=4, seed=1, data=data, **settings)


def test_fewer_positions_leave_the_held_out_rows_as_they_are(place, tmp_path, capsys):
    def rows_of(name, **data):
        run(place, tmp_path / name, max_steps=1, data={"paths": [str(place / "rows.jsonl")], "held_out": 0.2, **data})
        line = next(x for x in capsys.readouterr().out.splitlines() if "to train on" in x)
        return [int(word.replace(",", "")) for word in line.split() if word[0].isdigit()]

    rows, positions, held = rows_of("all")
    fewer, some, same = rows_of("some", max_positions=positions // 2)
    assert same == held and 0 < fewer < rows and positions // 3 < some <= positions // 2
    with pytest.raises(ConfigError, match="no rows to train on"):
        rows_of("none", max_positions=1)
