"""Limits of dynamic trees for a machine: what they gain by replayed drafts, over what they cost by the clock.

Drafts are recorded at every token of answers of the base, as wide and as deep as any limits to be tried. What a draft
model says of a path does not hang on the tree around it, so that each recording answers for every smaller choice of
limits: `replay` grows the very tree that decoding would have grown there. A walk over an answer, from round to round as
`decode.calibration` does it for static trees, then gives tokens, nodes and steps a round, and the costs their seconds.

At a rate of r tokens a second the best limits maximise tokens - r · seconds of a round (renewal reward); so floors of
confidence, which end a tree where a node or a step costs more than it promises, are tried beside depth, width and size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from decode.coupling import draw_many, sampled_acceptance
from decode.drafters import DraftRow
from decode.drafters.growth import Best, LikeliestGrowth
from decode.dynamic import DynamicTree
from decode.dynamic_costs import WIDTHS, DynamicCost
from decode.tree import Tree
from medusa_heads.base import BaseOutput
from medusa_heads.errors import ConfigError

if TYPE_CHECKING:
    from decode.drafters.eagle import EagleDrafter
    from decode.drafters.hydra import HydraDrafter
    from medusa_heads.base import Base

    Growing = EagleDrafter | HydraDrafter

DEEPEST = 8
NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
NODE_FLOORS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
STEP_FLOORS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8)
UNBOUNDED = 1 << 20
DRAWS, WIDEST_DRAW = 8, 4

Path = tuple[int, ...]
Recording = Mapping[Path, tuple[list[int], list[float]]]
"""Ranks from the root to a node → tokens and log-probabilities of its continuations, best first."""


class RecordingGrowth(LikeliestGrowth):
    """Grows everything within depth and width, and keeps what the draft model said."""

    def __init__(self, root: int, depth: int, width: int):
        super().__init__(root, DynamicTree(depth, width, UNBOUNDED))
        self.said: dict[Path, tuple[list[int], list[float]]] = {}

    def take(self, logits: torch.Tensor, best: Best) -> None:
        for place, node in enumerate(self.frontier):
            count = self.rule.width
            self.said[self.paths[node]] = (best.tokens[place][:count], best.logs[place][:count])
        super().take(logits, best)


@dataclass(frozen=True)
class Answer:
    """What drafting would have had to go by at each token of an answer."""

    tokens: list[int]
    """The root of the first round, and what follows it."""
    recordings: list[dict[int, Recording]]
    """By place of the root among them, by width."""


@torch.no_grad()
def record(
    base: Base,
    drafter: Growing,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    *,
    depth: int = DEEPEST,
    widths: Sequence[int] = WIDTHS,
) -> Answer:
    """Drafts at every token of an answer but the last, for all widths in one batch."""
    ids = [*prompt_ids, *answer]
    output = base.forward(torch.tensor([ids], device=base.device), layers=tuple(drafter.layers))
    session = drafter.start([DraftRow(tuple(prompt_ids), 0.0, torch.Generator()) for _ in widths])
    recordings: list[dict[int, Recording]] = []
    shown = 0
    for place in range(len(prompt_ids), len(ids) - 1):  # of the root
        _show(session, output, ids, shown, place, len(widths))
        shown = place
        growths = [RecordingGrowth(ids[place], depth, width) for width in widths]
        session.grow(growths)
        recordings.append({width: growth.said for width, growth in zip(widths, growths, strict=True)})
    return Answer(list(answer), recordings)


def _show(session: Any, output: BaseOutput, ids: Sequence[int], begin: int, end: int, rows: int) -> None:
    """Shows every row the same run of a text."""
    states = [s[:, begin:end].expand(rows, -1, -1) for s in (output.last_hidden_state, *output.layer_states)]
    tokens = torch.tensor([ids[begin:end]] * rows)
    session.observe(BaseOutput(states[0], tuple(states[1:])), tokens, [range(end - begin)] * rows)


def replay(recording: Recording, root: int, rule: DynamicTree) -> tuple[Tree, list[int], int]:
    """The tree that decoding would have grown: topology, tokens, and steps of the draft model.

    The recording must be at least as deep, and of the rule's width: a frontier is the best of a depth, and which nodes
    those are hangs on the width alone.
    """
    growth, steps = LikeliestGrowth(root, rule), 0
    while growth.frontier:
        said = [recording[growth.paths[node]] for node in growth.frontier]
        growth.take(torch.empty(0), Best([tokens for tokens, _ in said], [logs for _, logs in said]))
        steps += 1
    tree, tokens, _ = growth.finish()
    return tree, tokens, steps


@dataclass(frozen=True)
class DynamicOption:
    """Limits and what they are expected to give."""

    rule: DynamicTree
    tokens: float
    """A round, the base's own included."""
    seconds: float
    nodes: float
    steps: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def value(rule: DynamicTree, answers: Sequence[Answer], cost: DynamicCost) -> DynamicOption:
    """Walks all answers from round to round."""
    tokens = rounds = nodes = steps = 0
    seconds = 0.0
    for answer in answers:
        place = 0
        while place < len(answer.recordings):
            tree, drafted, read = replay(answer.recordings[place][rule.width], answer.tokens[place], rule)
            accepted = accepted_tokens(tree, drafted, answer.tokens[place + 1 :])
            kept = min(accepted + 1, len(answer.tokens) - 1 - place)
            place += accepted + 1
            tokens, rounds, nodes, steps = tokens + kept, rounds + 1, nodes + tree.size, steps + read
            seconds += cost.seconds(tree.size, read, rule.width)
    if not rounds:
        raise ConfigError("the base has answered none of the calibration prompts with two tokens or more")
    return DynamicOption(rule, tokens / rounds, seconds / rounds, nodes / rounds, steps / rounds)


def accepted_tokens(tree: Tree, drafted: Sequence[int], text: Sequence[int]) -> int:
    """Length of the tree's longest path that `text` takes."""
    node = 0
    for length, token in enumerate(text):
        child = next((c for c in tree.children[node] if drafted[c] == token), None)
        if child is None:
            return length
        node = child
    return len(text)


def choose_limits(answers: Sequence[Answer], cost: DynamicCost, *, deepest: int = DEEPEST) -> list[DynamicOption]:
    """Limits that were tried, the fastest first: a search along one limit after the other until none gives more.

    The first entry is at least as fast as every change of one of its limits within what was tried.
    """
    largest = max(cost.forward)
    grid: dict[str, Sequence[Any]] = {
        "width": sorted(cost.step),
        "nodes": [n for n in NODES if n <= largest] or [largest],
        "step_floor": STEP_FLOORS,
        "node_floor": NODE_FLOORS,
        "depth": range(1, deepest + 1),
    }
    known: dict[DynamicTree, DynamicOption] = {}

    def tried(rule: DynamicTree) -> DynamicOption:
        if rule not in known:
            known[rule] = value(rule, answers, cost)
        return known[rule]

    middle = sorted(cost.step)[len(cost.step) // 2]
    best = tried(DynamicTree(min(5, deepest), middle, min(12, largest)))
    while True:
        before = best
        for name, values in grid.items():
            options = (tried(replace(best.rule, **{name: v})) for v in values)
            best = max((best, *options), key=lambda option: option.tokens_per_second)
        if best is before:
            return sorted(known.values(), key=lambda option: -option.tokens_per_second)


@torch.no_grad()
def drawn_accuracy(
    base: Base,
    drafter: Growing,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    *,
    temperature: float,
    depth: int,
    stride: int = 8,
    seed: int = 0,
) -> tuple[torch.Tensor, int]:
    """How likely the first, second, … drawn child is kept, by depth, on an answer sampled from the base.

    Given that a path is kept, it has the base's own law; so the draft model is led along the answer itself, and at each
    depth the rule's probabilities are worked out from the two laws there, for a few draws of siblings. Returns the sum
    (depth, WIDEST_DRAW) over the places looked at, every `stride`-th, and their number.
    """
    ids = [*prompt_ids, *answer]
    output = base.forward(torch.tensor([ids], device=base.device), layers=tuple(drafter.layers))
    session = drafter.start([DraftRow(tuple(prompt_ids), 0.0, torch.Generator())])
    generator = torch.Generator().manual_seed(seed)
    found, count, shown = torch.zeros(depth, WIDEST_DRAW, dtype=torch.float64), 0, 0
    for place in range(len(prompt_ids), len(ids) - depth, stride):
        _show(session, output, ids, shown, place, 1)
        shown = place
        logits = session.lead(ids[place : place + depth])
        for step in range(depth):
            p = torch.softmax(base.project(output.last_hidden_state[0, place + step]).float() / temperature, dim=-1)
            q = torch.softmax(logits[step].float() / temperature, dim=-1)
            if drafter.draft_ids is not None:
                q = torch.zeros_like(p).index_copy_(0, drafter.draft_ids, q)
            draws = draw_many(q.cpu(), DRAWS, WIDEST_DRAW, generator)
            kept = sampled_acceptance(p.cpu(), q.cpu(), draws).mean(dim=0)
            found[step] += torch.diff(kept, prepend=torch.zeros(1, dtype=torch.float64))
        count += 1
    return found, count
