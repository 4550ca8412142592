"""The end of a run: evaluation on held-out rows, the draft tree, and the heads' directory."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decode.drafters.adaptive import Reach
from decode.dynamic import DynamicTree
from medusa_heads.draft_model import FILES, DraftModel, drafting_in
from medusa_heads.errors import HeadsError
from medusa_heads.fetching import EXTRAS, WEIGHTS
from medusa_heads.formats.checkpoint import CONFIG
from medusa_heads.placing import check_replaceable
from train.draft_model import DEPTH, DraftTrainer
from train.evaluate import Ranks, best_tree, collect_ranks, path_probabilities, simulate, summarize
from train.losses import Rows
from train.progress import peak_bytes
from train.simulate import walk_rows
from train.states import StateSource
from train.trainer import HeadsTrainer, MedusaTrainer

if TYPE_CHECKING:
    from train.config import TrainingConfig


def check_output(config: TrainingConfig) -> None:
    """Raises HeadsError where saving would, after all the training: `output` holds what heads may not replace."""
    target = Path(config.output)
    if config.heads.family != "draft_model":
        check_replaceable(target, {CONFIG, WEIGHTS, *EXTRAS})
        return
    there = [path.name for path in target.iterdir()] if target.is_dir() else []
    if there and drafting_in(target) is None:
        raise HeadsError(f"cannot save a draft model at {target}: it holds something else")
    check_replaceable(target, {name for name in there if any(fnmatch(name, pattern) for pattern in FILES)})


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
    by_depth: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same for a draft model's chains of several lengths."""


def choose_tree(
    config: TrainingConfig,
    trainer: HeadsTrainer,
    source: StateSource,
    groups: Mapping[str, Sequence[int]],
    found: Mapping[str, Ranks],
    basis: str,
) -> ChosenTree:
    """Medusa heads: the best static tree by the ranks of `basis`. Others: limits of a dynamic tree, for a draft model
    the better on `basis` of a chain and a tree."""
    settings = config.evaluation
    if isinstance(trainer, DraftTrainer):
        return _choose_limits(config, trainer, source, groups, basis)
    if isinstance(trainer, MedusaTrainer):
        tree = best_tree(path_probabilities(found[basis]), settings.tree_nodes)
        lengths = {name: simulate(ranks, tree) for name, ranks in found.items()}
        return ChosenTree({"tree": tree.to_dict()}, tree.size, lengths, {})
    limits = DynamicTree(settings.depth or trainer.depth, settings.tree_width, settings.tree_nodes)
    budgets = sorted({8, 16, 32, limits.nodes})
    drafter = trainer.drafter(replace(limits, nodes=budgets[-1]))

    def walked(rows: Sequence[int], nodes: int) -> float:
        return walk_rows(drafter, trainer.base, source, rows[: settings.walked_rows], nodes).acceptance_length

    by_nodes = {name: {str(n): walked(rows, n) for n in budgets} for name, rows in groups.items()}
    lengths = {name: gained[str(limits.nodes)] for name, gained in by_nodes.items()}
    return ChosenTree({"dynamic": limits.to_dict()}, limits.nodes, lengths, by_nodes)


def _choose_limits(
    config: TrainingConfig, trainer: DraftTrainer, source: StateSource, groups: Mapping[str, Sequence[int]], basis: str
) -> ChosenTree:
    """Limits for a draft model, walked with what is saved as it will be loaded."""
    settings = config.evaluation
    depth = settings.depth or DEPTH
    budgets = sorted({8, 16, 32, settings.tree_nodes})
    depths = sorted({2, 4, depth, max(1, min(depth, settings.tree_nodes - 1))})
    with trainer.saved_drafter() as drafter_of:

        def walk(reach: Reach) -> dict[str, float]:
            kept, drafter = settings.walked_rows, drafter_of(reach)
            walks = {
                name: walk_rows(drafter, trainer.base, source, rows[:kept], reads_states=False)
                for name, rows in groups.items()
            }
            return {name: walked.acceptance_length for name, walked in walks.items()}

        chains = {d: walk(Reach(d)) for d in depths}
        trees = {n: walk(Reach(depth, settings.tree_width, n)) for n in budgets}
    nodes = settings.tree_nodes
    longest = max(1, min(depth, nodes - 1))
    chain, tree = chains[longest], trees[nodes]
    better = chain[basis] >= tree[basis]
    limits = Reach(longest, 1, longest + 1) if better else Reach(depth, settings.tree_width, nodes)
    return ChosenTree(
        {"depth": limits.depth, "width": limits.width, "nodes": limits.most_nodes},
        limits.most_nodes,
        chain if better else tree,
        {name: {str(n): trees[n][name] for n in budgets} for name in groups},
        {name: {str(d): chains[d][name] for d in depths} for name in groups},
    )


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

    heads, base = trainer.heads, trainer.base
    weights = {key: value.detach().clone() for key, value in heads.state_dict().items()}
    heads.to(base.dtype).eval()
    depth = 1 if isinstance(trainer, DraftTrainer) else config.evaluation.depth or trainer.depth
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
        **({"chain_acceptance_length_by_depth": tree.by_depth} if tree.by_depth else {}),
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
        if tree.by_depth:
            say("    of chains by depth " + " ".join(f"{d}: {x:.2f}" for d, x in tree.by_depth[name].items()))
    heads.float().load_state_dict(weights)
    _save(config, trainer, tree, metrics, basis)
    say(f"{'draft model' if isinstance(trainer, DraftTrainer) else 'heads'} written to {config.output}")
    return metrics


def _save(
    config: TrainingConfig, trainer: HeadsTrainer, tree: ChosenTree, metrics: Mapping[str, Any], basis: str
) -> None:
    from medusa_heads.card import draft_card, model_card

    heads, base = trainer.heads, trainer.base
    kind = "static" if isinstance(trainer, MedusaTrainer) else "grown while drafting"
    facts = {
        "training data": f"{metrics['training']['rows']:,} conversations that the base answered",
        "draft tree": f"{kind}, {tree.nodes} nodes",
        "training positions": f"{metrics['training']['distinct_positions']:,}",
        "steps": f"{int(metrics['training']['steps']):,}",
        f"acceptance length on held-out text ({basis}, {tree.nodes} nodes)": f"{tree.lengths[basis]:.2f}",
    }
    extras = {"metrics.json": json.dumps(metrics, indent=1) + "\n", "training_config.yaml": config.to_yaml()}
    if isinstance(trainer, DraftTrainer):
        drafting = trainer.heads.drafting(**tree.saved)
        card = draft_card(trainer.heads, drafting, base_parameters=base.num_parameters, facts=facts)
        trainer.heads.save_pretrained(config.output, drafting, extras={**extras, "README.md": card})
        return
    assert not isinstance(heads, DraftModel)
    chosen = {**tree.saved, "chosen_for": basis, "acceptance_length": tree.lengths}
    card = model_card(heads.config, heads.num_parameters, base_parameters=base.num_parameters, facts=facts)
    heads.save_pretrained(
        config.output,
        extras={**extras, "tree.json": json.dumps(chosen) + "\n", "README.md": card},
    )
