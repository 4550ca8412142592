"""Draft models in training: what they learn, what they leave, and that they are ordinary models of transformers."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train.train_heads as script
from decode.drafters import load_drafter
from decode.drafters.model import ModelDrafter
from decode.engine import Decoder, GenerationSettings
from decode.sampling import SamplingParams
from medusa_heads import Base
from medusa_heads.draft_model import DraftModel, drafting_in
from medusa_heads.errors import ConfigError, HeadsError
from tests.conftest import tiny_base
from tests.train.helpers import save_tiny_base, tiny_config, write_rows
from tests.train.runs import assert_same_weights, launch, logged, make_place, repeated, run, weights
from train.config import TrainingConfig, build
from train.data import encode_rows, load_chat_rows
from train.draft_model import read_texts, text_states
from train.families import make_trainer
from train.states import LiveStates

DRAFT = {"family": "draft_model", "num_layers": 1}
PLAIN = {"heads": DRAFT}
BLENDED = {
    "heads": {**DRAFT, "draft_vocab_size": 7, "layers": [1]},
    "loss": {"teacher_weight": 1.0, "acceptance_weight": 0.5, "acceptance": "log", "sampled_rows": 6},
}
ARCHITECTURES = ("llama", "qwen2", "gpt_neox", "gpt2", "gemma", "gemma3")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny base, chat rows, and the states of their answers."""
    return make_place(tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("settings", [PLAIN, BLENDED], ids=["hard-labels", "acceptance"])
def test_a_run_learns_resumes_bit_for_bit_and_leaves_a_model(place, tmp_path, settings, monkeypatch):
    settings = {**settings, "checkpoint_every": 5, "epochs": 8}
    settings["optimizer"] = {"learning_rate": 3e-3, "warmup_steps": 2}
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
    greedy = metrics["evaluation"]["greedy"]
    assert len(greedy["top_accuracy"]) == 1 and len(greedy["top_accuracy"][0]) == 10
    assert greedy["top_accuracy"][0] == sorted(greedy["top_accuracy"][0])
    grown, chains = (
        metrics[f"{kind}_acceptance_length_by_{by}"] for kind, by in (("dynamic", "nodes"), ("chain", "depth"))
    )
    assert set(grown["greedy"]) == {"6", "8", "16", "32"} and set(chains["greedy"]) == {"2", "4", "5", "6"}
    assert metrics["tree_acceptance_length"]["greedy"] == max(grown["greedy"]["6"], chains["greedy"]["5"])
    card = (out / "README.md").read_text()
    assert f"{metrics['tree_acceptance_length']['greedy']:.2f}" in card and f"{metrics['parameters']:,}" in card


def test_the_saved_directory_is_a_model_of_transformers_that_drafts_at_once(place, tmp_path):
    out = run(place, tmp_path / "draft", max_steps=4, **BLENDED)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {path.name for path in out.iterdir()} and not (out / "tree.json").exists()
    base = Base.load(str(place / "base"), dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == 1 and model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(out).get_vocab() == base.tokenizer.get_vocab()
    stored = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in stored, "tied as in the base"
    assert torch.equal(model.get_input_embeddings().weight, base.embed(torch.arange(base.vocab_size)))

    drafting = drafting_in(out)
    assert drafting is not None and len(drafting.draft_ids) == 7
    for name in (str(out), f"model:{out}"):
        drafter = load_drafter(name, base)
        assert isinstance(drafter, ModelDrafter)
        assert (drafter.reach.depth, drafter.reach.width, drafter.reach.nodes) == (
            drafting.depth,
            drafting.width,
            drafting.nodes,
        )
        assert drafter.columns.tolist() == list(drafting.draft_ids)
    assert load_drafter(f"model:{out},depth=3,width=1", base).reach.depth == 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_with_all_of_the_bases_layers_it_says_what_the_base_says_a_token_further(architecture, tmp_path):
    """Head 0's place at each position is the state behind the next token: off by one, or padded wrongly, it would not
    be the base's own."""
    base = tiny_base(architecture)
    write_rows(tmp_path / "rows.jsonl", count=7)
    examples, _ = encode_rows(base, load_chat_rows([tmp_path / "rows.jsonl"]))
    source = LiveStates(base, examples)
    heads = {"family": "draft_model", "num_layers": base.num_layers}
    trainer = make_trainer(build(TrainingConfig, {"output": "x", "heads": heads}), base, examples)
    assert trainer.heads.layers == tuple(range(base.num_layers))
    batch = trainer.read(source, [4, 0, 5, 2])
    states = trainer.head_states(batch)
    for p in torch.nonzero(batch.remaining > 0)[:, 0].tolist():
        torch.testing.assert_close(states[0, p], batch.states[p + 1], rtol=0, atol=2e-5)
    parts = text_states(trainer.heads, batch, torch.float32, batch_tokens=1)
    torch.testing.assert_close(parts, text_states(trainer.heads, batch, torch.float32), rtol=0, atol=2e-5)


def test_a_process_without_rows_has_gradients_of_zero(place):
    base = tiny_base()
    trainer = make_trainer(build(TrainingConfig, {"output": "x", **PLAIN}), base, [])
    states = trainer.head_states(read_texts(LiveStates(base, []), []))
    assert states.shape == (1, 0, base.hidden_size)
    states.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in trainer.parameters())
    assert all(p.grad is None for p in base.model.parameters())


def test_live_states_train_the_same_model_as_cached_ones(place, tmp_path):
    settings = {**BLENDED, "max_steps": 1, "positions_per_step": 10_000}
    live = weights(run(place, tmp_path / "live", features={"directory": None}, **settings))
    cached = weights(run(place, tmp_path / "cached", **settings))
    assert live.keys() == cached.keys()
    for key in live:
        torch.testing.assert_close(live[key], cached[key], rtol=0, atol=2e-4)


def test_two_processes_train_what_one_does(place, tmp_path):
    outputs = []
    for processes, accumulation in ((1, 1), (2, 2)):
        output = tmp_path / f"by-{processes}"
        data = tiny_config(
            place,
            output=str(output),
            features={"directory": str(place / "states"), "dtype": "float32"},
            gradient_accumulation_steps=accumulation,
            max_steps=4,
            evaluation={"rows": 2, "walked_rows": 1},
            **BLENDED,
        )
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
        done = launch(["--config", str(tmp_path / "c.yaml")], processes)
        assert done.returncode == 0, done.stderr[-2000:]
        assert f"{processes} process(es)" in done.stdout
        outputs.append(output)
    one, two = map(weights, outputs)
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-2, atol=2e-5)
    for a, b in zip(*map(logged, outputs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def greedy_answer(base, count):
    """A prompt, the base's own greedy answer, and its text, whose tokens it is."""
    prompt = base.render_chat([{"role": "user", "content": "go"}])
    settings = GenerationSettings(max_new_tokens=count, eos_token_ids=())
    answer = Decoder(base).generate(prompt, settings).token_ids
    text = base.tokenizer.decode(answer, skip_special_tokens=False)
    assert base.tokenizer(text, add_special_tokens=False)["input_ids"] == answer
    return prompt, settings, answer, text


def test_overfitted_on_one_answer_its_whole_draft_is_accepted(tmp_path):
    """The base's own greedy answer is learned by heart; then every round accepts three tokens and gets one more."""
    save_tiny_base(tmp_path / "base")
    base = Base.load(str(tmp_path / "base"), dtype="float32")
    prompt, settings, answer, text = greedy_answer(base, 25)
    repeated(tmp_path, text)
    out = run(
        tmp_path,
        tmp_path / "draft",
        features={"directory": None},
        data={"paths": [str(tmp_path / "rows.jsonl")], "held_out": 0.0},
        optimizer={"learning_rate": 0.01, "warmup_steps": 5},
        evaluation={"tree_nodes": 4, "tree_width": 1, "depth": 3},
        log_every=100,
        epochs=150,
        **PLAIN,
    )
    result = Decoder(base, load_drafter(str(out), base)).generate(prompt, settings)
    assert result.token_ids == answer
    assert result.stats.base_forwards == 1 + 24 // 4  # one token from the prefill, then four a round
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["tree_acceptance_length"]["greedy"] == pytest.approx(25 / 7), "as it was walked"


@pytest.mark.parametrize("architecture", ["llama-untied-biased", "qwen2", "gpt_neox", "gpt2", "gemma"])
def test_every_kind_of_base_has_a_draft_model_that_learns(tmp_path, architecture):
    """The same, step by step, and through a directory."""
    base = tiny_base(architecture)
    prompt, settings, answer, text = greedy_answer(base, 25)
    repeated(tmp_path, text)
    examples, _ = encode_rows(base, load_chat_rows([tmp_path / "rows.jsonl"]))
    trainer = make_trainer(build(TrainingConfig, {"output": "x", **PLAIN}), base, examples)
    batch = trainer.read(LiveStates(base, examples), [0])
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01)
    for step in range(120):
        loss, figures = trainer(batch, torch.tensor([1 / 24]), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert figures[0, 1:].tolist() == [24, 24], "all of the answer but its first token"
    draft = trainer.heads
    draft.save_pretrained(tmp_path / "draft", draft.drafting(depth=3, width=1, nodes=4))
    result = Decoder(base, load_drafter(str(tmp_path / "draft"), base, pass_cost=0.0)).generate(prompt, settings)
    assert result.token_ids == answer
    assert result.stats.base_forwards == 1 + 24 // 4


def test_drafting_with_it_leaves_the_text_and_the_law_as_they_are(place, tmp_path):
    """A half-trained model with a vocabulary of its own: greedy text is the base's, seeds decide sampled text, and both
    are the same alone and in a batch."""
    out = run(place, tmp_path / "draft", max_steps=6, **BLENDED)
    base = Base.load(str(place / "base"), dtype="float32")
    prompts = [base.render_chat([{"role": "user", "content": text}]) for text in ("abc", "de fa", "b")]
    for temperature in (0.0, 1.0):
        settings = GenerationSettings(
            max_new_tokens=24, eos_token_ids=(), sampling=SamplingParams(temperature=temperature), seed=3
        )
        decoder = Decoder(base, load_drafter(str(out), base, width=2, depth=3, nodes=7, pass_cost=0.0))
        alone = [decoder.generate(prompt, settings) for prompt in prompts]
        assert [r.token_ids for r in decoder.generate_batch(prompts, [settings] * 3)] == [r.token_ids for r in alone]
        assert all(result.stats.tree_nodes > result.stats.rounds for result in alone)
        if temperature == 0.0:
            assert [r.token_ids for r in alone] == [Decoder(base).generate(p, settings).token_ids for p in prompts]


def test_what_cannot_be_trained_or_saved_is_refused(place, tmp_path):
    for heads, message in (
        ({"num_layers": 3}, "draft model of 3 layers has more than the base's 2"),
        ({"num_layers": 1, "layers": [2]}, r"some of the base's 0 … 1, ascending: not \[2\]"),
        ({"num_layers": 2, "layers": [1, 0]}, "ascending"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(place, tmp_path / "draft", heads={**DRAFT, **heads})
    draft = DraftModel(tiny_base(), [0])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for directory in (place / "base", tmp_path / "notes"):
        with pytest.raises(HeadsError, match="holds something else"):
            draft.save_pretrained(directory, draft.drafting(3, 1, 4))
    assert (place / "base" / "model.safetensors").exists() and (tmp_path / "notes" / "a.txt").exists()
