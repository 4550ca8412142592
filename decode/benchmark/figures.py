"""Pictures of a result: speed-ups, accepted tokens, cost of a pass by its nodes. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.measure import Costs
from medusa_heads.errors import UserError


def draw_all(result: Mapping[str, Any], costs: Costs | None, directory: Path) -> list[Path]:
    """Writes the pictures that the result has figures for. Raises UserError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'medusa-heads[plot]', or --no-figures") from None
    matplotlib.use("Agg")
    drawn = []
    for temperature, comparisons in result["comparisons"].items():
        label = "greedy" if float(temperature) == 0.0 else f"temperature-{temperature}"
        for baseline, compared in comparisons.items():
            if compared:
                drawn.append(draw_speedups(compared, baseline, label, directory / f"speedup-{baseline}-{label}.png"))
        histograms = {
            name: found["acceptance_histogram"]
            for name, found in result["methods"][temperature].items()
            if len(found["acceptance_histogram"]) > 1
        }
        if histograms:
            drawn.append(draw_histogram(histograms, label, directory / f"acceptance-{label}.png"))
    if costs is not None:
        drawn.append(draw_costs(costs, directory / "cost.png"))
    return drawn


def draw_speedups(compared: Mapping[str, Any], baseline: str, label: str, path: Path) -> Path:
    """A bar a method: total speed over the baseline's, with the 95 % interval."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.0, 0.6 * len(compared) + 1.6), layout="constrained")
    names = list(compared)[::-1]
    values = [compared[name]["speedup"] for name in names]
    errors = [
        [value - compared[name]["interval"][0] for name, value in zip(names, values, strict=True)],
        [compared[name]["interval"][1] - value for name, value in zip(names, values, strict=True)],
    ]
    bars = axes.barh(names, values, xerr=errors, color="#4477aa", ecolor="#333333", capsize=3)
    axes.bar_label(bars, [f" {value:.2f}×" for value in values], padding=14)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(0.0, 1.2 * max(*values, *(compared[name]["interval"][1] for name in names), 1.0))
    axes.set_xlabel(f"speed against {baseline}, {label} (95 % interval)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def draw_histogram(histograms: Mapping[str, list[int]], label: str, path: Path) -> Path:
    """Share of rounds by the number of drafted tokens that they kept."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.0, 3.2), layout="constrained")
    width = 0.8 / len(histograms)
    for i, (name, histogram) in enumerate(histograms.items()):
        rounds = sum(histogram)
        places = [n + (i - (len(histograms) - 1) / 2) * width for n in range(len(histogram))]
        bars = axes.bar(places, [count / rounds for count in histogram], width, label=name)
        axes.bar_label(bars, [f"{count / rounds:.0%}" for count in histogram], fontsize=8)
    axes.set_xticks(range(max(map(len, histograms.values()))))
    axes.set_xlabel(f"drafted tokens kept in a round ({label})")
    axes.set_ylabel("share of rounds")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def draw_costs(costs: Costs, path: Path) -> Path:
    """Milliseconds of a pass by its nodes, one line a context, quartiles shaded; drafting as a line of its own."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.0, 3.6), layout="constrained")
    for context, at in costs.forward.items():
        sizes = sorted(at)
        low, middle, high = ([1e3 * at[size][i] for size in sizes] for i in range(3))
        axes.plot(sizes, middle, marker="o", markersize=3, label=f"base, behind {context} tokens")
        axes.fill_between(sizes, low, high, alpha=0.2)
    if costs.draft:
        deepest = max(costs.draft)
        axes.axhline(1e3 * costs.draft[deepest][1], color="grey", linestyle="--", label=f"drafting {deepest} ahead")
    axes.set_xlabel("nodes verified in one pass")
    axes.set_ylabel("milliseconds (median)")
    axes.set_ylim(bottom=0.0)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
