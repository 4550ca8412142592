"""`medusa-decode compare`, other rules than the exact one, and `--drafter`, on a tiny random base and heads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from decode.cli.common import choose_drafter
from decode.engine import Decoder
from decode.settings import GenerationSettings
from medusa_heads import Base
from tests.decode.commands import ROWS, read_lines, run, write_rows


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
        (("--drafter", "lokup", "--base", "nowhere"), "no way of drafting is named 'lokup' (is it 'lookup'?)"),
    ],
)
def test_drafters_that_contradict_the_rest_are_refused(arguments: tuple[str, ...], complaint: str) -> None:
    result = run("generate", "hello", *arguments)
    assert result.exit_code == 2 and complaint in result.stderr


@pytest.mark.parametrize(
    ("base", "heads", "plain", "drafter", "chosen"),
    [
        (None, None, False, None, ("smollm2-135m", "smollm2-135m", "heads+lookup")),
        ("smollm2-135m", None, False, None, ("smollm2-135m", "smollm2-135m", "heads+lookup")),
        (None, None, True, None, ("smollm2-135m", None, None)),
        (None, "smollm2-135m", False, None, (None, "smollm2-135m", "heads")),
        (None, None, False, "heads", ("smollm2-135m", "smollm2-135m", "heads")),
        ("other", "there", False, None, ("other", "there", "heads")),
    ],
)
def test_the_embedded_base_drafts_the_best_way_and_named_heads_alone(
    base: str | None, heads: str | None, plain: bool, drafter: str | None, chosen: tuple[str | None, ...]
) -> None:
    assert choose_drafter(base, heads, plain, drafter) == chosen


def test_compare_and_verify_take_a_drafter(base_dir: Path, tmp_path: Path) -> None:
    options = ("--base", base_dir, "--drafter", "lookup", "--limit", 1, "--max-new-tokens", 8)
    compared = run("compare", *options, "--dtype", "float32", "--json")
    assert compared.exit_code == 0, compared.stderr
    assert json.loads(compared.stdout)["drafter"] == "lookup" and json.loads(compared.stdout)["same"] == 1
    report = run("verify", *options, "--temperature", 0, "--json")
    assert json.loads(report.stdout.splitlines()[-1])["drafter"] == "lookup"
    assert json.loads(report.stdout.splitlines()[-1])["heads"] is None


def test_compare_all_takes_rows_of_every_form(base_dir: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "abab"}]
    rows = [
        {"id": "p", "prompt": "abab abab"},
        {"id": "p", "turns": ["abab", "never asked"]},
        {"id": 3, "category": "qa", "messages": [*said, {"role": "user", "content": "abab"}]},
    ]
    options = ("--base", base_dir, "--dtype", "float32", "--max-new-tokens", 4, "--output", tmp_path / "run")
    shown = run(
        "compare", "--all", *options, "--way", "lookup", "--input", write_rows(tmp_path / "p.jsonl", rows), "--json"
    )
    assert shown.exit_code == 0, shown.stderr
    result = json.loads(shown.stdout)
    assert result["config"]["prompts"] == ["p", "p (2)", "3"]
    assert set(result["temperatures"]["0.0"]["lookup"]["categories"]) == {"any", "qa"}
    answered = [line for line in read_lines(tmp_path / "run" / "rows.jsonl") if line.get("method") == "plain"]
    texts = [[*said, {"role": "user", "content": "abab"}], [{"role": "user", "content": "abab"}]]
    base = Base.load(str(base_dir), dtype="float32")
    expected = [Decoder(base).generate(base.render_chat(text), GenerationSettings(4)).token_ids for text in texts]
    digests = [hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] for ids in expected]
    assert [line["digest"] for line in answered[1:]] == digests[::-1]


def test_compare_all_tells_every_way_in_one_table(base_dir: Path, heads_dir: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"question_id": 1, "category": "qa", "turns": ["abab abab"]}])
    options = ("compare", "--all", "--dtype", "float32", "--max-new-tokens", 6, "--input", prompts)
    shown = run(*options, "--heads", heads_dir, "--output", tmp_path / "run")
    assert shown.exit_code == 0, shown.stderr
    assert all(way in shown.stdout for way in ("plain", "heads", "lookup", "exit:1", "heads+lookup"))
    assert "what a pass of the base costs" in shown.stderr.splitlines()[-1]
    assert "what a pass" not in run(*options, "--heads", heads_dir, "--output", tmp_path / "run").stderr, "kept"
    assert (tmp_path / "run" / "result.json").is_file() and (tmp_path / "run" / "result.png").is_file()
    alone = run(*options, "--base", base_dir, "--way", "lookup", "--json")
    ways = json.loads(alone.stdout)["temperatures"]["0.0"]
    assert list(ways) == ["plain", "lookup"] and ways["lookup"]["against_plain"]["same_text"] == 1
    for clash in (("--drafter", "lookup"), ("--typical-alpha", 0.2)):
        refused = run(*options, "--heads", heads_dir, *clash)
        assert refused.exit_code == 2 and "--all compares exact ways" in refused.stderr
    assert "a prompt and --input are both given" in run(*options, "--heads", heads_dir, "hello").stderr
    unknown = run("compare", "--all", "--base", "nowhere", "--way", "lookup", "--way", "lokup")
    assert unknown.exit_code == 2 and "is it 'lookup'?" in unknown.stderr
    assert "go with --all" in run("compare", "--heads", heads_dir, "--way", "lookup").stderr
