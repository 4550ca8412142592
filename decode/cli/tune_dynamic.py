"""The part of `medusa-decode tune` for heads whose trees are grown anew each round (EAGLE, Hydra)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.cli import common
from medusa_heads.errors import UserError

if TYPE_CHECKING:
    from decode.drafters.eagle import EagleDrafter
    from decode.drafters.hydra import HydraDrafter
    from decode.dynamic import DynamicTree
    from decode.dynamic_costs import DynamicCost
    from decode.dynamic_tuning import DynamicOption
    from decode.settings import GenerationSettings
    from decode.tree import Tree
    from medusa_heads.base import Base

    Growing = EagleDrafter | HydraDrafter

ROUND_TOKENS = 32
"""New tokens of each answer whose rounds are timed."""
SHOWN = 8
"""Of the limits that were tried, in the table for people."""


def tune_dynamic(
    base: Base,
    drafter: Growing,
    directory: Path,
    settings: GenerationSettings,
    *,
    max_nodes: int,
    repeats: int,
    dry_run: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Chooses limits, or for sampled text the topology of drawn trees, checks the prediction on other prompts, and
    stores the choice. Returns the report, and lines for people."""
    from decode.calibration import CALIBRATION, HELD_OUT
    from decode.cli.tune import check
    from decode.dynamic import DynamicTree, TreeChoice
    from decode.machine import load_average, versions
    from decode.profiles import write_profile

    chosen, report, lines = choose(base, drafter, CALIBRATION, settings, max_nodes=max_nodes, repeats=repeats)
    tuned = copy.copy(drafter)
    old = drafter.choice
    tuned.choice = TreeChoice(chosen, old.drawn) if isinstance(chosen, DynamicTree) else replace(old, drawn=chosen)
    prompts = [common.render(base, [{"role": "user", "content": prompt}]) for prompt in HELD_OUT]
    measured = check(
        base, tuned, prompts, replace(settings, drafting="auto" if settings.sampling.greedy else "sampled")
    )
    report |= {"measured": measured, "load_average": load_average(), "versions": versions()}
    predicted = report["predicted"]
    report["error"] = {name: predicted[name] / value - 1.0 for name, value in measured.items()}
    drawn = not settings.sampling.greedy
    report["path"] = None if dry_run else str(write_profile(directory, base, chosen, report, drawn=drawn))
    lines += [
        f"predicted {predicted['tokens_per_second']:.1f} tokens/s, {predicted['speedup']:.2f} times plain decoding",
        f"measured on other prompts {measured['tokens_per_second']:.1f}, {measured['speedup']:.2f} times "
        f"({measured['tokens_per_round']:.2f} tokens a round)",
        "not stored (--dry-run)" if report["path"] is None else f"stored for this machine in {report['path']}",
    ]
    return report, lines


def choose(
    base: Base,
    drafter: Growing,
    prompts: Sequence[str],
    settings: GenerationSettings,
    *,
    max_nodes: int,
    repeats: int,
) -> tuple[DynamicTree | Tree, dict[str, Any], list[str]]:
    """The choice, what it was predicted from, and a table for people."""
    from decode.dynamic_costs import SIZES, measure_dynamic_costs
    from decode.dynamic_tuning import DEEPEST

    if max_nodes < 2:
        raise UserError("--max-nodes 1 leaves no room for a draft")
    deepest = min(DEEPEST, getattr(drafter.heads.config, "num_heads", DEEPEST))
    answers = _answers(base, prompts, settings)
    costs = measure_dynamic_costs(
        base,
        drafter,
        [prompt for prompt, _ in answers],
        replace(settings, max_new_tokens=ROUND_TOKENS, drafting="likeliest"),
        deepest=deepest,
        sizes=sorted({*(size for size in SIZES if size < max_nodes), max_nodes}),
        repeats=repeats,
    )
    if settings.sampling.greedy:
        return _limits(base, drafter, answers, costs, deepest)
    return _topology(base, drafter, answers, costs, deepest, settings.sampling.temperature)


def _answers(base: Base, prompts: Sequence[str], settings: GenerationSettings) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of the base alone, as token ids, where the answer has a draft's length at least."""
    from decode.engine import Decoder

    decoder, found = Decoder(base), []
    for number, prompt in enumerate(prompts):
        ids = common.render(base, [{"role": "user", "content": prompt}])
        answer = decoder.generate(ids, replace(settings, seed=number)).token_ids
        if len(answer) > 1:
            found.append((ids, answer))
    if not found:
        raise UserError("the base has answered none of the calibration prompts with two tokens or more")
    return found


def _limits(
    base: Base,
    drafter: Growing,
    answers: Sequence[tuple[list[int], list[int]]],
    costs: DynamicCost,
    deepest: int,
) -> tuple[DynamicTree, dict[str, Any], list[str]]:
    from decode.dynamic_tuning import choose_limits, record

    recorded = [record(base, drafter, prompt, answer, depth=deepest) for prompt, answer in answers]
    options = choose_limits(recorded, costs, deepest=deepest)
    best, plain = options[0], 1.0 / costs.forward[1]
    report = {
        "dynamic": best.rule.to_dict(),
        "calibrated_on": f"{len(answers)} answers of the base",
        "predicted": {
            "tokens_per_round": best.tokens,
            "seconds_per_round": best.seconds,
            "nodes_per_round": best.nodes,
            "steps_per_round": best.steps,
            "tokens_per_second": best.tokens_per_second,
            "plain_tokens_per_second": plain,
            "speedup": best.tokens_per_second / plain,
        },
        "costs": costs.as_dict(),
    }
    return best.rule, report, _table(options)


def _table(options: Sequence[DynamicOption]) -> list[str]:
    lines = ["depth  width  nodes  step floor  node floor  tokens/round  nodes/round  steps/round  ms/round  tokens/s"]
    for option in options[:SHOWN]:
        rule = option.rule
        lines.append(
            f"{rule.depth:5}  {rule.width:5}  {rule.nodes:5}  {rule.step_floor:10.2f}  {rule.node_floor:10.2f}  "
            f"{option.tokens:12.2f}  {option.nodes:11.1f}  {option.steps:11.1f}  {1e3 * option.seconds:8.1f}  "
            f"{option.tokens_per_second:8.1f}" + ("  <- chosen" if option is options[0] else "")
        )
    return lines


def _topology(
    base: Base,
    drafter: Growing,
    answers: Sequence[tuple[list[int], list[int]]],
    costs: DynamicCost,
    deepest: int,
    temperature: float,
) -> tuple[Tree, dict[str, Any], list[str]]:
    import torch

    from decode.dynamic_tuning import drawn_accuracy
    from decode.tuning import RoundCost, best_option, options_from_accuracy

    sums = [drawn_accuracy(base, drafter, p, a, temperature=temperature, depth=deepest) for p, a in answers]
    places = sum(count for _, count in sums)
    if places == 0:
        raise UserError("the base's answers are too short to measure drawn drafts on")
    accuracy = (torch.stack([found for found, _ in sums]).sum(dim=0) / places).tolist()
    draft = {depth: costs.read + (depth - 1) * costs.step[min(4, max(costs.step))] for depth in range(1, deepest + 1)}
    options = options_from_accuracy(accuracy, RoundCost(costs.forward, draft))
    best, plain = best_option(options), 1.0 / costs.forward[1]
    report = {
        "tree": best.tree.to_dict(),
        "calibrated_on": f"{places} places of {len(answers)} answers of the base at T = {temperature:g}",
        "accuracy": accuracy,
        "predicted": {
            "tokens_per_round": best.expected_length,
            "seconds_per_round": best.seconds,
            "tokens_per_second": best.tokens_per_second,
            "plain_tokens_per_second": plain,
            "speedup": best.tokens_per_second / plain,
        },
        "costs": costs.as_dict(),
    }
    rates = [f"depth {d}: " + " ".join(f"{rate:.2f}" for rate in row) for d, row in enumerate(accuracy, 1)]
    return best.tree, report, ["chance that the first, second, … drawn child is kept", *rates]
