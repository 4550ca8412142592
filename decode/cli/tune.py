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
    from decode.measure import Costs
    from decode.tree import Tree
    from decode.tuning import Option
    from medusa_heads.base import Base

CHECK_TOKENS = 96


def tune(
    base: common.BaseOption = None,
    heads: common.HeadsOption = None,
    dtype: common.DtypeOption = common.Dtype.auto,
    device: common.DeviceOption = None,
    contexts: Annotated[list[int] | None, typer.Option("--context", help="Tokens before the tree; repeatable.")] = None,
    max_nodes: Annotated[int, typer.Option("--max-nodes", min=1, help="The largest tree to try.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of each measurement.")] = 15,
    sampled: Annotated[bool, typer.Option("--sampled", help="For sampled text; the default is greedy text.")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the costs and the choice (PNG).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not store the choice.")] = False,
    json_report: common.JsonOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Measure what verifying and drafting cost here, choose the tree that gives most tokens a second by the heads'
    measured acceptance, and keep it for this machine: generate, chat and compare then use it."""
    from decode.drafters.medusa import MedusaDrafter
    from decode.machine import load_average, versions
    from decode.measure import CONTEXTS, SIZES, measure_costs
    from decode.profiles import write_profile
    from decode.tuning import best_option, options_from_paths
    from medusa_heads.hub import heads_directory
    from medusa_heads.medusa import MedusaHeads

    loaded = common.load_pair(base, heads, plain=False, dtype=dtype, device=device).base
    directory = heads_directory(common.choose(base, heads, False)[1] or "")
    paths, basis = read_paths(directory, sampled)
    sizes = sorted({1, *(size for size in SIZES if size < max_nodes), max_nodes})
    costs = measure_costs(
        loaded,
        MedusaHeads.from_pretrained(directory, base=loaded),
        sizes=sizes,
        contexts=contexts or CONTEXTS,
        repeats=repeats,
    )
    options = options_from_paths(paths, costs.round_cost())
    best = best_option(options)
    report: dict[str, Any] = {
        "tree": best.tree.to_dict(),
        "nodes": best.tree.size,
        "depth": best.tree.depth,
        "calibrated_on": f"{basis} held-out text",
        "predicted": prediction(best, options),
        "measured": check(loaded, MedusaDrafter.from_pretrained(directory, loaded, tree=best.tree), sampled),
        "costs": costs.as_dict(),
        "load_average": load_average(),
        "versions": versions(),
    }
    report["path"] = None if dry_run else str(write_profile(directory, loaded, best.tree, report))
    if picture is not None:
        draw(costs, options, best.tree, picture)
    typer.echo(json.dumps(report) if json_report else "\n".join(lines(report, options)))


def read_paths(directory: Path, sampled: bool) -> tuple[list[tuple[tuple[int, ...], float]], str]:
    """How often each rank path came true on held-out text, from the heads' metrics.json; and on which text."""
    path = directory / "metrics.json"
    basis = "sampled" if sampled else "greedy"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["evaluation"]
        measured = found[basis]["paths"]
        return [(tuple(ranks), float(probability)) for ranks, probability in measured], basis
    except FileNotFoundError:
        raise HeadsError(f"{directory} has no metrics.json: the heads' acceptance is not known") from None
    except (ValueError, KeyError, TypeError) as error:
        raise HeadsError(f"{path} has no rank paths of {basis} text ({type(error).__name__}: {error})") from None


def prediction(best: Option, options: Sequence[Option]) -> dict[str, float]:
    plain = next(option for option in options if option.tree.size == 1)
    return {
        "tokens_per_round": best.expected_length,
        "seconds_per_round": best.seconds,
        "tokens_per_second": best.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": best.tokens_per_second / plain.tokens_per_second,
    }


def check(base: Base, drafter: Any, sampled: bool) -> dict[str, float]:
    """The same figures by decoding a few prompts plainly and with the tree, in turn; reading the prompt not counted."""
    from decode.cli.compare import PROMPTS
    from decode.engine import Decoder

    settings = common.settings(max_new_tokens=CHECK_TOKENS, temperature=1.0 if sampled else 0.0, seed=0)
    decoders = {"plain": Decoder(base), "tree": Decoder(base, drafter, guard=None)}
    tokens, seconds, rounds = ({name: 0.0 for name in decoders} for _ in range(3))
    for number, prompt in enumerate((PROMPTS[0], *PROMPTS)):  # the first answer warms up
        ids = common.render(base, [{"role": "user", "content": prompt}])
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


def lines(report: dict[str, Any], options: Sequence[Option]) -> list[str]:
    predicted, measured = report["predicted"], report["measured"]
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
        f"predicted {predicted['tokens_per_second']:.1f} tokens/s, {predicted['speedup']:.2f} times plain decoding; "
        f"measured on four prompts {measured['tokens_per_second']:.1f}, {measured['speedup']:.2f} times",
        "not stored (--dry-run)" if report["path"] is None else f"stored for this machine in {report['path']}",
    ]
    return found


def draw(costs: Costs, options: Sequence[Option], tree: Tree, path: Path) -> None:
    """Cost of a pass by its nodes, and below it tokens a round and tokens a second of the best tree of each size."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("a picture needs matplotlib: pip install 'medusa-heads[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(6.0, 6.4), sharex=True, layout="constrained")
    for context, at in costs.forward.items():
        sizes = sorted(at)
        above.plot(sizes, [1e3 * at[size][1] for size in sizes], marker="o", label=f"behind {context} tokens")
        above.fill_between(sizes, *([1e3 * at[size][i] for size in sizes] for i in (0, 2)), alpha=0.2)
    above.set_ylabel("milliseconds a pass")
    above.set_ylim(bottom=0.0)
    above.legend()
    best: dict[int, Option] = {}
    for option in options:
        if option.tree.size not in best or option.tokens_per_second > best[option.tree.size].tokens_per_second:
            best[option.tree.size] = option
    below.plot(list(best), [option.tokens_per_second for option in best.values()], label="tokens a second, predicted")
    below.axvline(tree.size, color="grey", linestyle="--", label=f"chosen: {tree.size} nodes")
    below.set_xlabel("nodes")
    below.set_ylim(bottom=0.0)
    below.legend(loc="lower right")
    lengths = below.twinx()
    lengths.plot(list(best), [option.expected_length for option in best.values()], color="tab:orange")
    lengths.set_ylabel("tokens a round", color="tab:orange")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
