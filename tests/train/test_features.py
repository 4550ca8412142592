from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from medusa_heads import Base
from tests.conftest import FAMILIES, tiny_base
from tests.train.helpers import tiny_config, write_rows
from tests.train.runs import make_place
from train.config import TrainingConfig, build
from train.data import Example
from train.features import FeaturesError, FeatureSettings, estimate_bytes, write_features
from train.sources import open_source
from train.states import FeatureStore, LiveStates, check_features, choose_draft_ids


def random_examples(count=7, seed=0):
    """Rows of unequal lengths; two spans in some."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = int(torch.randint(6, 30, (), generator=generator))
        ids = torch.randint(3, 90, (length,), generator=generator).tolist()
        mask = [j >= length // 2 or (i % 2 == 1 and j == 2) for j in range(length)]
        rows.append(Example(f"r{i}", tuple(ids), tuple(mask), 0.0))
    return rows


SETTINGS = FeatureSettings(dtype="float32", rows_per_shard=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("positions", ["answers", "all"])
def test_stored_states_equal_a_fresh_unpadded_forward(tmp_path, family, positions):
    base = tiny_base(family)
    settings = dataclasses.replace(SETTINGS, positions=positions, layers=(0, 1))
    examples = random_examples()
    write_features(base, examples, tmp_path, settings, batch_tokens=64)
    store = FeatureStore(tmp_path)
    assert [e.row_id for e in store.examples] == [e.row_id for e in examples]
    assert check_features(base, store, range(len(store))) < 1e-4
    for row, example in enumerate(examples):
        kept = sum(example.supervised[1:]) if positions == "answers" else len(example)
        assert store.states(row, "layer_1").shape == (kept, base.hidden_size)


def test_the_check_notices_a_wrong_state(tmp_path):
    write_features(tiny_base(), random_examples(), tmp_path, SETTINGS)
    assert check_features(tiny_base(seed=1), FeatureStore(tmp_path), [0, 6]) > 0.1


def test_cached_live_and_all_position_sources_give_the_same_batch(tmp_path):
    base, examples = tiny_base(), random_examples()
    write_features(base, examples, tmp_path / "a", SETTINGS)
    write_features(base, examples, tmp_path / "b", dataclasses.replace(SETTINGS, positions="all"))
    sources = [FeatureStore(tmp_path / "a"), FeatureStore(tmp_path / "b"), LiveStates(base, examples, 64)]
    batches = [source.batch([5, 0, 3]) for source in sources]
    for batch in batches[1:]:
        torch.testing.assert_close(batch.states, batches[0].states, rtol=1e-4, atol=1e-4)
        assert torch.equal(batch.next_ids, batches[0].next_ids) and torch.equal(batch.remaining, batches[0].remaining)
    example = examples[5]
    assert batches[0].next_ids[: sources[0].sizes[5]].tolist() == [
        t for t, s in zip(example.input_ids, example.supervised, strict=True) if s
    ]


def test_whole_rows_of_cached_and_live_states_are_the_rows_end_to_end(tmp_path):
    base, examples = tiny_base(), random_examples()
    write_features(base, examples, tmp_path, dataclasses.replace(SETTINGS, positions="all", layers=(0, 1)))
    rows, names = [5, 0, 3], ["layer_1", "last"]
    for source in (FeatureStore(tmp_path), LiveStates(base, examples, 64)):
        source.require(names)
        whole, packed = source.sequences(rows, names), source.batch(rows)
        assert whole.lengths == [len(examples[r]) - 1 for r in rows] and whole.rows == rows
        place = 0
        for row, length in zip(rows, whole.lengths, strict=True):
            part = slice(place, place + length)
            fresh = base.forward(torch.tensor([examples[row].input_ids]), layers=(1,))
            for got, state in zip(whole.features, (*fresh.layer_states, fresh.last_hidden_state), strict=True):
                torch.testing.assert_close(got[part], state[0, :-1], rtol=1e-4, atol=1e-4)
            assert whole.following[part].tolist() == list(examples[row].input_ids[1:])
            assert whole.positions[part].tolist() == list(range(length))
            place += length
        torch.testing.assert_close(whole.states, packed.states)
        torch.testing.assert_close(whole.features[1][whole.where], packed.states)
        assert torch.equal(whole.following[whole.where], packed.next_ids)
        assert torch.equal(whole.remaining, packed.remaining)
        nothing = source.sequences([], names)
        assert nothing.features[0].shape == (0, 32) and nothing.where.shape == nothing.positions.shape == (0,)


def test_states_that_a_cache_lacks_are_named(tmp_path):
    write_features(tiny_base(), random_examples(), tmp_path, SETTINGS)
    with pytest.raises(FeaturesError, match=r"the states layer_3; .* was cached with positions: answers"):
        FeatureStore(tmp_path).require(["last", "layer_3"])
    with pytest.raises(FeaturesError, match="whole rows"):
        FeatureStore(tmp_path).sequences([0], ["last"])


def test_a_second_run_keeps_whole_shards_and_makes_only_what_changed(tmp_path):
    base, examples = tiny_base(), random_examples(7)
    first = write_features(base, examples[:5], tmp_path, SETTINGS)
    assert (first.shards, first.reused) == (2, 0)
    times = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    grown = write_features(base, examples, tmp_path, SETTINGS)
    assert (grown.shards, grown.reused) == (3, 1)
    assert (tmp_path / "features-00000.safetensors").stat().st_mtime_ns == times["features-00000.safetensors"]
    assert write_features(base, examples, tmp_path, SETTINGS).reused == 3
    assert len(FeatureStore(tmp_path)) == 7
    other = tiny_base("gemma")
    assert write_features(other, examples, tmp_path, SETTINGS).reused == 0
    write_features(other, examples[:3], tmp_path, SETTINGS)
    assert len(FeatureStore(tmp_path)) == 3


def test_processes_share_the_shards(tmp_path):
    base, examples = tiny_base(), random_examples()
    for rank in (0, 1):
        write_features(base, examples, tmp_path, SETTINGS, rank=rank, world=2)
    assert write_features(base, examples, tmp_path, SETTINGS).reused == 3


@pytest.mark.parametrize("positions", ["answers", "all"])
def test_the_estimate_is_the_size_of_the_tensors(tmp_path, positions):
    base, examples = tiny_base(), random_examples(40)
    settings = dataclasses.replace(SETTINGS, positions=positions, layers=(1,), rows_per_shard=40)
    write_features(base, examples, tmp_path, settings)
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_size == pytest.approx(estimate_bytes(examples, settings, base.hidden_size), rel=0.1)


def test_another_base_is_refused_and_both_are_named(tmp_path):
    write_features(tiny_base(), random_examples(), tmp_path, SETTINGS)
    with pytest.raises(FeaturesError, match=r"weights_hash.*'tiny-llama'.*'tiny-gemma'"):
        FeatureStore(tmp_path).check_base(tiny_base("gemma"))


def test_a_missing_shard_is_noticed(tmp_path):
    with pytest.raises(FeaturesError, match="no cached states"):
        FeatureStore(tmp_path)
    write_features(tiny_base(), random_examples(), tmp_path, SETTINGS)
    (tmp_path / "features-00001.safetensors").unlink()
    with pytest.raises(FeaturesError, match="of 3 shards 1 are missing and 0 are of another cache"):
        FeatureStore(tmp_path)


def killed(*shard):
    raise KeyboardInterrupt


def test_a_cache_whose_making_was_killed_is_refused_until_it_is_whole(tmp_path):
    base, examples = tiny_base(), random_examples()
    with pytest.raises(KeyboardInterrupt):
        write_features(base, examples, tmp_path, SETTINGS, on_shard=killed)
    with pytest.raises(FeaturesError, match="of 3 shards 2 are missing and 0 are of another cache"):
        FeatureStore(tmp_path)
    assert write_features(base, examples, tmp_path, SETTINGS).reused == 1
    assert len(FeatureStore(tmp_path)) == 7


@pytest.mark.parametrize("count", [7, 3])
@pytest.mark.parametrize("old", [False, True])
def test_a_cache_whose_remaking_was_killed_is_refused(tmp_path, count, old):
    base = tiny_base()
    write_features(base, random_examples(), tmp_path, SETTINGS)
    if old:  # as an older version wrote it
        (tmp_path / "features.json").unlink()
        assert len(FeatureStore(tmp_path)) == 7
    with pytest.raises(KeyboardInterrupt):
        write_features(base, random_examples(count, seed=1), tmp_path, SETTINGS, on_shard=killed)
    with pytest.raises(FeaturesError, match="0 are missing and 2 are of another cache"):
        FeatureStore(tmp_path)
    write_features(base, random_examples(count, seed=1), tmp_path, SETTINGS)
    assert [e.input_ids for e in FeatureStore(tmp_path).examples] == [
        e.input_ids for e in random_examples(count, seed=1)
    ]


def test_a_cache_of_other_data_than_the_config_names_is_refused(tmp_path, caplog):
    place = make_place(tmp_path)
    base = Base.load(str(place / "base"), dtype="float32")
    rows, moved, other = (str(tmp_path / name) for name in ("rows.jsonl", "moved.jsonl", "other.jsonl"))
    shutil.copy(rows, moved)
    write_rows(Path(other), seed=1)

    def opened(*paths, **data):
        settings = {"features": {"directory": str(place / "states")}, "data": {"paths": list(paths), **data}}
        return len(open_source(build(TrainingConfig, tiny_config(place, **settings)), base))

    count = opened(rows)
    assert count == opened(moved) == opened() == opened(rows, max_length=base.max_positions)
    assert not caplog.records
    assert opened(str(tmp_path / "gone.jsonl")) == count
    assert "gone.jsonl is not there" in caplog.text
    different = [((other,), {}), ((rows, other), {}), ((rows,), {"max_length": 20})]
    for paths, data in different:
        with pytest.raises(FeaturesError, match=r"made of other data .*rows\.jsonl.* than are asked for"):
            opened(*paths, **data)
    with Path(moved).open("a") as file:
        file.write(Path(other).read_text())
    with pytest.raises(FeaturesError, match="made of other data"):
        opened(moved)
    (place / "states" / "features.json").unlink()  # as an older version wrote it
    assert [opened(*paths, **data) for paths, data in different] == [count] * 3


def test_draft_ids_are_the_most_frequent_generated_tokens():
    row = Example("a", (9, 9, 9, 7, 5, 7, 5, 7, 4), (False,) * 3 + (True,) * 6)
    assert choose_draft_ids([row], 2).tolist() == [7, 5]
    with pytest.raises(FeaturesError, match="3 distinct"):
        choose_draft_ids([row], 4)
