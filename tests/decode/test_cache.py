"""The tree cache against the plainest one there is: a list of kept entries for each row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.cache import TreeCache
from decode.tree import Tree
from tests.conftest import tiny_base

TREE = Tree((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))
HEADS, DIM = 2, 3


class Naive:
    """What each row has kept, entry by entry."""

    def __init__(self, rows: int):
        self.kept: list[list[Tensor]] = [[] for _ in range(rows)]

    def commit(self, new: Tensor, paths: list[list[int]]) -> None:
        for row, path in enumerate(paths):
            self.kept[row] += [new[row, :, node] for node in path]


def write(cache: TreeCache, tokens: int, seed: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Shows each layer random entries (B, H, T, d); layer l gets them plus l, values are their negatives."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(len(cache.lengths), HEADS, tokens, DIM, generator=generator)
    return new, [cache.update(new + i, -new - i, i) for i in range(len(cache.layers))]


def assert_holds(cache: TreeCache, naive: Naive) -> None:
    assert cache.lengths == [len(entries) for entries in naive.kept]
    for i, layer in enumerate(cache.layers):
        for row, entries in enumerate(naive.kept):
            if entries:
                expected = torch.stack(entries, dim=1) + i
                assert torch.equal(layer.keys[row, :, : len(entries)], expected)
                assert torch.equal(layer.values[row, :, : len(entries)], -expected)


PATHS = st.sampled_from([[], [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]])


@settings(max_examples=50, deadline=None)
@given(
    capacity=st.integers(1, 40),
    rounds=st.lists(st.tuples(PATHS, PATHS, PATHS), min_size=1, max_size=6),
)
def test_commits_equal_those_of_a_naive_cache(capacity: int, rounds: list[tuple[list[int], ...]]) -> None:
    """Unequal rows, any paths, buffers that are too small at first."""
    cache, naive = TreeCache(2, batch_size=3, capacity=capacity), Naive(3)
    new, _ = write(cache, 4, seed=99)
    prompt = [list(range(n)) for n in (4, 2, 1)]
    cache.commit(prompt)
    naive.commit(new, prompt)
    for seed, paths in enumerate(rounds):
        offset = cache.offset
        new, views = write(cache, 6, seed)
        for i, (keys, values) in enumerate(views):
            assert keys.shape == (3, HEADS, offset + 6, DIM)
            assert torch.equal(keys[:, :, offset:], new + i) and torch.equal(values[:, :, offset:], -new - i)
        cache.commit(list(paths))
        naive.commit(new, list(paths))
        assert_holds(cache, naive)


def test_visible_slots_of_unequal_rows_by_hand() -> None:
    cache = TreeCache(1, batch_size=2, capacity=8)
    write(cache, 3, 0)
    cache.commit([[0, 1, 2], [0]])
    mask = cache.visible(Tree.chain(2).ancestor_mask)
    assert mask.int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]],
    ]
    positions = cache.positions(torch.tensor([0, 1]))
    assert positions.tolist() == [[3, 4], [1, 2]]
    assert cache.positions(torch.tensor([[0, 1], [0, 0]])).tolist() == [[3, 4], [1, 1]]
    assert cache.key_positions(positions).tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 1, 2]]
    own = torch.stack((Tree.chain(2).ancestor_mask, torch.eye(2, dtype=torch.bool)))
    assert cache.visible(own)[1].int().tolist() == [[1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]


def test_the_position_of_a_node_is_the_committed_length_plus_its_depth() -> None:
    cache = TreeCache(1)
    write(cache, 5, 0)
    cache.commit([range(5)])
    assert cache.positions(torch.tensor(TREE.depths)).tolist() == [[5, 6, 6, 7, 7, 7]]


def test_what_is_committed_is_not_copied() -> None:
    """Views of one buffer, as long as it is large enough; grown with what it holds otherwise."""
    cache, naive = TreeCache(1, capacity=16), Naive(1)
    new, _ = write(cache, 6, 0)
    cache.commit([[0, 1, 3]])
    naive.commit(new, [[0, 1, 3]])
    buffer = cache.layers[0].keys.data_ptr()
    new, views = write(cache, 6, 1)
    assert views[0][0].data_ptr() == buffer
    cache.commit([range(6)])
    naive.commit(new, [list(range(6))])
    assert cache.layers[0].keys.data_ptr() == buffer
    new, _ = write(cache, 40, 2)
    cache.commit([range(40)])
    naive.commit(new, [list(range(40))])
    assert cache.layers[0].keys.shape[2] >= 49
    assert_holds(cache, naive)


def test_truncation_forgets_the_end_of_a_row() -> None:
    cache, naive = TreeCache(1, batch_size=2), Naive(2)
    new, _ = write(cache, 6, 0)
    cache.commit([range(6), range(4)])
    naive.commit(new, [list(range(6)), list(range(4))])
    cache.truncate(3)
    cache.truncate(1, row=1)
    naive.kept = [naive.kept[0][:3], naive.kept[1][:1]]
    assert cache.lengths == [3, 1] and cache.offset == 3
    new, _ = write(cache, 6, 1)
    cache.commit([[0, 2], [0, 1, 4]])
    naive.commit(new, [[0, 2], [0, 1, 4]])
    assert_holds(cache, naive)
    for length in (-1, 6):
        with pytest.raises(ValueError, match=f"cannot keep {length} of 5"):
            cache.truncate(length)


def test_rows_are_kept_in_the_order_asked_for() -> None:
    cache, naive = TreeCache(2, batch_size=3), Naive(3)
    new, _ = write(cache, 4, 0)
    cache.commit([range(4), range(1), range(3)])
    naive.commit(new, [list(range(n)) for n in (4, 1, 3)])
    cache.keep_rows([2, 1])
    naive.kept = [naive.kept[2], naive.kept[1]]
    assert cache.offset == 3
    assert_holds(cache, naive)
    new, _ = write(cache, 6, 1)
    cache.commit([[0, 2], [0]])
    naive.commit(new, [[0, 2], [0]])
    assert_holds(cache, naive)


def test_rows_can_be_dropped_before_anything_is_written() -> None:
    cache = TreeCache(1, batch_size=3)
    cache.keep_rows([1])
    write(cache, 2, 0)
    assert cache.lengths == [0] and cache.layers[0].keys.shape[0] == 1


@pytest.fixture
def nan_memory() -> object:
    """Memory that nobody has written reads as NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_unwritten_slots_never_reach_the_states(nan_memory: object, family: str) -> None:
    base = tiny_base(family)
    cache = TreeCache(base.num_layers, batch_size=2, capacity=3)
    positions = cache.positions(torch.arange(4))
    base.forward(torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0]]), position_ids=positions, cache=cache)
    cache.commit([range(4), range(1)])
    for _ in range(3):
        positions = cache.positions(torch.tensor(TREE.depths))
        out = base.forward(
            torch.arange(12).view(2, 6),
            position_ids=positions,
            attention_mask=cache.visible(TREE.ancestor_mask),
            key_positions=cache.key_positions(positions),
            cache=cache,
        )
        assert out.last_hidden_state.isfinite().all()
        cache.commit([[0, 1, 4], []])


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "gpt2"])
def test_a_model_goes_on_from_a_committed_path_as_from_plain_text(family: str) -> None:
    base = tiny_base(family)
    prompts = [[5, 17, 40, 8, 61, 33, 12, 70], [9, 2, 77]]
    cache = TreeCache(base.num_layers, batch_size=2, capacity=4)
    padded = torch.tensor([prompts[0], prompts[1] + [0] * 5])
    base.forward(padded, position_ids=cache.positions(torch.arange(8)), cache=cache)
    cache.commit([range(8), range(3)])
    texts = [list(p) for p in prompts]
    for step, paths in enumerate(([[0, 2, 5], [0, 1]], [[0], [0, 1, 4]], [[0, 1, 3], [0, 2]])):
        tokens = torch.arange(12).view(2, 6) * 3 + step
        positions = cache.positions(torch.tensor(TREE.depths))
        states = base.forward(
            tokens,
            position_ids=positions,
            attention_mask=cache.visible(TREE.ancestor_mask),
            key_positions=cache.key_positions(positions),
            cache=cache,
        ).last_hidden_state
        for row, path in enumerate(paths):
            texts[row] += tokens[row, path].tolist()
            plain = base.forward(torch.tensor([texts[row]])).last_hidden_state[0, -1]
            torch.testing.assert_close(states[row, path[-1]], plain, rtol=1e-4, atol=2e-4)
        cache.commit(paths)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_tree_grown_in_several_passes_equals_one_pass(family: str) -> None:
    """Held nodes are seen by their descendants alone, and a path over several passes is committed like any other."""
    base = tiny_base(family)
    prompts = torch.tensor([[5, 9, 31, 8, 77, 12], [6, 3, 4, 0, 0, 0]])
    tokens = torch.tensor([[11, 22, 33, 44, 55, 66], [12, 23, 34, 45, 56, 67]])
    path = [0, 1, 4]

    def prepared() -> TreeCache:
        cache = TreeCache(base.num_layers, 2, capacity=8)
        base.forward(prompts, position_ids=cache.positions(torch.arange(6)), cache=cache)
        cache.commit([range(6), range(3)])
        return cache

    def read(cache: TreeCache, nodes: list[int]) -> Tensor:
        positions = cache.positions(torch.tensor(TREE.depths))
        seen = TREE.ancestor_mask[nodes, : nodes[-1] + 1]
        return base.forward(
            tokens[:, nodes],
            position_ids=positions[:, nodes],
            attention_mask=cache.visible(seen),
            key_positions=cache.key_positions(positions[:, : nodes[-1] + 1]),
            cache=cache,
        ).last_hidden_state

    whole, grown = prepared(), prepared()
    expected = read(whole, [0, 1, 2, 3, 4, 5])
    states = []
    for nodes in ([0], [1, 2], [3, 4, 5]):
        states.append(read(grown, nodes))
        grown.hold(len(nodes))
    assert torch.allclose(torch.cat(states, dim=1), expected, atol=1e-5)
    for cache in (whole, grown):
        cache.commit([path, path[:2]])
    assert grown.lengths == whole.lengths == [9, 5] and grown.offset == whole.offset
    for ours, theirs in zip(grown.layers, whole.layers, strict=True):
        for row, length in enumerate(whole.lengths):
            assert torch.allclose(ours.keys[row, :, :length], theirs.keys[row, :, :length], atol=1e-5)
            assert torch.allclose(ours.values[row, :, :length], theirs.values[row, :, :length], atol=1e-5)
    grown.hold(3)
    grown.release()
    assert grown.offset == 9


def test_layers_of_one_shape_share_a_buffer_and_others_do_not() -> None:
    """Keys wider than values, layers with fewer heads, a layer that is never shown anything."""
    cache = TreeCache(4, capacity=8)
    shapes = [((2, 3), (2, 3)), ((2, 3), (2, 2)), ((1, 3), (1, 3))]
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[Tensor, Tensor]] = []
    for nodes, path in ((5, [0, 1, 2, 3, 4]), (6, [0, 2, 5]), (6, [0, 1, 4])):
        for i, pair in enumerate(shapes):
            new = [torch.randn(1, heads, nodes, dim, generator=generator) for heads, dim in pair]
            keys, values = cache.update(new[0], new[1], i)
            assert torch.equal(keys[:, :, -nodes:], new[0]) and torch.equal(values[:, :, -nodes:], new[1])
            before = kept[i] if len(kept) > i else (new[0][:, :, :0], new[1][:, :, :0])
            after = tuple(torch.cat((old, fresh[:, :, path]), dim=2) for old, fresh in zip(before, new, strict=True))
            kept[i : i + 1] = [(after[0], after[1])]
        cache.commit([path])
    assert cache.lengths == [11]
    layers = cache.layers
    for layer, (keys, values) in zip(layers[:3], kept, strict=True):
        assert torch.equal(layer.keys[:, :, :11], keys) and torch.equal(layer.values[:, :, :11], values)
    memory = [plane.untyped_storage().data_ptr() for layer in layers[:3] for plane in (layer.keys, layer.values)]
    assert memory[0] == memory[1] == memory[2] and len(set(memory)) == 3
    assert not layers[3].is_initialized


def test_a_first_pass_that_is_repeated_replaces_what_it_gave() -> None:
    cache, naive = TreeCache(2), Naive(1)
    write(cache, 7, 0)
    new, _ = write(cache, 4, 1)
    cache.commit([[0, 2, 3]])
    naive.commit(new, [[0, 2, 3]])
    assert_holds(cache, naive)


def test_a_first_pass_can_be_held() -> None:
    cache, naive = TreeCache(2), Naive(1)
    first, _ = write(cache, 3, 0)
    cache.hold(3)
    second, views = write(cache, 2, 1)
    assert views[0][0].shape[2] == 5
    cache.commit([[0, 2, 4]])
    naive.commit(torch.cat((first, second), dim=2), [[0, 2, 4]])
    assert_holds(cache, naive)


def test_the_room_of_a_pass_is_where_update_writes_and_what_it_reads() -> None:
    """Also after rows were dropped, buffers have grown, and behind what is held."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (TreeCache(num_layers=2, batch_size=2, capacity=4) for _ in range(2))

    def states(length: int) -> list[list[torch.Tensor]]:
        rows = len(ours.lengths)
        return [[torch.randn(rows, 3, length, 5, generator=generator) for _ in "kv"] for _ in range(2)]

    def check(length: int) -> None:
        for layer, (k, v) in enumerate(states(length)):
            room = ours.room(layer, length)
            assert room is not None
            room[0].copy_(torch.stack((k, v)))
            assert all(map(torch.equal, room[1:], theirs.update(k, v, layer)))

    assert ours.room(0, 3) is None, "before anything was written nothing is known of its shape"
    for layer, (k, v) in enumerate(states(3)):
        for cache in (ours, theirs):
            cache.update(k, v, layer)
    for step in (
        lambda cache: cache.commit([range(3), range(2)]),
        lambda cache: cache.hold(4),
        lambda cache: cache.commit([[0, 2, 5], [1]]),
        lambda cache: cache.keep_rows([0]),  # the longest: the offset stays
        lambda cache: cache.truncate(1),
    ):
        for cache in (ours, theirs):
            step(cache)
        check(4)
