"""Figures of a comparison of ways of drafting: what each costs, what it earns, and what the formula says of both.

The prediction is that of `decode.speedup`: expected tokens of a round from the measured acceptance by depth, divided by
the round's cost in passes over one token (drafting as it was timed, verification by the measured cost of a pass over
the mean number of nodes). The gap between prediction and measurement is taken apart exactly: with S the measured and P
the predicted speed-up, 1/S - 1/P is the sum of what a token took, in units of plain decoding's time for a token,

    prompt     reading the prompt
    forward    the base's passes beyond their cost by the curve (below 0 where plain decoding, too, spends time on other
               things than passes)
    draft      drafting, likewise
    rest       choosing paths, moving keys, processors, text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.benchmark.summary import add_up, compare, totals
from decode.measure import Costs
from decode.paradigms import PLAIN, Footprint
from decode.speedup import expected_tokens_by_depth, round_cost, speedup

Row = Mapping[str, Any]
PARTS = ("prompt", "forward", "draft", "rest")


def acceptance_by_depth(histogram: Sequence[int]) -> list[float]:
    """[d]: of the rounds that kept d drafted tokens or more, the share that kept another. A round whose draft ended
    there counts as one that did not."""
    reached = [sum(histogram[d:]) for d in range(len(histogram) + 1)]
    return [reached[d + 1] / reached[d] for d in range(len(histogram)) if reached[d] and reached[d + 1]]


def cost_at(costs: Costs, nodes: float) -> float:
    """A pass over `nodes` in passes over one token: medians, averaged over contexts, straight lines between sizes; the
    last line goes on beyond the largest."""
    curve = costs.round_cost().forward
    sizes = sorted(curve)
    above = next((size for size in sizes if size >= nodes), sizes[-1])
    below = max((size for size in sizes if size < above), default=above)
    if above == below:
        return curve[above] / curve[1]
    share = (nodes - below) / (above - below)
    return (curve[below] + share * (curve[above] - curve[below])) / curve[1]


def summarize(
    rows: Sequence[Row], costs: Costs, footprints: Mapping[str, Footprint], config: Mapping[str, Any]
) -> dict[str, Any]:
    """All figures, by temperature and way."""
    temperatures = sorted({row["temperature"] for row in rows})
    labels = list(dict.fromkeys(row["method"] for row in rows))
    result: dict[str, Any] = {"config": dict(config), "costs": costs.as_dict(), "temperatures": {}}
    for temperature in temperatures:
        found = {name: [r for r in rows if r["temperature"] == temperature and r["method"] == name] for name in labels}
        plain = found.get(PLAIN, [])
        result["temperatures"][str(temperature)] = {
            name: figures(own, plain, costs, footprints.get(name)) for name, own in found.items() if own and plain
        }
    return result


def figures(rows: Sequence[Row], plain: Sequence[Row], costs: Costs, added: Footprint | None) -> dict[str, Any]:
    """One way at one temperature, against plain decoding on the prompts that both have answered."""
    found: dict[str, Any] = {**totals(rows), "against_plain": compare(rows, plain)}
    categories = sorted({row["category"] for row in rows})
    found["categories"] = {name: totals([row for row in rows if row["category"] == name]) for name in categories}
    if added is not None:
        found["added"] = {
            "parameters": added.parameters,
            "weight_bytes": added.weight_bytes,
            "cache_bytes_per_token": added.cache_bytes_per_token,
        }
    if all(row["rounds"] is not None for row in rows):
        found |= engine_figures(rows, plain, costs, found["against_plain"]["speedup"])
    return found


def engine_figures(rows: Sequence[Row], plain: Sequence[Row], costs: Costs, measured: float) -> dict[str, Any]:
    """What only this engine's own ways say: acceptance, costs by stage, prediction and gap."""
    rounds = sum(row["rounds"] for row in rows)
    histogram = add_up([row["histogram"] for row in rows])
    rates = acceptance_by_depth(histogram)
    found: dict[str, Any] = {
        "rule": " / ".join(sorted({row["rule"] for row in rows})),
        "exact": all(row["exact"] for row in rows),
        "rounds": rounds,
        "acceptance_histogram": histogram,
        "acceptance_by_depth": rates,
        "nodes_per_round": sum(row["nodes"] for row in rows) / rounds if rounds else None,
    }
    if not rounds:
        return found
    pass_seconds = stage(plain, "forward") / max(1, sum(row["rounds"] for row in plain))
    found["draft_seconds_per_round"] = stage(rows, "draft") / rounds
    draft_cost = found["draft_seconds_per_round"] / pass_seconds
    verify_cost = cost_at(costs, found["nodes_per_round"])
    expected = expected_tokens_by_depth(rates)
    predicted = speedup(expected, round_cost(0, 0.0, verify_cost, draft_cost))
    found |= {
        "draft_cost": draft_cost,
        "verify_cost": verify_cost,
        "tokens_per_round": expected,
        "predicted_speedup": predicted,
        "gap": gap(rows, plain, verify_cost / expected, draft_cost / expected),
    }
    found["gap"]["measured_over_predicted"] = measured / predicted
    return found


def gap(rows: Sequence[Row], plain: Sequence[Row], verify: float, draft: float) -> dict[str, float]:
    """The parts of 1/S - 1/P. verify, draft: what the formula gives a token, in passes."""
    shared = {row["id"] for row in rows} & {row["id"] for row in plain}
    ours, theirs = ([row for row in side if row["id"] in shared] for side in (rows, plain))
    tokens = sum(row["new_tokens"] for row in ours)
    unit = sum(row["seconds"] for row in theirs) / sum(row["new_tokens"] for row in theirs) * tokens
    prompt, forward, drafting = (stage(ours, name) / unit for name in ("prefill", "forward", "draft"))
    whole = sum(row["seconds"] for row in ours) / unit
    return {
        "prompt": prompt,
        "forward": forward - verify,
        "draft": drafting - draft,
        "rest": whole - prompt - forward - drafting,
    }


def stage(rows: Sequence[Row], name: str) -> float:
    return sum(row["stages"][name] for row in rows)


def markdown(result: Mapping[str, Any]) -> str:
    """Tables of all figures."""
    parts: list[str] = []
    for temperature, ways in result["temperatures"].items():
        parts += [f"### {title(temperature)}", "", *table(ways), "", *category_table(ways), "", *gap_table(ways), ""]
    return "\n".join(parts)


def title(temperature: str) -> str:
    return "Greedy" if float(temperature) == 0.0 else f"Sampling at T = {float(temperature):g}"


HEADINGS = (
    "way", "parameters", "weights MB", "cache KB/token", "rule", "exact", "draft ms/round", "nodes",
    "acceptance by depth", "τ", "tokens/s", "× plain (95 %)", "predicted", "same text",
)  # fmt: skip


def table(ways: Mapping[str, Any]) -> list[str]:
    return markdown_table(HEADINGS, [cells(name, found) for name, found in ways.items()])


def cells(name: str, found: Mapping[str, Any]) -> list[str]:
    """One way's line of the table; – where a way does not say."""
    added, against = found.get("added"), found["against_plain"]
    cache = None if added is None else added["cache_bytes_per_token"]
    low, high = against["interval"]
    rates = found.get("acceptance_by_depth")
    return [
        name,
        "–" if added is None else f"{added['parameters']:,}",
        "–" if added is None else f"{added['weight_bytes'] / 1e6:.1f}",
        "–" if cache is None else f"{cache / 1e3:.1f}",
        found.get("rule", "–"),
        {True: "yes", False: "no", None: "–"}[found.get("exact")],
        number(found.get("draft_seconds_per_round"), 1e3),
        number(found.get("nodes_per_round"), digits=1),
        "–" if rates is None else " ".join(f"{rate:.2f}".lstrip("0") for rate in rates[:6]) or "none",
        f"{found['acceptance_length']:.2f}",
        f"{found['tokens_per_second']:.1f}",
        f"{against['speedup']:.2f} ({low:.2f}–{high:.2f})",
        number(found.get("predicted_speedup")),
        f"{against['same_text']}/{against['prompts']}",
    ]


def number(value: float | None, factor: float = 1.0, digits: int = 2) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"


def category_table(ways: Mapping[str, Any]) -> list[str]:
    """τ and speed-up over plain of each way, by category."""
    names = [name for name in ways if name != PLAIN]
    categories = sorted({category for found in ways.values() for category in found["categories"]})
    lines = []
    for category in categories:
        line = [category]
        for name in names:
            own = ways[name]["categories"].get(category)
            ratio = ways[name]["against_plain"]["categories"].get(category)
            tau = "–" if own is None else f"{own['acceptance_length']:.2f}"
            line.append(f"{tau} | {number(ratio)}×" if ratio is not None else f"{tau} | –")
        lines.append([cell.replace(" | ", ", ") for cell in line])
    return markdown_table(["τ, × plain", *names], lines)


def gap_table(ways: Mapping[str, Any]) -> list[str]:
    """Measured against predicted, and the parts of the difference."""
    lines = [
        [
            name,
            number(found["against_plain"]["speedup"]),
            number(found["predicted_speedup"]),
            number(found["gap"]["measured_over_predicted"]),
            *(f"{found['gap'][part]:+.3f}" for part in PARTS),
        ]
        for name, found in ways.items()
        if "gap" in found and name != PLAIN
    ]
    return markdown_table(["way", "measured", "predicted", "ratio", *PARTS], lines) if lines else []


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = ["| " + " | ".join(line) + " |" for line in (headings, *lines)]
    return [rows[0], "|" + "---|" * len(headings), *rows[1:]]


def text(result: Mapping[str, Any]) -> str:
    """The main table in columns, for a terminal."""
    parts = []
    for temperature, ways in result["temperatures"].items():
        lines = [list(HEADINGS), *(cells(name, found) for name, found in ways.items())]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
        parts.append(title(temperature))
        parts += ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        parts.append("")
    return "\n".join(parts)
