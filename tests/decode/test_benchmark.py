"""The benchmark: fair subsets, resumable logs, figures that add up, and the command end to end on a tiny pair."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.benchmark.identity import check, exceptions, first_difference
from decode.benchmark.log import Log
from decode.benchmark.methods import Request, engine_method, generate_method
from decode.benchmark.prompts import Prompt, per_category, read_prompts, shuffled, stratified
from decode.benchmark.summary import add_up, compare, figures, markdown, summarize
from decode.engine import Decoder
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.eagle import EagleHeads
from medusa_heads.errors import ConfigError
from medusa_heads.medusa import MedusaHeads
from scripts.benchmark import main, named_heads
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer

PROMPTS = [Prompt(f"{c}{i}", c, f"tell {i}") for c, n in (("a", 40), ("b", 20), ("c", 5)) for i in range(n)]
REQUEST = Request([5, 17, 40, 8, 61], max_new_tokens=12, temperature=0.0, seed=3)


def row(method: str, identity: str, tokens: int, seconds: float, **more: Any) -> dict[str, Any]:
    base = {
        "kind": "answer",
        "method": method,
        "temperature": 0.0,
        "id": identity,
        "category": "a",
        "new_tokens": tokens,
    }
    base |= {"seconds": seconds, "forwards": tokens, "histogram": [], "stages": {}, "digest": "x", "load_average": 0.0}
    return base | more


def test_a_subset_keeps_each_categorys_share() -> None:
    assert Counter(prompt.category for prompt in stratified(PROMPTS, 13)) == {"a": 8, "b": 4, "c": 1}
    assert Counter(prompt.category for prompt in per_category(PROMPTS, 6)) == {"a": 6, "b": 6, "c": 5}
    chosen = stratified(PROMPTS, 13)
    assert len({prompt.id for prompt in chosen}) == 13 and stratified(PROMPTS[::1], 13) == chosen
    assert set(stratified(PROMPTS, 200)) == set(PROMPTS)
    assert shuffled(PROMPTS, 1) == shuffled(PROMPTS, 1) != shuffled(PROMPTS, 2)


def test_prompts_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["x"]}\n{"question_id": 2}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)
    path.write_text('{"question_id": 1, "category": "a", "turns": ["x"]}\n' * 2)
    with pytest.raises(ConfigError, match="repeats"):
        read_prompts(path)


def test_a_log_continues_after_a_cut_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rows.jsonl"
    log = Log(path, {"seed": 1})
    log.add_session({"started": "now"})
    log.add({"id": "1"})
    log.add({"id": "2"})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    again = Log(path, {"seed": 1})
    assert again.rows == [{"id": "1"}] and again.sessions == [{"started": "now"}]
    again.add({"id": "2"})
    assert Log(path, {"seed": 1}).rows == [{"id": "1"}, {"id": "2"}]


def test_a_log_of_another_configuration_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    Log(tmp_path / "rows.jsonl", {"seed": 1, "dtype": "float32"})
    with pytest.raises(ConfigError, match="seed was 1, now 2"):
        Log(tmp_path / "rows.jsonl", {"seed": 2, "dtype": "float32"})


def test_a_comparison_is_over_shared_prompts_and_by_total_speed() -> None:
    heads = [row("heads", "1", 10, 1.0), row("heads", "2", 30, 1.0, digest="y"), row("heads", "3", 1, 100.0)]
    plain = [row("plain", "1", 10, 2.0), row("plain", "2", 30, 2.0)]
    found = compare(heads, plain)
    assert found["prompts"] == 2 and found["speedup"] == pytest.approx(2.0) and found["same_text"] == 1
    assert found["per_prompt"] == (2.0, 2.0, 2.0)
    low, high = found["interval"]
    assert low == pytest.approx(2.0) and high == pytest.approx(2.0)


def test_an_interval_holds_the_ratio_and_widens_with_disagreement() -> None:
    plain = [row("plain", str(i), 10, 1.0) for i in range(20)]
    heads = [row("heads", str(i), 10, 0.25 if i % 2 else 1.0) for i in range(20)]
    found = compare(heads, plain)
    low, high = found["interval"]
    assert low < found["speedup"] < high and high - low > 0.3


def test_figures_of_a_method_add_up() -> None:
    stages = {"prefill": 0.5, "forward": 1.2, "draft": 0.1, "verify": 0.1, "commit": 0.05}
    rows = [
        row("heads", "1", 10, 2.0, forwards=5, histogram=[2, 1], stages=stages),
        row("heads", "2", 20, 2.0, forwards=10, histogram=[1, 2, 3], stages=stages, category="b"),
    ]
    found = figures(rows)
    assert found["tokens_per_second"] == 30 / 4.0 and found["acceptance_length"] == 2.0
    assert found["acceptance_histogram"] == [3, 3, 3] == add_up([[2, 1], [1, 2, 3]])
    assert found["overhead_share"] == pytest.approx(1.0 - 2.4 / 3.0)
    assert found["categories"]["b"]["tokens_per_second"] == 10.0
    text = markdown(summarize([*rows, row("plain", "1", 10, 4.0)]))
    assert "| heads | 2 | 7.5 |" in text and "2.00 (2.00–2.00, 1 prompts)" in text


def test_every_method_gives_the_same_greedy_tokens_by_one_counter() -> None:
    base = tiny_base("qwen2")
    plain = engine_method(Decoder(base))(REQUEST)
    generate = generate_method(base)(REQUEST)
    lookup = generate_method(base, prompt_lookup=True)(REQUEST)
    assert plain.token_ids == generate.token_ids == lookup.token_ids
    assert plain.forwards == generate.forwards == len(plain.token_ids)
    assert 0 < lookup.forwards <= len(lookup.token_ids)
    assert not base.model._forward_pre_hooks, "the counting hook is gone"


def test_every_method_samples_and_obeys_its_seed() -> None:
    base = tiny_base("qwen2")
    request = Request(REQUEST.prompt_ids, 12, 1.0, seed=5)
    for method in (engine_method(Decoder(base)), generate_method(base), generate_method(base, prompt_lookup=True)):
        first = method(request).token_ids
        assert method(request).token_ids == first
        assert method(Request(REQUEST.prompt_ids, 12, 1.0, seed=6)).token_ids != first


def test_identity_finds_the_one_token_that_is_not_the_bases(base: Base) -> None:
    tokens = engine_method(Decoder(base))(REQUEST).token_ids
    assert exceptions(base, REQUEST.prompt_ids, tokens) == []
    wrong = [*tokens[:-1], (tokens[-1] + 1) % base.vocab_size]
    (found,) = exceptions(base, REQUEST.prompt_ids, wrong)
    assert found["index"] == len(tokens) - 1 and found["base"] == tokens[-1] and found["gap"] > 0.0
    verdict = check(base, REQUEST.prompt_ids, tokens, wrong)
    assert verdict["first_difference"] == len(tokens) - 1 and not verdict["same_as_plain"]
    assert 0.0 < verdict["top_two_gap"] <= found["gap"]
    assert check(base, REQUEST.prompt_ids, tokens, tokens)["same_as_plain"]
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_labels_of_heads() -> None:
    assert named_heads(["smollm2-135m"]) == {"heads": "smollm2-135m"}
    assert named_heads(["a=x/y", "z/w"]) == {"a": "x/y", "w": "z/w"}
    with pytest.raises(ConfigError, match="taken"):
        named_heads(["plain=x"])


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, heads with a tree, and prompts, on disk."""
    root = tmp_path_factory.mktemp("pair")
    model: Any = tiny_model("llama")
    model.save_pretrained(root / "base")
    tiny_tokenizer().save_pretrained(root / "base")
    base = Base.load(str(root / "base"), dtype="float32")
    heads = MedusaHeads.for_base(base, num_heads=2, num_layers=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.02)
    heads.save_pretrained(root / "heads")
    (root / "tree.json").write_text(json.dumps(Tree.from_rank_paths([(0,), (1,), (0, 0)]).to_dict()))
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"tell me {i}"]} for i in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: root / name for name in ("base", "heads", "tree.json", "prompts.jsonl")}


def command(pair: dict[str, Path], output: Path, *more: str) -> list[str]:
    named = ["--base", str(pair["base"]), "--heads", str(pair["heads"]), "--tree", str(pair["tree.json"])]
    shape = ["--prompts", str(pair["prompts.jsonl"]), "--dtype", "float32", "--max-new-tokens", "6", "--no-figures"]
    return [*named, *shape, "--output", str(output), *more]


def test_the_command_measures_resumes_and_reports(tiny_pair: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "run"
    given = command(tiny_pair, output, "--slow-limit", "2")
    assert main(given) == 0
    result = json.loads((output / "result.json").read_text())
    counts = {name: found["prompts"] for name, found in result["methods"]["0.0"].items()}
    assert counts == {"plain": 6, "heads": 6, "generate": 2, "prompt_lookup": 2} and result["complete"]
    assert result["comparisons"]["0.0"]["plain"]["heads"]["same_text"] == 6
    assert result["comparisons"]["0.0"]["generate"]["heads"]["prompts"] == 2
    assert result["sessions"][0]["versions"]["torch"] and result["sessions"][0]["machine"]["cores"]
    assert result["config"]["dtype"] == "float32" and result["config"]["seed"] == 0
    assert "| heads | 6 |" in (output / "result.md").read_text()
    lines = (output / "rows.jsonl").read_text().splitlines(keepends=True)
    (output / "rows.jsonl").write_text("".join(lines[:7]) + lines[7][:20])
    assert main(given) == 0
    again = json.loads((output / "result.json").read_text())
    assert again["complete"] and len(again["sessions"]) == 2 and again["answers"] == result["answers"]
    kept = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    assert kept[2:7] == [json.loads(line) for line in lines[2:7]], "what was measured is not measured again"
    assert main(command(tiny_pair, output, "--seed", "1", "--slow-limit", "2")) == 2, "another configuration"


def test_the_command_takes_every_way_of_drafting(tiny_pair: dict[str, Path], tmp_path: Path) -> None:
    base, heads = Base.load(str(tiny_pair["base"]), dtype="float32"), tmp_path / "eagle"
    tree = '{"dynamic": {"depth": 2, "width": 2, "nodes": 4}}'
    EagleHeads.for_base(base, version=3).save_pretrained(heads, extras={"tree.json": tree})
    ways = [str(heads), "lookup", f"both={heads}+lookup", "early=exit:1"]
    given = ["--prompts", str(tiny_pair["prompts.jsonl"]), "--base", str(tiny_pair["base"]), "--dtype", "float32"]
    given += ["--output", str(tmp_path / "run"), "--max-new-tokens", "6", "--no-figures", "--methods", "plain", "heads"]
    assert main([*given, "--heads", *ways]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    trees = result["sessions"][0]["trees"]
    assert trees["eagle"]["nodes"] == 4 and trees["lookup"] is None and trees["both"] == [trees["eagle"], None]
    compared = result["comparisons"]["0.0"]["plain"]
    assert {name: found["same_text"] for name, found in compared.items()} == dict.fromkeys(trees, 6)
    (heads / "tree.json").write_text(tree.replace("4", "3"))
    assert main([*given, "--heads", *ways]) == 2, "other limits do not continue the run"


def test_the_command_checks_identity(tiny_pair: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert main(command(tiny_pair, output, "--check-identity", "--limit", "3")) == 0
    identity = json.loads((output / "result.json").read_text())["identity"]["heads"]
    assert identity["prompts"] == identity["same_as_plain"] == identity["base_argmax_everywhere"] == 3
    alone = tmp_path / "alone"
    assert main(command(tiny_pair, alone, "--check-identity", "--limit", "3", "--methods", "heads")) == 0
    identity = json.loads((alone / "result.json").read_text())["identity"]["heads"]
    assert (identity["base_argmax_everywhere"], identity["compared_with_plain"]) == (3, 0)
    head, line = (alone / "result.md").read_text().splitlines()[2:4]
    assert head.count("|") == line.count("|") == 6
    assert "3 of 3 prompts." in (alone / "result.md").read_text()
    with pytest.raises(SystemExit):
        main(command(tiny_pair, alone, "--check-identity", "--methods", "plain"))


def test_a_text_that_is_not_the_bases_own_fails_the_command(
    tiny_pair: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tie = [{"index": 0, "emitted": 1, "base": 2, "gap": 0.5}]
    monkeypatch.setattr("decode.benchmark.identity.exceptions", lambda *_: tie)
    assert main(command(tiny_pair, tmp_path / "run", "--check-identity", "--limit", "1", "--methods", "heads")) == 1


def test_pictures_are_drawn(tiny_pair: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from decode.benchmark.figures import draw_all
    from decode.measure import Costs

    rows = [row("heads", "1", 10, 1.0, histogram=[2, 3]), row("plain", "1", 10, 2.0)]
    costs = Costs({128: {1: (0.01, 0.02, 0.03), 8: (0.02, 0.03, 0.04)}}, {1: (0.001, 0.001, 0.002)}, 5)
    drawn = draw_all(summarize(rows), costs, tmp_path)
    assert {path.name for path in drawn} == {"speedup-plain-greedy.png", "acceptance-greedy.png", "cost.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
