"""The end of a run: evaluation on held-out rows, the draft tree, and the heads' directory."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from decode.dynamic import DynamicTree
from train.evaluate import Ranks, best_tree, collect_ranks, path_probabilities, simulate, summarize
from train.losses import Rows
from train.progress import peak_bytes
from train.simulate import walk_rows
from train.states import StateSource
from train.trainer import HeadsTrainer, MedusaTrainer

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


@dataclass(frozen=True)
class ChosenTree:
    """The tree that is saved with the heads, and what it gains on held-out text."""

    saved: dict[str, Any]
    """As `tree.json` has it."""
    nodes: int
    lengths: dict[str, float]
    """Acceptance length for each kind of rows."""
    by_nodes: dict[str, dict[str, float]]
    """The same for dynamic trees of other sizes; empty for a static tree."""


def choose_tree(
    config: TrainingConfig,
    trainer: HeadsTrainer,
    source: StateSource,
    groups: Mapping[str, Sequence[int]],
    found: Mapping[str, Ranks],
    basis: str,
) -> ChosenTree:
    """Medusa heads: the best static tree by the ranks of `basis`. Others: limits of a dynamic tree."""
    settings = config.evaluation
    if isinstance(trainer, MedusaTrainer):
        tree = best_tree(path_probabilities(found[basis]), settings.tree_nodes)
        lengths = {name: simulate(ranks, tree) for name, ranks in found.items()}
        return ChosenTree({"tree": tree.to_dict()}, tree.size, lengths, {})
    limits = DynamicTree(settings.depth or trainer.depth, settings.tree_width, settings.tree_nodes)
    budgets = sorted({8, 16, 32, limits.nodes})
    drafter = trainer.drafter(replace(limits, nodes=budgets[-1]))
    by_nodes = {
        name: {str(n): walk_rows(drafter, source, rows[: settings.walked_rows], n).acceptance_length for n in budgets}
        for name, rows in groups.items()
    }
    lengths = {name: walked[str(limits.nodes)] for name, walked in by_nodes.items()}
    return ChosenTree({"dynamic": limits.to_dict()}, limits.nodes, lengths, by_nodes)


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
    tree = choose_tree(config, trainer, source, groups, found, basis)
    metrics: dict[str, Any] = {
        "evaluation": {name: summarize(ranks) for name, ranks in found.items()},
        "evaluated_on": "held-out rows" if eval_rows else "training rows",
        "tree_nodes": tree.nodes,
        "tree_acceptance_length": tree.lengths,
        "dynamic_acceptance_length_by_nodes": tree.by_nodes,
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
        gains = tree.by_nodes.get(name) or figures["acceptance_length_by_nodes"]
        by_nodes = " ".join(f"{n}: {x:.2f}" for n, x in gains.items())
        say(f"{name} ({len(ranks.ranks):,} positions): top-1 {top1}; top-5 {top5}")
        say(f"    acceptance length by nodes {by_nodes}")
    heads.float().load_state_dict(weights)
    chosen = {**tree.saved, "chosen_for": basis, "acceptance_length": tree.lengths}
    card = model_card(
        heads.config,
        heads.num_parameters,
        base_parameters=base.num_parameters,
        facts={
            "training positions": f"{metrics['training']['distinct_positions']:,}",
            "steps": f"{int(run['steps']):,}",
            f"acceptance length on held-out text ({basis}, {tree.nodes} nodes)": f"{tree.lengths[basis]:.2f}",
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
