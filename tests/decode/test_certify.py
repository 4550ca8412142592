"""Certification: a right decoder passes, and each kind of wrong one fails."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2, power_divergence
from typer.testing import CliRunner

from decode import certify as module
from decode import rows
from decode.cache import TreeCache
from decode.certify import (
    BLOCK,
    BlockLaw,
    Certificate,
    GreedyCheck,
    SamplingCheck,
    certify,
    check_greedy,
    check_sampling,
    chi_square_tail,
    g_statistic,
    gap_rounding,
    plain_greedy,
    whole_logits,
)
from decode.cli import app
from decode.engine import Decoder
from decode.sampling import SamplingParams, build_processors, node_law
from decode.tree import Tree
from decode.verify import Verdict, verify_greedy, verify_point_mass
from medusa_heads.base import Base
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer
from tests.decode.oracle import Oracle

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]
WARM = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def base() -> Base:
    base = tiny_base()
    base.eos_token_ids = (95,)
    return base


@pytest.fixture
def decoder(base: Base) -> Decoder:
    """Drafts the base's greedy text: right for greedy decoding, often accepted in sampling."""
    return Decoder(base, Oracle([PROMPT + plain_greedy(base, PROMPT, 40)[0]], right=0.8))


def test_plain_greedy_is_what_transformers_generates(base: Base) -> None:
    expected = base.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, output_logits=True, return_dict_in_generate=True, eos_token_id=95
    )
    ours, logits = plain_greedy(base, PROMPT, 20)
    assert ours == expected.sequences[0, len(PROMPT) :].tolist()
    torch.testing.assert_close(logits, torch.cat(expected.logits), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole_logits(base, PROMPT, ours), logits, atol=1e-4, rtol=1e-4)


def test_a_right_decoder_passes(decoder: Decoder) -> None:
    check = check_greedy(decoder, "x", PROMPT, 30)
    assert check.passed and check.identical and check.accepted_drafts >= 8 and check.divergence is None
    assert 0.0 <= check.rounding < 1e-3
    sampled = check_sampling(decoder, "x", PROMPT, WARM, 1000, seed=1)
    assert sampled.accepted_drafts >= 20 and sampled.degrees_of_freedom >= 5
    assert sampled.impossible == sampled.malformed == 0
    assert chi_square_tail(sampled.g, sampled.degrees_of_freedom) > 0.001


# Ways to be wrong. Each must be found.


def keep_first_child(tree: Tree, tokens: Any, choices: Any) -> Verdict:
    """Accepts the first draft where the base wants none of them."""
    right = verify_greedy(tree, tokens, choices)
    return right if len(right.path) > 1 or tree.size == 1 else Verdict([0, 1], int(choices[1]))


def test_an_accepted_wrong_draft_fails(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "verify_greedy", keep_first_child)
    check = check_greedy(decoder, "x", PROMPT, 30)
    assert not check.passed and check.wrong_choices > 0 and check.divergence is not None
    assert check.divergence.gap is not None and check.divergence.gap > check.rounding


def test_a_cache_that_keeps_the_wrong_nodes_fails(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path's length is right, but its first nodes are kept in place of its own."""
    commit = TreeCache.commit
    monkeypatch.setattr(TreeCache, "commit", lambda self, paths: commit(self, [list(range(len(p))) for p in paths]))
    assert not check_greedy(decoder, "x", PROMPT, 30).passed


def test_positions_that_do_not_follow_depth_fail(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = TreeCache.positions
    monkeypatch.setattr(
        TreeCache, "positions", lambda self, depths: positions(self, torch.arange(depths.shape[-1]).expand_as(depths))
    )
    assert not check_greedy(decoder, "x", PROMPT, 30).passed


def test_an_overlooked_end_fails(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    text = plain_greedy(base, PROMPT, 30)[0]
    eos = next(token for position, token in enumerate(text) if position > 3 and token not in text[:position])
    monkeypatch.setattr(base, "eos_token_ids", (eos,))
    decoder = Decoder(base, Oracle([PROMPT + text]))
    assert check_greedy(decoder, "x", PROMPT, 30).passed
    generate = Decoder.generate
    monkeypatch.setattr(
        Decoder, "generate", lambda self, prompt, settings: generate(self, prompt, replace(settings, eos_token_ids=()))
    )
    check = check_greedy(decoder, "x", PROMPT, 30)
    assert not check.passed and check.divergence is not None and check.divergence.gap is None


def accept_too_often(tree: Tree, tokens: Any, law: Any, generator: Any) -> Verdict:
    """Tries its luck twice: the draft is kept if either of two samples equals it."""
    first = verify_point_mass(tree, tokens, law, generator)
    return first if len(first.path) > 1 else verify_point_mass(tree, tokens, law, generator)


def greedy_bonus(tree: Tree, tokens: Any, law: Any, generator: Any) -> Verdict:
    """The token after the accepted ones is the likeliest, not a sample."""
    right = verify_point_mass(tree, tokens, law, generator)
    return Verdict(right.path, int(law(right.path[-1]).argmax()))


def law_of_the_root(tree: Tree, tokens: Any, law: Any, generator: Any) -> Verdict:
    """All nodes are judged by the root's law: wrong behind an accepted draft alone."""
    root = law(0)
    return verify_point_mass(tree, tokens, lambda node: root, generator)


def flatter(tree: Tree, tokens: Any, law: Any, generator: Any) -> Verdict:
    """A temperature that is a little off."""
    return verify_point_mass(tree, tokens, lambda node: torch.softmax(law(node).log() / 1.25, 0), generator)


@pytest.mark.parametrize("fault", [accept_too_often, greedy_bonus, law_of_the_root, flatter])
def test_a_wrong_sampling_rule_fails(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Verdict]
) -> None:
    monkeypatch.setattr(rows, "verify_point_mass", fault)
    check = check_sampling(decoder, "x", PROMPT, WARM, 1000, seed=1)
    assert chi_square_tail(check.g, check.degrees_of_freedom) < 1e-4


def test_a_token_outside_top_k_fails(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak far too small for the G-test."""
    params = SamplingParams(temperature=1.0, top_k=3)
    assert check_sampling(decoder, "x", PROMPT, params, 60, seed=1).impossible == 0
    real, calls = verify_point_mass, []

    def leak(tree: Tree, tokens: Any, law: Any, generator: Any) -> Verdict:
        calls.append(1)
        verdict = real(tree, tokens, law, generator)
        return verdict if len(calls) != 20 else Verdict([0], int(law(0).argmin()))

    monkeypatch.setattr(rows, "verify_point_mass", leak)
    check = check_sampling(decoder, "x", PROMPT, params, 60, seed=1)
    certificate = Certificate("float32", params, sampling=[check])
    assert check.impossible == 1 and not certificate.passed
    assert Certificate("bfloat16", params, sampling=[check]).passed == ((certificate.p_value or 0.0) >= 0.001)


# The parts.


def test_the_law_of_blocks_is_that_of_all_texts(base: Base) -> None:
    """Against the product of the laws of each step, for every text: with few tokens, all can be listed."""
    params, draws = SamplingParams(temperature=1.5, top_k=3), 300
    law = BlockLaw(base, PROMPT, params, draws)
    cells: Counter[int] = Counter()
    processed = build_processors(params)

    def visit(text: tuple[int, ...], mass: float) -> None:
        if len(text) == BLOCK or (text and text[-1] in base.eos_token_ids):
            assert not law.malformed(text) and not law.impossible(text)
            cells[law.cell(text)] += mass  # type: ignore[assignment]
            return
        ids = [*PROMPT, *text]
        probabilities = node_law(base.model(torch.tensor([ids])).logits[0, -1], ids, processed)
        for token in probabilities.nonzero().flatten().tolist():
            visit((*text, token), mass * float(probabilities[token]))

    with torch.no_grad():
        visit((), 1.0)
    assert len(cells) == len(law.probabilities) > 8
    for cell, probability in enumerate(law.probabilities):
        assert cells[cell] == pytest.approx(probability, abs=1e-5)
        assert draws * probability >= 5.0
    assert law.malformed([1]) and law.malformed([95, 1, 1]) and law.malformed([1, 1, 1, 1])


def test_ends_inside_a_block_have_cells_of_their_own(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    likely = int(whole_logits(base, PROMPT, [0])[0].argmax())
    monkeypatch.setattr(base, "eos_token_ids", (likely,))
    law = BlockLaw(base, PROMPT, WARM, 200)
    probability = float(torch.softmax(whole_logits(base, PROMPT, [0])[0] / WARM.temperature, 0)[likely])
    assert law.probabilities[law.cell([likely])] == pytest.approx(probability, abs=1e-6)
    assert not law.malformed([likely]) and law.malformed([likely, 3, 3])


def test_the_g_test_is_that_of_scipy() -> None:
    observed, probabilities = [12, 30, 7, 51], [0.1, 0.3, 0.1, 0.5]
    g, freedom = g_statistic(observed, probabilities)
    expected = power_divergence(observed, [100 * p for p in probabilities], lambda_="log-likelihood")
    assert g == pytest.approx(expected.statistic) and freedom == 3
    assert chi_square_tail(g, freedom) == pytest.approx(expected.pvalue)
    assert chi_square_tail(500.0, 300) == pytest.approx(chi2.sf(500.0, 300), rel=1e-9)
    assert chi_square_tail(0.0, 0) == 1.0


def greedy_check(**changes: Any) -> GreedyCheck:
    values: dict[str, Any] = {
        "id": 0,
        "new_tokens": 9,
        "base_forwards": 5,
        "accepted_drafts": 4,
        "identical": False,
        "divergence": module.Divergence(3, 1, 2, 0.3, 0.3),
        "wrong_choices": 0,
        "near_ties": 1,
        "rounding": 0.4,
    }
    return GreedyCheck(**{**values, **changes})


def test_rounding_is_of_gaps_not_of_logits() -> None:
    one = torch.randn(5, 40)
    other = one + torch.arange(5.0)[:, None]
    assert gap_rounding(one, other) == pytest.approx(0.0, abs=1e-5)
    second = int(one[3].topk(2).indices[1])
    other[3, second] += 0.25
    assert gap_rounding(one, other) == pytest.approx(0.25, abs=1e-5)
    other[3, int(one[3].argmin())] += 9.0  # an unlikely token decides nothing
    assert gap_rounding(one, other) == pytest.approx(0.25, abs=1e-5)


def test_only_a_gap_within_the_rounding_is_excused() -> None:
    assert greedy_check().passed
    assert not greedy_check(rounding=0.2).passed
    assert not greedy_check(wrong_choices=1).passed
    assert not greedy_check(divergence=module.Divergence(3, 1, None, None, 0.1)).passed
    assert not greedy_check(rounding=math.nan).passed


def test_a_certificate_counts_all_its_checks() -> None:
    right = SamplingCheck(0, 100, 5, 10.0, 10, 0, 0)
    wrong = SamplingCheck(1, 100, 5, 60.0, 10, 0, 0)
    assert Certificate("float32", WARM, greedy=[greedy_check()], sampling=[right]).passed
    assert not Certificate("float32", WARM, sampling=[right, wrong]).passed
    assert not Certificate("float32", WARM, greedy=[greedy_check(), greedy_check(wrong_choices=1)]).passed
    assert not Certificate("bfloat16", WARM, sampling=[SamplingCheck(0, 100, 5, 10.0, 10, 0, 1)]).passed
    assert Certificate("float32", WARM).p_value is None


def test_half_precision_reports_where_texts_part() -> None:
    """Near-ties are excused, by the base's own rounding and no further."""
    torch.manual_seed(0)
    base = Base.from_model(tiny_model().to(torch.bfloat16), tiny_tokenizer())
    base.eos_token_ids = ()
    prompts = [(seed, torch.randint(3, 96, (6,)).tolist()) for seed in range(6)]
    decoders = {i: Decoder(base, Oracle([p + plain_greedy(base, p, 40)[0]], right=0.7)) for i, p in prompts}
    checks = [check_greedy(decoders[i], i, p, 40) for i, p in prompts]
    assert all(check.passed for check in checks)
    assert all(check.rounding > 1e-3 for check in checks)
    for check in checks:
        assert (check.divergence is None) == check.identical
        assert check.divergence is None or (check.divergence.gap or 0.0) <= check.rounding


# The command.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny base and heads of it, in directories; the heads draft the token before again, which is right at times."""
    directory = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    base = Base.load(str(directory), dtype="float32")
    heads = MedusaHeads.for_base(base, num_heads=2, num_layers=1)
    target = tmp_path_factory.mktemp("heads")
    heads.save_pretrained(target)
    (target / "tree.json").write_text(json.dumps({"tree": Tree((-1, 0, 0, 1), (0, 0, 1, 0)).to_dict()}))
    return str(directory), str(target)


def run(pair: tuple[str, str], *options: str) -> Any:
    few = ["--limit", "2", "--max-new-tokens", "12", "--draws", "60"]
    return CliRunner().invoke(app, ["verify", "--base", pair[0], "--heads", pair[1], *few, *options])


def test_the_command_certifies_a_pair(pair: tuple[str, str], tmp_path: Path) -> None:
    output = tmp_path / "certificate.json"
    result = run(pair, "--output", str(output), "--temperature", "1.5", "--top-p", "0.95")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "PASSED" and "2 of 2" in result.stdout
    report = json.loads(output.read_text())
    assert report["passed"] and report["dtype"] == "float32" and report["sampling"]["params"]["top_p"] == 0.95
    assert len(report["greedy"]["checks"]) == len(report["sampling"]["checks"]) == 2
    assert report["base"]["weights_hash"] and report["heads"] == pair[1]


def test_the_command_takes_prompts_and_prints_json(pair: tuple[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": "a", "prompt": "Hi"}, {"id": "b", "turns": ["One", "Two"]}, {"id": "c", "prompt": "no"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(pair, "--prompts", str(prompts), "--json", "--temperature", "0")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [check["id"] for check in report["greedy"]["checks"]] == ["a", "b"]
    assert report["sampling"]["checks"] == [] and report["sampling"]["p_value"] is None


def test_the_command_fails_a_broken_decoder(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "verify_greedy", keep_first_child)
    result = run(pair, "--temperature", "0", "--output", str(tmp_path / "c.json"))
    assert result.exit_code == 1 and result.stdout.splitlines()[-1] == "FAILED" and "WRONG" in result.stdout
    assert json.loads((tmp_path / "c.json").read_text())["passed"] is False


def test_certify_checks_all_prompts_and_samples_the_first(decoder: Decoder) -> None:
    seen: list[tuple[int, int]] = []
    certificate = certify(
        decoder,
        [("a", PROMPT), ("b", PROMPT[:4])],
        max_new_tokens=6,
        params=WARM,
        draws=50,
        sampled_prompts=1,
        seed=0,
        after_check=lambda c: seen.append((len(c.greedy), len(c.sampling))),
    )
    assert seen == [(1, 0), (2, 0), (2, 1)] and certificate.passed
