"""Training runs side by side: what differs in their settings, and what the heads are worth on held-out text.

    python scripts/compare_runs.py runs/a runs/b … --output results/runs

Reads the heads' directories that `train/train_heads.py` leaves (metrics.json, training_config.yaml) and writes
result.json, result.md and, with --curve, result.png: acceptance length against the positions that were trained on, a
line for each family. Acceptance lengths are those of `metrics.json`: of the best static tree of so many nodes for
Medusa heads, of dynamic trees drafted along the held-out answers for the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NODES = ("8", "12", "32")
NOT_SETTINGS = (
    "output",
    "features",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "resume",
    "tracker",
)
"""Where a run writes and how it is watched, which says nothing of the heads."""


def read_run(directory: Path) -> dict[str, Any]:
    """A run's settings, flat, and its figures.

    Raises:
        ConfigError: the directory is not what training leaves.
    """
    import yaml

    from medusa_heads.errors import ConfigError

    try:
        metrics = json.loads((directory / "metrics.json").read_text(encoding="utf-8"))
        settings = yaml.safe_load((directory / "training_config.yaml").read_text(encoding="utf-8"))
        return figures(directory, metrics, settings)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{directory} is not a directory of trained heads: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{directory} is not a directory of trained heads: its records lack {error}") from None


def figures(directory: Path, metrics: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    training = metrics["training"]
    family = settings["heads"]["family"]
    return {
        "name": str(directory),
        "family": f"eagle-{settings['heads']['version']}" if family == "eagle" else family,
        "settings": {key: value for key, value in flat(settings) if not key.startswith(NOT_SETTINGS)},
        "parameters": metrics["parameters"],
        "share_of_base": metrics["share_of_base"],
        "steps": training["steps"],
        "positions": training["positions"],
        "distinct_positions": training["distinct_positions"],
        "seconds": training["seconds"],
        "evaluation": {kind: worth(metrics, kind) for kind in metrics["evaluation"]},
    }


def flat(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Settings by their dotted paths."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        found += flat(value, f"{above}{key}.") if isinstance(value, Mapping) else [(above + key, value)]
    return found


def worth(metrics: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Top-1 by depth and acceptance length by nodes, on the held-out answers of a kind (greedy or sampled)."""
    found = metrics["evaluation"][kind]
    walked = metrics.get("dynamic_acceptance_length_by_nodes", {}).get(kind)
    return {
        "positions": found["positions"],
        "top_1": [ranks[0] for ranks in found["top_accuracy"]],
        "acceptance_length_by_nodes": walked or found["acceptance_length_by_nodes"],
    }


def differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that are not the same in all runs; one that a run does not know counts as its absence."""
    names = list(dict.fromkeys(key for run in runs for key in run["settings"]))
    return [name for name in names if len({json.dumps(run["settings"].get(name)) for run in runs}) > 1]


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """One line a run: the settings in which the runs differ, then figures."""
    from decode.paradigms_report import markdown_table, number

    changed = differing(runs)
    head = ["run", *changed, "parameters", "steps", "distinct positions", "top-1, greedy answers"]
    head += [f"{nodes} nodes" for nodes in NODES] + ["12 nodes, sampled answers", "positions/s"]
    lines = []
    for run in runs:
        greedy, sampled = (run["evaluation"].get(kind, {}) for kind in ("greedy", "sampled"))
        lengths = greedy.get("acceptance_length_by_nodes", {})
        lines.append(
            [
                run["name"],
                *(shown(run["settings"].get(name)) for name in changed),
                f"{run['parameters']:,} ({run['share_of_base']:.2%})",
                f"{run['steps']:,}",
                f"{run['distinct_positions']:,}",
                " ".join(f"{rate:.3f}".lstrip("0") for rate in greedy.get("top_1", ())) or "–",
                *(number(lengths.get(nodes)) for nodes in NODES),
                number(sampled.get("acceptance_length_by_nodes", {}).get("12")),
                f"{run['positions'] / run['seconds']:,.0f}" if run["seconds"] else "–",
            ]
        )
    return "\n".join(markdown_table(head, lines)) + "\n"


def shown(value: Any) -> str:
    return "–" if value is None else str(value)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Acceptance length on greedy held-out answers against distinct positions. Needs matplotlib (extra `plot`)."""
    from medusa_heads.errors import UserError

    try:
        import matplotlib
    except ImportError:
        raise UserError("the curve needs matplotlib: pip install 'medusa-heads[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(7.0, 4.5), layout="constrained")
    for family in dict.fromkeys(run["family"] for run in runs):
        own = sorted((r for r in runs if r["family"] == family), key=lambda run: run["distinct_positions"])
        for nodes, style in (("12", "-"), ("32", ":")):
            points = [
                (run["distinct_positions"], run["evaluation"]["greedy"]["acceptance_length_by_nodes"][nodes])
                for run in own
                if nodes in run["evaluation"].get("greedy", {}).get("acceptance_length_by_nodes", {})
            ]
            if points:
                ax.plot(*zip(*points, strict=True), style, marker="o", label=f"{family}, {nodes} nodes")
    ax.set_xscale("log")
    ax.set_xlabel("distinct positions trained on")
    ax.set_ylabel("acceptance length, greedy held-out answers")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def write(runs: Sequence[Mapping[str, Any]], directory: Path, curve: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    result = {"differing": differing(runs), "runs": runs}
    (directory / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / "result.md").write_text(markdown(runs), encoding="utf-8")
    if curve:
        draw(runs, directory / "result.png")


def main(given: Sequence[str] | None = None) -> int:
    from medusa_heads.errors import UserError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="heads' directories that training has left")
    parser.add_argument("--output", type=Path, required=True, help="directory of the result")
    parser.add_argument("--curve", action="store_true", help="draw acceptance length against data too")
    options = parser.parse_args(given)
    try:
        runs = [read_run(directory) for directory in options.runs]
        write(runs, options.output, options.curve)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
