"""`medusa-decode tune`: the draft tree that is fastest for these heads on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decode.cli import common
from medusa_heads.errors import HeadsError, UserError

if TYPE_CHECKING:
    from decode.calibration import Text
    from decode.drafters import Drafter
    from decode.measure import Costs
    from decode.settings import GenerationSettings
    from decode.tree import Tree
    from decode.tuning import Option, RankPath, RoundCost
    from medusa_heads.base import Base
    from medusa_heads.medusa import MedusaHeads

NEW_TOKENS = 96
ROUND_TOKENS = 32
"""New tokens of each answer whose rounds are timed."""


def tune(
    base: common.BaseOption = None,
    heads: common.HeadsOption = None,
    dtype: common.DtypeOption = common.Dtype.auto,
    device: common.DeviceOption = None,
    contexts: Annotated[list[int] | None, typer.Option("--context", help="Tokens before the tree; repeatable.")] = None,
    max_nodes: Annotated[int, typer.Option("--max-nodes", min=1, help="The largest tree to try.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of each measurement.")] = 12,
    sampled: Annotated[bool, typer.Option("--sampled", help="For sampled text; the default is greedy text.")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the costs and the choice (PNG).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not store the choice.")] = False,
    json_report: common.JsonOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Measure what rounds of decoding cost here and how far trees get on the base's own answers, choose the tree that
    gives most tokens a second, and keep it for this machine: generate, chat and compare then use it. The prediction is
    checked by decoding prompts that had no part in the choice."""
    from decode.calibration import CALIBRATION, HELD_OUT, read_answers, tokens_per_round
    from decode.cli.tune_dynamic import tune_dynamic
    from decode.drafters.eagle import EagleDrafter
    from decode.drafters.hydra import HydraDrafter
    from decode.drafters.medusa import MedusaDrafter
    from decode.drafters.specs import OWN_HEADS
    from decode.machine import load_average, versions
    from decode.measure import CONTEXTS, SIZES, measure_costs
    from decode.profiles import write_profile
    from decode.tree import Tree
    from decode.tuning import best_option, options_from_paths, revalued
    from medusa_heads.hub import heads_directory
    from medusa_heads.medusa import MedusaHeads

    pair = common.load_pair(base, heads, plain=False, dtype=dtype, device=device, drafter=OWN_HEADS)
    loaded, directory = pair.base, heads_directory(common.choose(base, heads, False)[1] or "")
    settings = common.settings(max_new_tokens=NEW_TOKENS, temperature=1.0 if sampled else 0.0, seed=0)
    if isinstance(pair.drafter, EagleDrafter | HydraDrafter):
        if contexts or picture is not None:
            raise UserError("--context and --picture are for static trees; these heads grow theirs while decoding")
        report, table = tune_dynamic(
            loaded, pair.drafter, directory, settings, max_nodes=max_nodes, repeats=repeats, dry_run=dry_run
        )
        typer.echo(json.dumps(report) if json_report else "\n".join(table))
        return
    trained = MedusaHeads.from_pretrained(directory, base=loaded)
    deepest = MedusaDrafter(trained, loaded, Tree.chain(trained.config.num_heads + 1))
    texts, held_out = (
        read_answers(loaded, deepest, prompts, new_tokens=NEW_TOKENS, temperature=settings.sampling.temperature)
        for prompts in (CALIBRATION, HELD_OUT)
    )
    paths, basis = known_paths(directory, sampled, texts)
    sizes = sorted({1, *(size for size in SIZES if size < max_nodes), max_nodes})
    costs = measure_costs(loaded, trained, sizes=sizes, contexts=contexts or CONTEXTS, repeats=repeats)
    rounds, spreads = round_costs(loaded, trained, paths, costs, texts, settings, repeats)
    options = revalued(options_from_paths(paths, rounds), lambda tree: tokens_per_round(tree, texts))
    best = best_option(options)
    drafter = MedusaDrafter(trained, loaded, best.tree)
    report = {
        "tree": best.tree.to_dict(),
        "nodes": best.tree.size,
        "depth": best.tree.depth,
        "calibrated_on": {"trees": basis, "tokens_per_round": f"{len(texts)} answers of the base"},
        "predicted": prediction(best, options),
        "predicted_held_out": prediction(*revalued_pair(best, options, held_out)),
        "measured": check(loaded, drafter, [text.prompt_ids for text in held_out], settings),
        "rounds": {str(size): spread for size, spread in spreads.items()},
        "costs": costs.as_dict(),
        "load_average": load_average(),
        "versions": versions(),
    }
    report["error"] = errors(report)
    report["path"] = None if dry_run else str(write_profile(directory, loaded, best.tree, report))
    if picture is not None:
        draw(costs, options, report, picture)
    typer.echo(json.dumps(report) if json_report else "\n".join(lines(report, options)))


def known_paths(directory: Path, sampled: bool, texts: Sequence[Text]) -> tuple[list[RankPath], str]:
    """How often each rank path comes true, and on which text: what training's evaluation has counted on its held-out
    text, where the heads say it, since that is more text; else on `texts`."""
    from decode.calibration import path_probabilities

    path = directory / "metrics.json"
    basis = "sampled" if sampled else "greedy"
    if not path.is_file():
        return path_probabilities(texts), f"{len(texts)} answers of the base"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["evaluation"]
        return [(tuple(ranks), float(p)) for ranks, p in found[basis]["paths"]], f"{basis} held-out text"
    except (ValueError, KeyError, TypeError) as error:
        raise HeadsError(f"{path} has no rank paths of {basis} text ({type(error).__name__}: {error})") from None


def round_costs(
    base: Base,
    heads: MedusaHeads,
    paths: Sequence[RankPath],
    costs: Costs,
    texts: Sequence[Text],
    settings: GenerationSettings,
    repeats: int,
) -> tuple[RoundCost, dict[int, tuple[float, float, float]]]:
    """What rounds cost, from decoding with the most promising tree of each size; and the spread of their seconds."""
    from dataclasses import replace

    from decode.drafters.medusa import MedusaDrafter
    from decode.engine import Decoder
    from decode.measure import measure_rounds
    from decode.tuning import RoundCost, cost_of_rounds, options_from_paths

    sizes = next(iter(costs.forward.values()))
    trees: dict[int, Tree] = {}
    for option in options_from_paths(paths, RoundCost(dict.fromkeys(sizes, 1.0))):
        if option.tree.size in sizes:
            trees[option.tree.size] = option.tree  # of one size the deepest comes last
    decoders = {
        size: Decoder(base, MedusaDrafter(heads, base, tree), guard=None) if size > 1 else Decoder(base)
        for size, tree in trees.items()
    }
    request = replace(settings, max_new_tokens=ROUND_TOKENS)
    spreads = measure_rounds(decoders, [text.prompt_ids for text in texts], request, repeats)
    seconds = {size: spread[1] for size, spread in spreads.items()}
    draft = {depth: spread[1] for depth, spread in costs.draft.items()}
    return cost_of_rounds(seconds, {size: tree.depth for size, tree in trees.items()}, draft), spreads


def revalued_pair(best: Option, options: Sequence[Option], texts: Sequence[Text]) -> tuple[Option, list[Option]]:
    """The chosen tree and plain decoding on other text."""
    from decode.calibration import tokens_per_round
    from decode.tuning import revalued

    plain = next(option for option in options if option.tree.size == 1)
    found = revalued([best, plain], lambda tree: tokens_per_round(tree, texts))
    return found[0], found


def prediction(best: Option, options: Sequence[Option]) -> dict[str, float]:
    plain = next(option for option in options if option.tree.size == 1)
    return {
        "tokens_per_round": best.expected_length,
        "seconds_per_round": best.seconds,
        "tokens_per_second": best.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": best.tokens_per_second / plain.tokens_per_second,
    }


def check(
    base: Base, drafter: Drafter, prompts: Sequence[Sequence[int]], settings: GenerationSettings
) -> dict[str, float]:
    """The same figures by decoding prompts plainly and with the tree, in turn; reading the prompt not counted."""
    from decode.engine import Decoder

    decoders = {"plain": Decoder(base), "tree": Decoder(base, drafter, guard=None)}
    tokens, seconds, rounds = ({name: 0.0 for name in decoders} for _ in range(3))
    for number, ids in enumerate((prompts[0], *prompts)):  # the first answer warms up
        for name, decoder in decoders.items():
            stats = decoder.generate(ids, settings).stats
            if number:
                tokens[name] += stats.new_tokens - 1
                seconds[name] += stats.seconds - stats.stage_seconds["prefill"]
                rounds[name] += stats.rounds
    speed = {name: tokens[name] / seconds[name] for name in decoders}
    return {
        "tokens_per_round": tokens["tree"] / rounds["tree"],
        "seconds_per_round": seconds["tree"] / rounds["tree"],
        "tokens_per_second": speed["tree"],
        "plain_tokens_per_second": speed["plain"],
        "speedup": speed["tree"] / speed["plain"],
    }


def errors(report: dict[str, Any]) -> dict[str, float]:
    """Predicted ÷ measured - 1, of each figure of what was predicted before the check. In `speedup` a machine that
    has become slower or faster since cancels out; `held_out_tokens_per_round` has the check's own text behind it."""
    found = {name: report["predicted"][name] / measured - 1.0 for name, measured in report["measured"].items()}
    held_out = report["predicted_held_out"]["tokens_per_round"] / report["measured"]["tokens_per_round"] - 1.0
    return found | {"held_out_tokens_per_round": held_out}


def lines(report: dict[str, Any], options: Sequence[Option]) -> list[str]:
    predicted, measured, error = report["predicted"], report["measured"], report["error"]
    found = ["nodes  depth  tokens/round  ms/round  tokens/s"]
    sizes = [size for size in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if size != report["nodes"]]
    for size in sorted({*sizes, report["nodes"]}):
        same = [option for option in options if option.tree.size == size]
        if same:
            best = max(same, key=lambda option: option.tokens_per_second)
            found.append(
                f"{size:5}  {best.tree.depth:5}  {best.expected_length:12.2f}  {1e3 * best.seconds:8.1f}  "
                f"{best.tokens_per_second:8.1f}" + ("  <- chosen" if size == report["nodes"] else "")
            )
    found += [
        f"predicted {predicted['tokens_per_second']:.1f} tokens/s, {predicted['speedup']:.2f} times plain decoding",
        f"measured on other prompts {measured['tokens_per_second']:.1f}, {measured['speedup']:.2f} times: prediction "
        f"off by {error['tokens_per_second']:+.1%} ({error['tokens_per_round']:+.1%} tokens a round, "
        f"{error['seconds_per_round']:+.1%} seconds a round)",
        "not stored (--dry-run)" if report["path"] is None else f"stored for this machine in {report['path']}",
    ]
    return found


def draw(costs: Costs, options: Sequence[Option], report: dict[str, Any], path: Path) -> None:
    """Above, what a pass and a round cost by nodes; below, tokens a round and tokens a second of the best tree of each
    size, and what was measured of the chosen one."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("a picture needs matplotlib: pip install 'medusa-heads[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(6.0, 6.4), sharex=True, layout="constrained")
    curves = {f"a pass behind {context} tokens": at for context, at in costs.forward.items()}
    curves["a round of decoding"] = {int(size): spread for size, spread in report["rounds"].items()}
    for label, at in curves.items():
        sizes = sorted(at)
        above.plot(sizes, [1e3 * at[size][1] for size in sizes], marker="o", label=label)
        above.fill_between(sizes, *([1e3 * at[size][i] for size in sizes] for i in (0, 2)), alpha=0.2)
    above.set_ylabel("milliseconds")
    above.set_ylim(bottom=0.0)
    above.legend()
    best: dict[int, Option] = {}
    for option in options:
        if option.tree.size not in best or option.tokens_per_second > best[option.tree.size].tokens_per_second:
            best[option.tree.size] = option
    below.plot(list(best), [option.tokens_per_second for option in best.values()], label="tokens a second, predicted")
    below.axvline(report["nodes"], color="grey", linestyle="--", label=f"chosen: {report['nodes']} nodes")
    measured = [report["measured"][name] for name in ("plain_tokens_per_second", "tokens_per_second")]
    below.plot([1, report["nodes"]], measured, "kx", label="measured on other prompts")
    below.set_xlabel("nodes")
    below.set_ylim(bottom=0.0)
    below.legend(loc="lower right")
    lengths = below.twinx()
    lengths.plot(list(best), [option.expected_length for option in best.values()], color="tab:orange")
    lengths.set_ylabel("tokens a round", color="tab:orange")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
