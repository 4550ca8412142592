"""The theory of speculation against published figures, simulation and its own limits."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from decode import speedup
from decode.cli.app import app
from decode.tree import Tree
from medusa_heads.errors import ConfigError


@pytest.mark.parametrize(("gamma", "alpha", "tokens"), [(5, 0.8, 3.689), (4, 0.8, 3.362), (5, 0.3, 1.428)])
def test_expected_tokens_at_published_points(gamma: int, alpha: float, tokens: float) -> None:
    assert speedup.expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=5e-4)


@given(st.floats(0.0, 0.999), st.integers(0, 12))
def test_the_sum_is_the_closed_form(alpha: float, gamma: int) -> None:
    closed = (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)
    assert speedup.expected_tokens(alpha, gamma) == pytest.approx(closed, rel=1e-9)


def test_certain_acceptance_keeps_every_draft() -> None:
    assert speedup.expected_tokens(1.0, 7) == 8.0
    assert speedup.expected_tokens(0.0, 7) == 1.0


def test_expected_tokens_of_a_simulated_round() -> None:
    draws, alpha, gamma = random.Random(0), 0.7, 4
    total = 0
    for _ in range(40_000):
        accepted = 0
        while accepted < gamma and draws.random() < alpha:
            accepted += 1
        total += accepted + 1
    assert total / 40_000 == pytest.approx(speedup.expected_tokens(alpha, gamma), rel=0.01)


def test_a_chain_is_a_tree_and_a_list_of_depths() -> None:
    rates = [0.6, 0.5, 0.4]
    tree = speedup.expected_tokens_of_tree(Tree.chain(4), [[r] for r in rates])
    assert tree == pytest.approx(speedup.expected_tokens_by_depth(rates)) == pytest.approx(1 + 0.6 + 0.3 + 0.12)


def test_siblings_add_their_chances() -> None:
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0)])
    assert speedup.expected_tokens_of_tree(tree, [[0.5, 0.2], [0.4]]) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_zero_and_one_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        speedup.expected_tokens(alpha, 3)


@given(st.integers(1, 10), st.floats(0.0, 0.3), st.floats(0.5, 2.0))
def test_at_break_even_a_round_earns_what_it_costs(gamma: int, draft: float, verify: float) -> None:
    cost = speedup.round_cost(gamma, draft, verify)
    alpha = speedup.break_even_alpha(gamma, cost)
    if alpha is None:
        assert cost > gamma + 1
    elif alpha == 0.0:
        assert cost <= 1.0
    else:
        assert speedup.speedup(speedup.expected_tokens(alpha, gamma), cost) == pytest.approx(1.0, abs=1e-9)


def test_the_best_draft_length_grows_with_acceptance_and_ends_at_zero() -> None:
    verify = [1.0 + 0.1 * gamma for gamma in range(9)]
    assert speedup.best_gamma(0.05, 0.0, verify) == 0
    assert speedup.best_gamma(0.5, 0.0, verify) < speedup.best_gamma(0.9, 0.0, verify)


def test_half_precision_weights_give_one_flop_a_byte_and_token() -> None:
    shape = speedup.ModelShape(7e9)
    assert speedup.arithmetic_intensity(shape, 1) == pytest.approx(1.0)
    assert speedup.arithmetic_intensity(shape, 16) == pytest.approx(16.0)


def test_roofline_of_a_7b_on_an_a100() -> None:
    """14 GB at 2039 GB/s are 6.9 ms; 312 TFLOP/s ÷ 2039 GB/s = 153 FLOP a byte, so 153 nodes cost what one costs."""
    shape, device = speedup.ModelShape(7e9), speedup.Device(2039e9, 312e12)
    assert speedup.roofline_seconds(shape, device, 1) == pytest.approx(6.866e-3, rel=1e-3)
    assert speedup.free_nodes(shape, device) == 153
    assert speedup.roofline_verify_cost(shape, device, 153) == pytest.approx(1.0)
    assert speedup.roofline_verify_cost(shape, device, 306) == pytest.approx(2.0, rel=0.01)


def test_a_longer_context_moves_more_and_computes_more() -> None:
    shape = speedup.ModelShape(1e8, kv_values_per_token=11_520, attention_width=17_280)
    assert speedup.pass_bytes(shape, 1, 4095) - speedup.pass_bytes(shape, 1, 0) == 2 * 11_520 * 4095
    assert speedup.pass_flop(shape, 1, 4095) - speedup.pass_flop(shape, 1, 0) == 4 * 17_280 * 4095


def test_predict_prints_json() -> None:
    result = CliRunner().invoke(app, ["predict", "--alpha", "0.8", "--gamma", "5", "--verify-cost", "1.5", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["expected_tokens"] == pytest.approx(3.68928)
    assert report["speedup"] == pytest.approx(3.68928 / 1.5)
    assert 0.3 < report["break_even_alpha"] < 0.4


def test_predict_takes_the_verification_cost_from_the_roofline() -> None:
    device = ["--parameters", "7e9", "--bandwidth", "100", "--flops", "0.4"]
    result = CliRunner().invoke(app, ["predict", "--alpha", "0.8", "--gamma", "7", *device, "--json"])
    report = json.loads(result.stdout)
    assert report["roofline"]["free_nodes"] == 4
    assert report["verify_cost"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--alpha", "1.5", "--gamma", "2"], "between 0 and 1"),
        (["--alpha", "0.5", "--gamma", "2", "--flops", "1"], "--bandwidth"),
    ],
)
def test_predict_refuses_in_one_line(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["predict", *arguments])
    assert result.exit_code == 2
    assert word in result.stderr and len(result.stderr.strip().splitlines()) == 1
