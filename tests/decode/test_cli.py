"""`medusa-decode`, run on a tiny random base and heads that lie in directories."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.engine import Decoder
from medusa_heads import Base
from tests.decode.commands import ROWS, assert_one_line, read_lines, run, write_rows
from tests.decode.tiny_pair import CONTEXT, METRICS


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
