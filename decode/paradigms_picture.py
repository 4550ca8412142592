"""One picture of a comparison: speed-ups, measured and predicted, and the cost of a pass that explains them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decode.measure import Costs
from decode.paradigms import PLAIN
from decode.paradigms_report import title
from medusa_heads.errors import UserError


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Bars by way for each temperature, beside milliseconds of a pass by its nodes. Needs matplotlib (extra `plot`)."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install 'medusa-heads[plot]', or --no-figures") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = result["temperatures"]
    most = max(len(ways) for ways in temperatures.values())
    figure, axes = pyplot.subplots(
        1, len(temperatures) + 1, figsize=(5.0 * len(temperatures) + 4.5, 0.5 * most + 2.0), layout="constrained"
    )
    for ax, (temperature, ways) in zip(axes[:-1], temperatures.items(), strict=True):
        names = [name for name in ways if name != PLAIN][::-1]
        against = [ways[name]["against_plain"] for name in names]
        values = [found["speedup"] for found in against]
        errors = [
            [max(0.0, found["speedup"] - found["interval"][0]) for found in against],
            [max(0.0, found["interval"][1] - found["speedup"]) for found in against],
        ]
        bars = ax.barh(names, values, xerr=errors, color="#4477aa", ecolor="#333333", capsize=3, label="measured")
        ax.bar_label(bars, [f"{value:.2f}×" for value in values], label_type="center", color="white", fontsize=8)
        said = [(i, ways[name]["predicted_speedup"]) for i, name in enumerate(names) if "gap" in ways[name]]
        ax.plot([p for _, p in said], [i for i, _ in said], "D", color="#cc6677", label="predicted")
        ax.axvline(1.0, color="black", linewidth=1)
        ax.set_xlim(0.0, 1.3 * max([1.0, *values, *(p for _, p in said)]))
        ax.set_title(title(temperature))
        ax.set_xlabel("× plain decoding (95 % interval)")
        ax.legend(fontsize=8)
    costs = Costs.from_dict(result["costs"])
    for context, at in costs.forward.items():
        sizes = sorted(at)
        milliseconds = [1e3 * at[size][1] for size in sizes]
        axes[-1].plot(sizes, milliseconds, marker="o", markersize=3, label=f"behind {context} tokens")
    axes[-1].set_title("a pass of the base")
    axes[-1].set_xlabel("nodes")
    axes[-1].set_ylabel("milliseconds (median)")
    axes[-1].set_ylim(bottom=0.0)
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
