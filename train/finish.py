"""The end of a run: evaluation on held-out rows, the draft tree, and the heads' directory."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from decode.dynamic import DynamicTree
from decode.tree import Tree
from train.evaluate import Ranks, best_tree, collect_ranks, path_probabilities, simulate, summarize
from train.losses import Rows
from train.progress import peak_bytes
from train.states import StateSource
from train.trainer import HeadsTrainer

if TYPE_CHECKING:
    from train.config import TrainingConfig


def evaluation_groups(source: StateSource, rows: Sequence[int], limit: int | None) -> dict[str, list[int]]:
    """Held-out rows by how their answers were made: `greedy` (temperature 0) and `sampled` (all others)."""
    groups: dict[str, list[int]] = {"greedy": [], "sampled": []}
    for row in list(rows)[:limit]:
        groups["greedy" if source.examples[row].temperature == 0.0 else "sampled"].append(row)
    return {name: found for name, found in groups.items() if any(source.sizes[r] for r in found)}


@torch.no_grad()
def rank_rows(trainer: HeadsTrainer, source: StateSource, rows: Sequence[int], depth: int) -> Ranks:
    """Ranks of the heads' candidates on some rows, with the heads in the dtype that they are in."""
    return collect_ranks(
        source,
        rows,
        trainer.read,
        lambda batch: trainer.head_states(batch, depth=depth),
        trainer.projection(trainer.teacher),
        Rows(trainer.labels),
        trainer.base.device,
        trainer.settings.chunk_positions,
    )


def _tree(config: TrainingConfig, static: Tree, depth: int) -> dict[str, Any]:
    """What `tree.json` says: limits of a dynamic tree for heads that draft depth by depth, else the static tree."""
    if config.heads.family != "eagle":
        return {"tree": static.to_dict()}
    return {"dynamic": DynamicTree(depth, config.evaluation.tree_width, config.evaluation.tree_nodes).to_dict()}


def finish(
    config: TrainingConfig,
    trainer: HeadsTrainer,
    source: StateSource,
    train_rows: Sequence[int],
    eval_rows: Sequence[int],
    run: dict[str, float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Evaluates, chooses the tree, writes the heads' directory. Returns what metrics.json holds."""
    import accelerate
    import transformers

    from medusa_heads.card import model_card

    heads, base = trainer.heads, trainer.base
    weights = {key: value.detach().clone() for key, value in heads.state_dict().items()}
    heads.to(base.dtype).eval()
    depth = config.evaluation.depth or trainer.depth
    groups = evaluation_groups(source, eval_rows, config.evaluation.rows)
    if not groups:
        say("no held-out rows: evaluating on training rows instead")
        groups = evaluation_groups(source, train_rows, config.evaluation.rows)
    found = {name: rank_rows(trainer, source, rows, depth) for name, rows in groups.items()}
    basis = "greedy" if "greedy" in found else "sampled"
    tree = best_tree(path_probabilities(found[basis]), config.evaluation.tree_nodes)
    lengths = {name: simulate(ranks, tree) for name, ranks in found.items()}
    metrics: dict[str, Any] = {
        "evaluation": {name: summarize(ranks) for name, ranks in found.items()},
        "evaluated_on": "held-out rows" if eval_rows else "training rows",
        "tree_nodes": tree.size,
        "tree_acceptance_length": lengths,
        "parameters": heads.num_parameters,
        "share_of_base": heads.num_parameters / base.num_parameters,
        "training": {
            **run,
            "rows": len(train_rows),
            "distinct_positions": sum(source.sizes[r] for r in train_rows),
            "peak_memory_bytes": peak_bytes(base.device),
        },
        "base": base.fingerprint(),
        "seed": config.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        },
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {base.device.type}",
    }
    for name, ranks in found.items():
        figures = metrics["evaluation"][name]
        top1 = " ".join(f"{row[0]:.3f}" for row in figures["top_accuracy"])
        top5 = " ".join(f"{row[4]:.3f}" for row in figures["top_accuracy"])
        by_nodes = " ".join(f"{n}: {x:.2f}" for n, x in figures["acceptance_length_by_nodes"].items())
        say(f"{name} ({len(ranks.ranks):,} positions): top-1 {top1}; top-5 {top5}")
        say(f"    acceptance length by nodes {by_nodes}")
    heads.float().load_state_dict(weights)
    chosen = {**_tree(config, tree, depth), "chosen_for": basis, "acceptance_length": lengths}
    card = model_card(
        heads.config,
        heads.num_parameters,
        base_parameters=base.num_parameters,
        facts={
            "training positions": f"{metrics['training']['distinct_positions']:,}",
            "steps": f"{int(run['steps']):,}",
            f"acceptance length on held-out text ({basis}, {tree.size} nodes)": f"{lengths[basis]:.2f}",
        },
    )
    heads.save_pretrained(
        config.output,
        extras={
            "tree.json": json.dumps(chosen) + "\n",
            "metrics.json": json.dumps(metrics, indent=1) + "\n",
            "training_config.yaml": config.to_yaml(),
            "README.md": card,
        },
    )
    say(f"heads written to {config.output}")
    return metrics
