"""`medusa-decode`, run on a tiny random base and heads that lie in directories."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from decode.cli import app
from decode.engine import Decoder
from decode.tree import Tree
from medusa_heads import Base, MedusaHeads

CONTEXT = 160
METRICS = {
    "tree_acceptance_length": {"greedy": 1.5},
    "evaluation": {"greedy": {"top_accuracy": [[0.5, 0.6], [0.25, 0.3]]}},
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'][0] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama and a byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|s|>", "<|u|>", "<|a|>"]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", extra_special_tokens=special[1:], chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def heads_dir(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New heads with a small tree."""
    path = tmp_path_factory.mktemp("heads") / "heads"
    heads = MedusaHeads.for_base(Base.load(str(base_dir), dtype="float32"), num_heads=2)
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0)])
    extras = {"tree.json": json.dumps({"tree": tree.to_dict()}), "metrics.json": json.dumps(METRICS)}
    heads.save_pretrained(path, extras=extras)
    return path


def run(*arguments: object, text: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["hello", "and then?"]},
    {"id": "p", "prompt": "ünïcode"},
    {"id": "m", "messages": [{"role": "user", "content": "a"}]},
]


def test_a_file_gives_a_line_for_each_turn_with_heads_and_without(
    tmp_path: Path, base_dir: Path, heads_dir: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    outputs = {}
    for name, choice in {"heads": ("--heads", heads_dir), "plain": ("--plain",)}.items():
        target = tmp_path / f"{name}.jsonl"
        options = ("--dtype", "float32", "--temperature", 0, "--max-new-tokens", 12, "--seed", 1)
        result = run("generate", "--input", source, "--output", target, "--base", base_dir, *choice, *options)
        assert result.exit_code == 0, result.output
        assert result.stdout == ""
        outputs[name] = read_lines(target)

    for lines in outputs.values():
        assert [(line["id"], line["turn"]) for line in lines] == [(81, 0), (81, 1), ("p", 0), ("m", 0)]
        for line in lines:
            assert list(line) == ["id", "turn", "token_ids", "text", "finish_reason", "exact", "stats"]
            assert line["exact"] is True
            assert line["stats"]["new_tokens"] == len(line["token_ids"]) <= 12
            assert line["finish_reason"] == ("eos" if line["token_ids"][-1] == 0 else "length")
            assert line["finish_reason"] == "eos" or len(line["token_ids"]) == 12
            assert line["stats"]["seconds"] > 0
    keep = [(line["token_ids"], line["text"], line["finish_reason"]) for line in outputs["plain"]]
    assert [(line["token_ids"], line["text"], line["finish_reason"]) for line in outputs["heads"]] == keep
    assert all(line["stats"]["base_forwards"] == line["stats"]["new_tokens"] for line in outputs["plain"])


def test_greedy_tokens_are_those_of_the_model_itself(tmp_path: Path, base_dir: Path, heads_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    run("generate", "--input", source, "--output", target, "--heads", heads_dir, "--dtype", "float32",
        "--max-new-tokens", 12)  # fmt: skip
    lines = read_lines(target)
    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    talk = [{"role": "user", "content": "hello"}]
    for line in lines[:2]:  # the second turn sees the first with its answer
        prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        expected = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert line["token_ids"] == expected.tolist()
        assert line["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        talk += [{"role": "assistant", "content": line["text"]}, {"role": "user", "content": "and then?"}]


def test_a_seed_fixes_each_row_and_rows_with_one_prompt_differ(tmp_path: Path, base_dir: Path) -> None:
    rows = [{"id": number, "prompt": "same"} for number in range(3)]

    def sampled(rows: list[dict[str, Any]], seed: int) -> dict[int, list[int]]:
        source, target = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
        result = run("generate", "--input", source, "--output", target, "--base", base_dir, "--plain",
                     "--temperature", 1.5, "--seed", seed, "--max-new-tokens", 8)  # fmt: skip
        assert result.exit_code == 0, result.output
        return {line["id"]: line["token_ids"] for line in read_lines(target)}

    first = sampled(rows, 0)
    assert sampled(rows[::-1], 0) == first
    assert len({tuple(tokens) for tokens in first.values()}) == 3
    assert sampled(rows, 1) != first


def test_lines_are_there_as_they_are_made_and_a_failure_names_its_row(
    tmp_path: Path, base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": "short", "turns": ["a", "b"]}, {"id": "long", "prompt": "x" * CONTEXT}]
    source, target = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    seen = []
    generate = Decoder.generate

    def watched(self: Decoder, *arguments: Any, **options: Any) -> Any:
        seen.append(len(read_lines(partial)))
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "generate", watched)
    result = run("generate", "--input", source, "--output", target, "--base", base_dir, "--plain",
                 "--max-new-tokens", 4)  # fmt: skip
    assert seen == [0, 1, 2]
    assert_one_line(result, r"row 'long', turn 0: the prompt has")
    assert not target.exists()
    assert len(read_lines(partial)) == 2


def test_a_prompt_comes_from_the_argument_or_standard_input(base_dir: Path) -> None:
    options = ("--base", base_dir, "--plain", "--max-new-tokens", 6)
    argument = run("generate", "hello", *options)
    piped = run("generate", *options, text="hello")
    as_json = run("generate", "hello", *options, "--json")
    as_rows = run("generate", "--input", "-", *options, text='{"id": 5, "prompt": "hello"}\n')
    assert argument.exit_code == piped.exit_code == 0
    assert argument.stdout == piped.stdout
    assert "acceptance length 1.00" in argument.stderr
    line = json.loads(as_json.stdout)
    assert line["text"] + "\n" == argument.stdout
    assert json.loads(as_rows.stdout) | {"stats": 0} == line | {"id": 5, "stats": 0}


def test_a_stop_string_ends_the_text_before_it(base_dir: Path) -> None:
    options = ("--base", base_dir, "--plain", "--max-new-tokens", 20, "--json")
    text = json.loads(run("generate", "hello", *options).stdout)["text"]
    stop = text[4:6]
    line = json.loads(run("generate", "hello", *options, "--stop", stop).stdout)
    assert (line["text"], line["finish_reason"]) == (text[: text.index(stop)], "stop")


def assert_one_line(result: Any, pattern: str) -> None:
    """Exit code 2, nothing on standard output, and one line on standard error that matches."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert re.search(pattern, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["generate", "x", "--base", "BASE"], "no heads are named for the base .*: pass --heads, or --plain"),
        (["generate", "x", "--heads", "HEADS", "--plain"], "--plain decodes without heads"),
        (["generate", "x", "--input", "in.jsonl"], "a prompt and --input are both given"),
        (["generate", "--input", "/nowhere/in.jsonl", "--plain"], "No such file or directory: /nowhere/in.jsonl"),
        (["generate", "x", "--output", "/nowhere/out.jsonl", "--plain"], "there is no directory /nowhere"),
        (["generate", "x", "--output", "/tmp", "--plain"], "--output /tmp is a directory"),
        (["generate", "x", "--plain", "--base", "/nowhere/base"], "cannot load the base '/nowhere/base'"),
        (["generate", "x", "--base", "BASE", "--heads", "BASE"], "holds no heads of a known format"),
        (["generate", "x", "--dtype", "int3"], "int3"),
        (["generate", "x", "--max-new-tokens", "0"], "max-new-tokens"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--top-p", "0", "--plain"], "top_p must be above 0"),
        (["generate", "   ", "--plain"], "the prompt is empty"),
        (["generate", "--frobnicate"], "No such option"),
        (["frobnicate"], "No such command"),
        (["inspect", "HEADS", "--heads", "HEADS"], "heads are named twice"),
        (["inspect", "/nowhere/heads"], "/nowhere/heads"),
        (["compare", "x", "--base", "BASE"], "pass --heads"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: list[str], pattern: str, base_dir: Path, heads_dir: Path
) -> None:
    places = {"BASE": str(base_dir), "HEADS": str(heads_dir)}
    assert_one_line(run(*(places.get(argument, argument) for argument in arguments)), pattern)


def test_a_broken_input_row_is_found_before_the_base_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "load", lambda *a, **k: pytest.fail("must not load"))
    source = write_rows(tmp_path / "in.jsonl", [{"id": 1, "prompt": "x"}, {"id": 2}])
    assert_one_line(run("generate", "--input", source, "--plain"), r"in\.jsonl, line 2: needs one of prompt")
    same = run("generate", "--input", source, "--output", source, "--plain")
    assert_one_line(same, "--input and --output are the same file")


@pytest.mark.parametrize(
    ("fault", "pattern"),
    [
        (RuntimeError("a fault\nof two lines"), r"RuntimeError: a fault \(--debug shows where\)"),
        (OSError(errno.ENOSPC, "No space left on device", "out"), "No space left on device: out"),
    ],
)
def test_faults_are_one_line_too_and_debug_shows_the_traceback(
    fault: Exception, pattern: str, base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise fault

    monkeypatch.setattr(Base, "load", fail)
    assert_one_line(run("generate", "x", "--plain"), pattern)
    shown = run("generate", "x", "--plain", "--debug")
    assert shown.exit_code == 2
    assert "Traceback" in shown.stderr


def test_heads_of_another_base_are_refused(tmp_path: Path, base_dir: Path, heads_dir: Path) -> None:
    config = json.loads((heads_dir / "config.json").read_text()) | {"tokenizer_hash": "0" * 16}
    other = tmp_path / "other"
    other.mkdir()
    for file in heads_dir.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps(config))
    assert_one_line(run("generate", "x", "--base", base_dir, "--heads", other), "these heads belong to another base")


def test_inspect_reports_size_share_tree_and_metrics(base_dir: Path, heads_dir: Path) -> None:
    result = run("inspect", heads_dir, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    parameters = 2 * (32 * 32 + 32)
    assert report["parameters"] == parameters
    assert report["base_parameters"] == Base.load(str(base_dir)).num_parameters
    assert report["share_of_base"] == pytest.approx(parameters / report["base_parameters"])
    assert (report["family"], report["base"], report["config"]["num_heads"]) == ("medusa", str(base_dir), 2)
    assert (report["tree"]["size"], report["tree"]["depth"]) == (4, 2)
    assert report["metrics"] == METRICS
    text = run("inspect", "--heads", heads_dir).stdout
    assert "1.50 on held-out text, greedy" in text and "0.50 0.25 on held-out text, greedy" in text
    assert "4 nodes, depth 2" in text and f"{report['share_of_base']:.2%}" in text


def test_inspect_without_the_base_says_why_the_share_is_unknown(tmp_path: Path, heads_dir: Path) -> None:
    report = json.loads(run("inspect", heads_dir, "--base", tmp_path / "gone", "--json").stdout)
    assert report["share_of_base"] is None
    assert "gone" in report["base_error"]


def test_compare_decodes_the_same_prompts_both_ways(tmp_path: Path, base_dir: Path, heads_dir: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    options = ("--base", base_dir, "--heads", heads_dir, "--dtype", "float32", "--max-new-tokens", 8)
    result = run("compare", "--input", source, *options, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["turns"], report["same"], len(report["rows"])) == (4, 4, 4)
    assert report["plain"]["acceptance_length"] == 1.0
    assert report["heads"]["acceptance_length"] >= 1.0
    assert report["plain"]["new_tokens"] == report["heads"]["new_tokens"]
    ratio = report["heads"]["tokens_per_second"] / report["plain"]["tokens_per_second"]
    assert report["speedup"] == pytest.approx(ratio)
    text = run("compare", *options).stdout
    assert text.count("same text\n") == 4 and "same text in 4 of 4 answers" in text


def test_approximate_acceptance_says_so_everywhere(base_dir: Path, heads_dir: Path) -> None:
    pair = ("--base", base_dir, "--heads", heads_dir, "--dtype", "float32", "--max-new-tokens", 8, "--seed", 0)
    typical = ("--acceptance", "approximate-typical", "--temperature", 0.8)
    lines = run("generate", "hello", *pair, *typical, "--json")
    assert lines.exit_code == 0, lines.output
    line = json.loads(lines.stdout)
    assert line["exact"] is False
    assert (line["stats"]["exact"], line["stats"]["acceptance"]) == (False, "approximate-typical")
    assert "does not have the base's law" in lines.stderr
    streamed = run("generate", "hello", *pair, *typical)
    assert "(approximate-typical acceptance)" in streamed.stderr.splitlines()[-1]
    report = json.loads(run("compare", "hello", *pair, *typical, "--json").stdout)
    assert (report["exact"], report["acceptance"]) == (False, "approximate-typical")
    assert [report["rows"][0][way]["stats"]["exact"] for way in ("plain", "heads")] == [True, False]
    talk = run("chat", *pair, *typical, text="hello\n/stats\n")
    assert "(approximate-typical acceptance)" in talk.stdout
    exact = json.loads(run("compare", "hello", *pair, "--json").stdout)
    assert (exact["exact"], exact["acceptance"]) == (True, "exact")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--acceptance", "approximate-typical"), "is for sampling"),
        (("--typical-epsilon", 0.2), "go with --acceptance approximate-typical"),
        (("--plain", "--acceptance", "approximate-typical", "--temperature", 1), "--plain drafts nothing"),
        (("--acceptance", "approximate-typical", "--temperature", 1, "--typical-alpha", 0), "typical_alpha > 0"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(base_dir: Path, options: tuple[object, ...], message: str) -> None:
    result = run("generate", "hello", "--base", base_dir, *options)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.fixture
def chat(base_dir: Path, heads_dir: Path) -> Any:
    def talk(*lines: str, options: tuple[object, ...] = ()) -> Any:
        fixed = ("--base", base_dir, "--heads", heads_dir, "--dtype", "float32", "--max-new-tokens", 6)
        return run("chat", *fixed, *options, text="\n".join(lines) + "\n")

    return talk


def test_chat_answers_with_the_history_and_saves_it(chat: Any, tmp_path: Path, base_dir: Path) -> None:
    saved = tmp_path / "talk.json"
    result = chat("hello", "and then?", "/stats", f"/save {saved}", "/quit", "never", options=("--system", "be"))
    assert result.exit_code == 0, result.output
    messages = json.loads(saved.read_text())["messages"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [message["role"] for message in messages] == roles
    assert f"{messages[2]['content']}\n{messages[4]['content']}\n2 answers, " in result.stdout
    assert "never" not in result.stdout

    source = write_rows(tmp_path / "in.jsonl", [{"id": 0, "messages": messages[:4]}])
    alone = run("generate", "--input", source, "--base", base_dir, "--plain", "--dtype", "float32",
                "--max-new-tokens", 6)  # fmt: skip
    assert json.loads(alone.stdout)["text"] == messages[4]["content"]


def test_chat_forgets_on_reset(chat: Any, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    result = chat("hello", "/reset", "hello", f"/save {saved}")
    first = result.stdout.split("\nforgotten\n")[0]
    assert json.loads(saved.read_text())["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
    ]


def test_chat_goes_on_after_a_mistake(chat: Any) -> None:
    result = chat("/help", "/nonsense", "/save", "x" * CONTEXT, "/stats")
    assert result.exit_code == 0
    assert "/reset" in result.stdout and "no answer yet" in result.stdout
    errors = result.stderr.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)


def test_ctrl_c_stops_one_answer_and_keeps_what_was_said(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Decoder.stream

    def interrupted(self: Decoder, *arguments: Any, **options: Any) -> Iterator[Any]:
        monkeypatch.setattr(Decoder, "stream", stream)
        yield next(iter(stream(self, *arguments, **options)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "stream", interrupted)
    saved = tmp_path / "talk.json"
    result = chat("hello", "again", f"/save {saved}")
    assert result.exit_code == 0, result.output
    assert "[stopped]" in result.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert len(messages) == 4
    assert len(messages[1]["content"]) <= 1  # one round, one byte


def test_help_comes_without_loading_torch() -> None:
    code = (
        "import sys\nfrom decode.cli import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-new-tokens" in done.stdout
    version = run("--version")
    assert (version.exit_code, version.stdout.strip()) == (0, "0.1.0")


@pytest.mark.parametrize("drafter", ["lookup", "exit:1", "heads+lookup", "model:BASE,depth=2", "HEADS"])
def test_any_drafter_gives_the_same_text(base_dir: Path, heads_dir: Path, drafter: str) -> None:
    drafter = drafter.replace("BASE", str(base_dir)).replace("HEADS", str(heads_dir))
    named = ("--heads", heads_dir) if drafter.startswith("heads") else ("--base", base_dir)
    common = ("abc abc abc", "--dtype", "float32", "--max-new-tokens", 12, "--json")
    plain = json.loads(run("generate", *common, "--base", base_dir, "--plain").stdout)
    ours = run("generate", *common, *named, "--drafter", drafter, "--no-guard")
    assert ours.exit_code == 0, ours.stderr
    assert json.loads(ours.stdout)["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--plain", "--drafter", "lookup"), "--plain drafts nothing, and --drafter lookup says how to"),
        (("--heads", "x", "--drafter", "lookup"), "drafts without the heads of --heads x"),
        (("--base", "x", "--drafter", "heads+lookup"), "no heads are named for the base x"),
        (("--drafter", "exit"), "exit needs a value"),
    ],
)
def test_drafters_that_contradict_the_rest_are_refused(arguments: tuple[str, ...], complaint: str) -> None:
    result = run("generate", "hello", *arguments)
    assert result.exit_code == 2 and complaint in result.stderr


def test_compare_and_verify_take_a_drafter(base_dir: Path, tmp_path: Path) -> None:
    options = ("--base", base_dir, "--drafter", "lookup", "--limit", 1, "--max-new-tokens", 8)
    compared = run("compare", *options, "--dtype", "float32", "--json")
    assert compared.exit_code == 0, compared.stderr
    assert json.loads(compared.stdout)["drafter"] == "lookup" and json.loads(compared.stdout)["same"] == 1
    report = run("verify", *options, "--temperature", 0, "--json")
    assert json.loads(report.stdout.splitlines()[-1])["drafter"] == "lookup"
    assert json.loads(report.stdout.splitlines()[-1])["heads"] is None


def test_compare_all_tells_every_way_in_one_table(base_dir: Path, heads_dir: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"question_id": 1, "category": "qa", "turns": ["abab abab"]}])
    options = ("compare", "--all", "--dtype", "float32", "--max-new-tokens", 6, "--input", prompts)
    shown = run(*options, "--heads", heads_dir, "--output", tmp_path / "run")
    assert shown.exit_code == 0, shown.stderr
    assert all(way in shown.stdout for way in ("plain", "heads", "lookup", "exit:1", "heads+lookup"))
    assert "what a pass of the base costs" in shown.stderr.splitlines()[0]
    assert "what a pass" not in run(*options, "--heads", heads_dir, "--output", tmp_path / "run").stderr, "kept"
    assert (tmp_path / "run" / "result.json").is_file() and (tmp_path / "run" / "result.png").is_file()
    alone = run(*options, "--base", base_dir, "--way", "lookup", "--json")
    ways = json.loads(alone.stdout)["temperatures"]["0.0"]
    assert list(ways) == ["plain", "lookup"] and ways["lookup"]["against_plain"]["same_text"] == 1
    for clash in (("--drafter", "lookup"), ("--typical-alpha", 0.2)):
        refused = run(*options, "--heads", heads_dir, *clash)
        assert refused.exit_code == 2 and "--all compares exact ways" in refused.stderr
    assert "a prompt and --input are both given" in run(*options, "--heads", heads_dir, "hello").stderr
    assert "go with --all" in run("compare", "--heads", heads_dir, "--way", "lookup").stderr
