"""The guard by simulation: scripted costs, scripted acceptance, no clock; and in the engine, on a clock of its own."""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.cli.common import Pair
from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder
from decode.guard import DEFAULT_GUARD, KEPT_RATIOS, LEAST_COST, CostMemory, Guard, GuardSettings
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from decode.tree import Tree, search_tree
from medusa_heads.base import Base, BaseOutput
from medusa_heads.medusa import MedusaHeads

Accuracy = Sequence[Sequence[float]]
NOTHING: Accuracy = [[0.0]]
USUAL: Accuracy = [[0.40, 0.11, 0.06, 0.04], [0.40, 0.10, 0.06], [0.35, 0.08], [0.30]]
"""About what the embedded heads reach; a tree of 8 nodes gives 1.8 tokens a round."""
EASY: Accuracy = [[0.80, 0.08, 0.03], [0.75, 0.08, 0.03], [0.70, 0.08], [0.70]]
SHAPE = search_tree(USUAL, 8)
BY_DEFAULT = Decoder.__init__.__kwdefaults__["guard"]
"""As the module is imported: tests run without a guard unless they name one."""


class World:
    """A machine on which a round over n nodes of each of `rows` rows takes 1 + slope · rows · (n - 1) plain rounds, and
    text on which the rank-r candidate at depth d is right with probability accuracy[d][r]."""

    def __init__(self, slope: float, rows: int = 1, noise: float = 0.08, stalls: float = 0.03, seed: int = 0):
        self.slope, self.rows, self.noise, self.stalls = slope, rows, noise, stalls
        self.random = random.Random(seed)
        self.tempo = 0.02
        """Seconds of a plain round."""

    def cost(self, nodes: int) -> float:
        return 1.0 + self.slope * self.rows * (nodes - 1)

    def seconds(self, nodes: int) -> float:
        """As a clock sees it: jitter, and now and then a stall of up to four times as long."""
        stall = self.random.uniform(1.5, 4.0) if self.random.random() < self.stalls else 1.0
        return self.tempo * self.cost(nodes) * self.random.lognormvariate(0.0, self.noise) * stall

    def tokens(self, tree: Tree, accuracy: Accuracy) -> float:
        return statistics.fmean(self._kept(tree, accuracy) for _ in range(self.rows))

    def _kept(self, tree: Tree, accuracy: Accuracy) -> int:
        node, kept = 0, 1
        for depth in range(tree.depth):
            draw, truth = self.random.random(), -1
            for rank, probability in enumerate(accuracy[depth] if depth < len(accuracy) else ()):
                if draw < probability:
                    truth = rank
                    break
                draw -= probability
            match = [child for child in tree.children[node] if tree.ranks[child] == truth]
            if not match:
                break
            node, kept = match[0], kept + 1
        return kept


def decode(
    world: World,
    accuracy: Accuracy | Callable[[float], Accuracy],
    tokens: int = 512,
    tree: Tree = SHAPE,
    costs: CostMemory | None = None,
    guarded: bool = True,
) -> tuple[float, list[int]]:
    """Plain rounds that `tokens` tokens took, for each token, and the nodes of every round."""
    guard = Guard(DEFAULT_GUARD, costs or CostMemory())
    sizes = {size: tree.pruned(size) for size in range(1, tree.size + 1)}
    done, spent, rounds = 0.0, 0.0, []
    while done < tokens:
        budget = guard.nodes(world.rows) if guarded else None
        shape = sizes[tree.size if budget is None else budget]
        gained = world.tokens(shape, accuracy(done) if callable(accuracy) else accuracy)
        guard.count(world.rows, shape.size, gained, world.seconds(shape.size))
        done, spent = done + gained, spent + world.cost(shape.size)
        rounds.append(shape.size)
    return spent / done, rounds


def mean(run: Callable[[int], float], seeds: int = 40) -> float:
    return statistics.fmean(run(seed) for seed in range(seeds))


@settings(max_examples=200, deadline=None)
@given(
    st.floats(1.02, 6.0),
    st.lists(st.integers(1, 5), min_size=50, max_size=600),
    st.floats(0.0, 10.0),
    st.floats(0.0, 0.05),
)
def test_whatever_the_text_the_loss_is_bounded(
    cost: float, gains: list[int], allowance: float, interest: float
) -> None:
    """The proof in the module's docstring: gains may come at the worst of times."""
    costs = CostMemory()
    guard = Guard(GuardSettings(allowance, interest), costs)
    for size in (8, 4, 2):
        for _ in range(KEPT_RATIOS):
            costs.add(1, size, cost)
    costs.first(1, 1)
    lost = plain = 0.0
    for number, gain in enumerate(gains):
        budget = guard.nodes(1)
        nodes, tree = budget or 8, budget != 1
        if number == 0:
            allowance += cost  # the first round of a call shows how large the trees are: it is never held back
        guard.count(1, nodes, gain if tree else 1, cost if tree else 1.0)
        lost += cost - gain if tree else 0.0
        plain += not tree
        assert lost <= allowance + interest * plain + 1e-6


@pytest.mark.parametrize("slope", (0.005, 0.02, 0.04, 0.12, 0.3))
def test_text_that_is_never_guessed_costs_three_percent_at_most(slope: float) -> None:
    """With nothing known of the machine, at any cost of a tree of 8 nodes from 1.04 to 3.1 plain rounds."""
    assert mean(lambda seed: decode(World(slope, seed=seed), NOTHING)[0]) < 1.03
    costs = CostMemory()
    decode(World(slope), NOTHING, costs=costs)
    assert mean(lambda seed: decode(World(slope, seed=seed + 1), NOTHING, costs=costs)[0]) < 1.025


@pytest.mark.parametrize("accuracy", (USUAL, EASY))
@pytest.mark.parametrize("slope", (0.005, 0.02, 0.04))
def test_text_that_is_guessed_well_loses_two_percent_at_most(slope: float, accuracy: Accuracy) -> None:
    free = mean(lambda seed: decode(World(slope, seed=seed), accuracy, guarded=False)[0], 80)
    assert free < 0.8, "speculation earns here"
    assert mean(lambda seed: decode(World(slope, seed=seed), accuracy)[0], 80) < 1.02 * free
    costs = CostMemory()
    assert mean(lambda seed: decode(World(slope, seed=seed), accuracy, costs=costs)[0], 80) < 1.02 * free


def test_a_batch_that_trees_do_not_pay_for_is_noticed() -> None:
    """Eight rows on two cores: a tree of 8 costs 2.4 plain rounds, more than the 1.9 tokens that it gives."""
    free = mean(lambda seed: decode(World(0.025, rows=8, seed=seed), USUAL, guarded=False)[0])
    held = mean(lambda seed: decode(World(0.025, rows=8, seed=seed), USUAL)[0])
    assert free > 1.25 and held < 1.03


def test_a_smaller_tree_stays_where_it_pays_and_the_large_one_does_not() -> None:
    """Trees of 64 cost 4.8 plain rounds and give 2.2 tokens; the small ones earn."""
    tree = search_tree(
        [[0.4, 0.11, 0.06, 0.04, 0.03, 0.02], [0.4, 0.1, 0.06, 0.03], [0.35, 0.08, 0.05], [0.3, 0.1]], 64
    )
    spent, rounds = decode(World(0.06), USUAL, tree=tree)
    assert spent < 0.95
    assert statistics.median(rounds[50:]) in (2, 4, 8), "settled on a size in between"


def test_speculation_returns_when_text_turns_easy_and_leaves_when_it_turns_hard() -> None:
    turning = decode(World(0.03), lambda done: NOTHING if done < 400 else EASY, tokens=1200)[1]
    assert statistics.fmean(size > 1 for size in turning[-100:]) > 0.9
    back = decode(World(0.03), lambda done: EASY if done < 400 else NOTHING, tokens=1200)[1]
    assert statistics.fmean(size > 1 for size in back[-300:]) < 0.1


def test_a_machine_that_slows_down_is_not_taken_for_bad_drafts() -> None:
    world, costs = World(0.02, noise=0.0, stalls=0.0), CostMemory()
    decode(world, EASY, costs=costs)
    before = costs.cost(1, 8)
    world.tempo *= 3
    rounds = decode(world, EASY, costs=costs)[1]
    assert statistics.fmean(size == 8 for size in rounds) > 0.95
    assert costs.cost(1, 8) == pytest.approx(before) == pytest.approx(world.cost(8))


def test_pauses_grow_longer() -> None:
    rounds = decode(World(0.04, noise=0.0, stalls=0.0), NOTHING, tokens=3000)[1]
    pauses = [len(run) for run in "".join("p" if size == 1 else "t" for size in rounds).split("t") if len(run) > 10]
    assert pauses[:5] == [16, 32, 64, 128, 256] and set(pauses[5:-1]) == {256}, "the last one is cut"


def test_rounds_of_different_batches_are_not_compared() -> None:
    """Rows end while trees are tried: the plain round after that is of a smaller batch, and no ratio."""
    costs = CostMemory()
    guard = Guard(DEFAULT_GUARD, costs)
    for rows in (4, 4, 4, 4, 3, 3, 3, 3):
        nodes = guard.nodes(rows) or 8
        guard.count(rows, nodes, 1.0, rows * (2.0 if nodes > 1 else 1.0))
    assert costs.count(4, 8) + costs.count(3, 8) > 0
    for rows in (3, 4):
        if costs.count(rows, 8):
            assert costs._ratios[rows, 8][0] == pytest.approx(2.0)


def test_costs_are_inferred_until_they_are_measured() -> None:
    costs = CostMemory()
    assert costs.cost(1, 1) == 1.0 and costs.cost(1, 2) <= 2.0
    assert 1.0 < costs.cost(1, 8) < costs.cost(4, 8)
    for _ in range(3):
        costs.add(1, 8, 1.7)
    assert costs.cost(1, 8) == 1.7
    assert costs.cost(1, 15) == pytest.approx(2.4) and costs.cost(2, 8) == pytest.approx(2.4)
    costs.add(1, 8, 40.0)
    assert costs.cost(1, 8) == 1.7, "one disturbed measurement changes nothing"
    for _ in range(KEPT_RATIOS):
        costs.add(1, 8, 0.9)
    assert costs.cost(1, 8) == LEAST_COST and costs.count(1, 8) == KEPT_RATIOS


def test_costs_may_be_shared_by_threads() -> None:
    costs, first = CostMemory(), []

    def work() -> None:
        for number in range(300):
            costs.add(1, 2 + number % 5, 1.5)
            costs.cost(2, 9)
            first.append(costs.first(1, number))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(first) == 300 and costs.cost(1, 3) == 1.5


# In the engine.

PROMPT = [5, 17, 40, 8, 61]
TREE = search_tree([[0.5, 0.3, 0.2], [0.4, 0.3], [0.4, 0.2]], 14)


class ScriptedClock:
    """Time stands still but for the base's passes: 1 second for a token, `slope` more for each further one."""

    def __init__(self, base: Base, slope: float, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        forward = base.forward

        def timed(input_ids: torch.Tensor, **arguments: object) -> BaseOutput:
            self.now += 1.0 + slope * (input_ids.shape[1] - 1)
            return forward(input_ids, **arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(base, "forward", timed)
        monkeypatch.setattr("decode.stats.time.perf_counter", lambda: self.now)


def drafter_of_noise(base: Base) -> MedusaDrafter:
    torch.manual_seed(0)
    heads = MedusaHeads.for_base(base, num_heads=3, num_layers=1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
    return MedusaDrafter(heads, base, TREE)


def test_noise_for_heads_is_turned_off_and_the_text_stays(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of_noise(base)
    request = GenerationSettings(max_new_tokens=240, eos_token_ids=())
    free = Decoder(base, drafter, guard=None).generate(PROMPT, request)
    assert free.stats.guarded_rounds == 0 and free.stats.tree_nodes == 14 * free.stats.rounds
    clock = ScriptedClock(base, 0.05, monkeypatch)
    decoder = Decoder(base, drafter, guard=DEFAULT_GUARD)
    held = decoder.generate(PROMPT, request)
    assert held.token_ids == free.token_ids
    assert held.stats.guarded_rounds > 0.8 * held.stats.rounds
    began = clock.now
    again = decoder.generate(PROMPT, request)
    assert again.token_ids == free.token_ids
    assert clock.now - began < 1.03 * 240, "what the first call learnt is known to the second"


def test_rows_of_a_batch_are_guarded_together(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedClock(base, 0.05, monkeypatch)
    prompts = [PROMPT, PROMPT[:3], PROMPT[1:]]
    request = GenerationSettings(max_new_tokens=120, eos_token_ids=())
    plain = Decoder(base).generate_batch(prompts, request)
    held = Decoder(base, drafter_of_noise(base), guard=DEFAULT_GUARD).generate_batch(prompts, request)
    assert [r.token_ids for r in held] == [r.token_ids for r in plain]
    assert all(r.stats.guarded_rounds > 0.7 * r.stats.rounds for r in held)


def test_a_seeded_text_does_not_depend_on_the_clock(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likeliest drafts: one draw a token, whatever the trees. Drawn drafts share the row's generator: not guarded."""
    drafter = drafter_of_noise(base)
    ScriptedClock(base, 0.05, monkeypatch)
    for temperature, drafting in ((0.8, "likeliest"), (1.0, "sampled")):
        request = GenerationSettings(
            100, SamplingParams(temperature=temperature), seed=3, eos_token_ids=(), drafting=drafting
        )
        free = Decoder(base, drafter, guard=None).generate(PROMPT, request)
        held = Decoder(base, drafter, guard=DEFAULT_GUARD).generate(PROMPT, request)
        assert held.token_ids == free.token_ids
        assert (held.stats.guarded_rounds > 0) == (drafting == "likeliest")


def test_the_guard_is_on_by_default() -> None:
    assert BY_DEFAULT == DEFAULT_GUARD


def test_commands_can_do_without(base: Base) -> None:
    pair = Pair(base, drafter_of_noise(base))
    assert pair.decoder().guard == DEFAULT_GUARD and pair.decoder(guarded=False).guard is None
