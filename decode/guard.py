"""The guard: speculation may lose next to nothing against plain decoding.

All amounts are in *plain rounds*, the time of a round without drafts for the rows at hand. A round that verifies a tree
costs c of them and gives `tokens` a row, so it earns tokens - c; a plain round earns 0. The guard keeps an account:

    credit ← min(allowance, credit + tokens - c)    after a round with a tree, which it allows only if credit ≥ c - 1
    credit ← min(allowance, credit + interest)      after a plain round

A round gives at least one token, so the credit never falls below zero, and over n tokens speculation loses at most
allowance + interest · n plain rounds: with the defaults 11.1 of 512, 2.2 %, whatever the text. What is earned beyond
the allowance is forgotten, so that text that turns bad is noticed as soon after an hour as after a minute.

Within that bound the credit is staked on trials. A trial runs at one size of tree until its stake, half the credit, is
lost; then a smaller tree gets its trial if it could pay even with the tokens that the larger one gave, and if none can,
nothing is drafted for a while: 16 rounds, then 32, 64 … A trial that goes well moves to the next larger tree.

What a tree costs is measured on the side: after rounds with a tree comes a plain one, and the two together give one
ratio, which a machine that grows slower or a context that grows longer does not disturb. A plain round among rounds
that earn is itself a loss, which has an account of its own: at most 1 + 0.75 % of the time.

(Bounded loss by an account that forgets gains is Page's CUSUM, 1954, turned into a rule of stopping.)
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from dataclasses import dataclass

RECENT = 4
"""Rounds of one size whose median stands in a ratio."""
PAIRED = 3
"""Plain rounds after a tree's that are still compared with them."""
KEPT_RATIOS = 15
TRUSTED_RATIOS = 3
"""Below this many ratios, what was assumed counts as one more."""
ASSUMED_SLOPE = 0.03
"""Cost of one more node of one row, in plain rounds, before anything is measured."""
PROBE_ROUNDS = 4
"""Rounds without any accepted draft that a trial must be able to pay for."""
FIRST_WAIT, LONGEST_WAIT = 16, 256
DOUBTFUL = 0.1
"""A plain round that loses less than this against one with a tree is worth measuring often."""
LEAST_COST = 1.02
"""No tree is taken to cost less: at 1, text without any accepted draft would never be noticed."""
TRIAL_WINDOW = 32
"""Rounds over which a trial's tokens are averaged."""


@dataclass(frozen=True)
class GuardSettings:
    """What speculation may lose."""

    allowance: float = 6.0
    """Plain rounds that may be lost at once."""
    interest: float = 0.01
    """Part of a plain round that each plain round adds to what may be lost."""
    measuring: float = 0.0075
    """Part of the time that measuring plain rounds may cost while speculation earns."""


DEFAULT_GUARD = GuardSettings()


class CostMemory:
    """What trees have cost, in plain rounds, by number of rows and of nodes. Calls share it; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ratios: dict[tuple[int, int], deque[float]] = {}
        self._seen: set[tuple[int, int]] = set()

    def first(self, rows: int, nodes: int) -> bool:
        """Whether no round of this shape was counted before: its time has that of compiling kernels in it."""
        with self._lock:
            new = (rows, nodes) not in self._seen
            self._seen.add((rows, nodes))
            return new

    def add(self, rows: int, nodes: int, ratio: float) -> None:
        with self._lock:
            self._ratios.setdefault((rows, nodes), deque(maxlen=KEPT_RATIOS)).append(ratio)

    def count(self, rows: int, nodes: int) -> int:
        """Ratios at hand for this shape."""
        with self._lock:
            return len(self._ratios.get((rows, nodes), ()))

    def cost(self, rows: int, nodes: int) -> float:
        """Plain rounds that a round of this shape takes: the median of what was measured. Where too little was: a
        straight line through the nearest size measured, for the nearest number of rows (more rows cost in proportion
        more), or an assumption."""
        if nodes == 1:
            return 1.0
        with self._lock:
            own = list(self._ratios.get((rows, nodes), ()))
            if len(own) < TRUSTED_RATIOS:
                own.append(self._inferred(rows, nodes))
        return max(LEAST_COST, statistics.median(own))

    def _inferred(self, rows: int, nodes: int) -> float:
        known = [shape for shape in self._ratios if shape != (rows, nodes)]
        others = [shape for shape in known if len(self._ratios[shape]) >= TRUSTED_RATIOS] or known
        if not others:
            return min(float(nodes), 1.0 + ASSUMED_SLOPE * rows * (nodes - 1))
        near = min(others, key=lambda shape: (abs(shape[0] - rows), abs(shape[1] - nodes)))
        excess = max(0.0, statistics.median(self._ratios[near]) - 1.0)
        return 1.0 + excess * (nodes - 1) / (near[1] - 1) * max(1.0, rows / near[0])


class Guard:
    """Watches one call of the decoder: asked for each round how many nodes it may have, told what the round gave."""

    def __init__(self, settings: GuardSettings, costs: CostMemory):
        self.settings = settings
        self.costs = costs
        self.credit = settings.allowance
        self._most = settings.allowance / 2  # of a stake
        self._sizes: list[int] = []  # of trees, the drafter's own first, each half of the one before
        self._level: int | None = 0  # which size is tried; None: nothing is drafted
        self._level_of_round: int | None = 0
        self._wait, self._patience = FIRST_WAIT, FIRST_WAIT
        self._paused = 0  # rounds since speculation was turned off
        self._elapsed = 0.0
        self._spent_measuring = 0.0
        self._trees: deque[float] = deque(maxlen=RECENT)  # seconds of the last rounds with a tree
        self._tree_size = 0
        self._rows = 0
        self._plain: deque[float] = deque(maxlen=RECENT)
        self._since_tree, self._since_plain = 0, 0
        self._stake = self._most
        self._tokens: deque[float] = deque(maxlen=TRIAL_WINDOW)
        self._at_most = 0  # rounds in a row with the stake near its most, and earning

    @property
    def holds_back(self) -> bool:
        """Whether the round that `nodes` was asked for had to do with less than the drafter's own tree."""
        return self._level_of_round != 0

    def nodes(self, rows: int) -> int | None:
        """The most nodes of the next round's trees: None, as many as the drafter finds best; 1, no draft."""
        self._level_of_round = self._choose(rows)
        if self._level_of_round is None:
            return 1
        return None if self._level_of_round == 0 else self._sizes[self._level_of_round]

    def _choose(self, rows: int) -> int | None:
        """The level of the next round; None: a plain round."""
        if not self._sizes:
            return 0  # the first rounds show how large the drafter's own trees are
        if self._level is None:
            if self._paused >= self._wait:
                self._probe(rows)
        elif min(self._stake, self.credit) < self._risk(rows, self._level):
            self._give_up(rows)
        elif self._level > 0 and self._at_most >= self._patience:
            self._begin(self._level - 1)
        if self._level is None or self.credit < self._risk(rows, self._level) or self._measures(rows):
            return None
        return self._level

    def count(self, rows: int, nodes: int, tokens: float, seconds: float) -> None:
        """Takes in the round that `nodes` was asked for: trees of `nodes` nodes (the largest row's) for `rows` rows,
        `tokens` emitted a row, in `seconds`."""
        level = self._level_of_round
        if rows != self._rows:  # times of other numbers of rows are not comparable
            self._rows = rows
            self._trees.clear()
            self._plain.clear()
        if level == 0 and nodes > max(self._sizes, default=1):
            self._sizes = [nodes >> halvings for halvings in range(nodes.bit_length() - 1)]
        size = 1 if level is None or not self._sizes else self._sizes[level]
        fresh = self.costs.first(rows, size)
        if size > 1:
            self._count_tree(rows, size, tokens, None if fresh else seconds)
        else:
            self._count_plain(rows, None if fresh else seconds)

    def _count_tree(self, rows: int, size: int, tokens: float, seconds: float | None) -> None:
        cost = self.costs.cost(rows, size)
        if size != self._tree_size:
            self._trees.clear()
        if seconds is not None:
            if self._paused > 0 and self._plain:
                # The drafter has caught up with a pause; a stall of the machine must not pass for it.
                cost = min(max(cost, seconds / statistics.median(self._plain)), cost + 1.0)
            else:
                self._trees.append(seconds)
        self._tree_size, self._paused = size, 0
        self._since_tree, self._since_plain = 0, self._since_plain + 1
        self._elapsed += cost
        self.credit = max(0.0, min(self.settings.allowance, self.credit + tokens - cost))
        self._stake = min(self._most, self._stake + tokens - cost)
        self._tokens.append(tokens)
        goes_well = self._stake >= self._most - 1.0 and statistics.fmean(self._tokens) > cost
        self._at_most = self._at_most + 1 if goes_well else 0
        if self._at_most >= TRIAL_WINDOW:
            self._wait = FIRST_WAIT

    def _count_plain(self, rows: int, seconds: float | None) -> None:
        if self._level is None:
            self._paused += 1
        elif self._sizes:
            self._spent_measuring += self._loss_of_plain_round(rows)
        self._elapsed += 1.0
        self.credit = min(self.settings.allowance, self.credit + self.settings.interest)
        if seconds is None:
            return  # of a first round nothing is learnt: the next is asked for at once
        self._since_tree, self._since_plain = self._since_tree + 1, 0
        self._plain.append(seconds)
        if self._trees and self._since_tree <= PAIRED:
            self.costs.add(rows, self._tree_size, statistics.median(self._trees) / seconds)

    def _begin(self, level: int) -> None:
        self._level = level
        self._stake = min(self._most, self.credit / 2)
        self._tokens.clear()
        self._at_most = 0

    def _risk(self, rows: int, level: int) -> float:
        """What a round loses if no draft is accepted."""
        return self.costs.cost(rows, self._sizes[level]) - 1.0

    def _affords(self, rows: int, level: int) -> bool:
        return self.credit / 2 >= PROBE_ROUNDS * self._risk(rows, level)

    def _give_up(self, rows: int) -> None:
        """The stake is lost: a smaller tree, or none."""
        assert self._level is not None
        given = statistics.fmean(self._tokens) if self._tokens else 1.0 + self._risk(rows, self._level)
        self._patience = min(2 * self._patience, LONGEST_WAIT)
        for level in range(self._level + 1, len(self._sizes)):
            if given > 1.0 + self._risk(rows, level) and self._affords(rows, level):
                self._begin(level)
                return
        self._level, self._paused = None, 0

    def _probe(self, rows: int) -> None:
        """Another trial after a pause, with the largest tree that can be afforded. Until it has gone well, the next
        pause is twice as long."""
        for level in range(len(self._sizes)):
            if self._affords(rows, level):
                self._begin(level)
                self._wait = min(2 * self._wait, LONGEST_WAIT)
                return

    def _loss_of_plain_round(self, rows: int) -> float:
        """Plain rounds that one plain round loses against a round with a tree: 1 - c / tokens, or 0 if that is less."""
        if self._level is None or not self._tokens:
            return 0.0
        return max(0.0, 1.0 - (1.0 + self._risk(rows, self._level)) / statistics.fmean(self._tokens))

    def _measures(self, rows: int) -> bool:
        """Whether the next round is a plain one, to learn what the tree costs: sooner where it is not known yet or
        speculation may not pay, which also is where it is cheap."""
        assert self._level is not None
        if self._since_plain == 0 or not self._trees:
            return False
        known = self.costs.count(rows, self._sizes[self._level])
        loss = self._loss_of_plain_round(rows)
        doubtful = loss < DOUBTFUL or self._stake < self._most - 1.0
        at_once, in_time = (min(2 + 2 * known, 8), 16) if known < KEPT_RATIOS else (32, 64)
        interval = at_once if doubtful else in_time
        allowed = 1.0 + self.settings.measuring * self._elapsed
        return self._since_plain >= interval and self._spent_measuring + loss <= allowed
