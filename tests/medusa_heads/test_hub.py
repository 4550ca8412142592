"""Heads on disk: what is saved comes back bit for bit, and nothing damaged or foreign gets in."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medusa_heads import fetching
from medusa_heads import hub as hub_module
from medusa_heads.base import Base
from medusa_heads.errors import HeadsError
from medusa_heads.hub import EXTRAS, check_base, heads_directory
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_base, tiny_model
from tests.medusa_heads.saved_heads import DRAFT_IDS, FILES, files, heads_for, one_line, same


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, base: Base, draft_ids: Tensor | None, own: bool) -> None:
    heads = heads_for(base, own, draft_ids)
    heads.save_pretrained(tmp_path / "heads", dtype=None)
    loaded = MedusaHeads.from_pretrained(tmp_path / "heads")
    assert same(heads, loaded) and loaded.config == heads.config and not loaded.training
    heads.save_pretrained(tmp_path / "heads")
    assert same(heads.to(torch.bfloat16), MedusaHeads.from_pretrained(str(tmp_path / "heads")))
    if draft_ids is not None:
        assert torch.equal(MedusaHeads.from_pretrained(tmp_path / "heads").draft_ids, draft_ids)


def test_heads_take_the_bases_dtype_unless_told(saved: Path, base: Base) -> None:
    def dtypes(heads: nn.Module) -> set[torch.dtype]:
        return {p.dtype for p in heads.parameters()}

    assert dtypes(MedusaHeads.from_pretrained(saved)) == {torch.bfloat16}
    assert dtypes(MedusaHeads.from_pretrained(saved, base=base)) == {torch.float32}
    assert dtypes(MedusaHeads.from_pretrained(saved, base=base, dtype=torch.bfloat16)) == {torch.bfloat16}
    assert dtypes(MedusaHeads.from_pretrained(saved, dtype=torch.float32)) == {torch.float32}


def test_a_heads_directory_holds_what_is_promised_and_no_more(heads: MedusaHeads, tmp_path: Path) -> None:
    extras = {name: f"content of {name}\n" for name in EXTRAS}
    heads.save_pretrained(tmp_path / "deep" / "heads", extras=extras)
    found = files(tmp_path / "deep" / "heads")
    assert found.keys() == FILES | set(EXTRAS)
    assert all(found[name].decode() == text for name, text in extras.items())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["heads"], "nothing is left beside it"
    assert stat.S_IMODE((tmp_path / "deep" / "heads").stat().st_mode) == 0o755
    with pytest.raises(ValueError, match=r"unknown files \['notes.txt'\]"):
        heads.save_pretrained(tmp_path / "other", extras={"notes.txt": ""})
    assert not (tmp_path / "other").exists()


def test_saving_again_replaces_the_directory(saved: Path, base: Base) -> None:
    other = heads_for(base, seed=1)
    other.save_pretrained(saved)
    assert files(saved).keys() == FILES
    assert same(other.to(torch.bfloat16), MedusaHeads.from_pretrained(saved))
    assert [path.name for path in saved.parent.iterdir()] == ["heads"]


def fail(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["weights", "check", "rename"])
def test_a_failure_on_the_way_leaves_the_old_directory_whole(
    saved: Path, base: Base, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = files(saved)
    if step == "weights":
        monkeypatch.setattr(hub_module, "save_file", fail)
    elif step == "check":
        monkeypatch.setattr(hub_module, "load_file", fail)
    else:
        rename = Path.rename

        def rename_but_not_into_place(self: Path, target: Path) -> Path:
            if Path(target) == saved and self.parent == saved.parent:
                fail()
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", rename_but_not_into_place)
    with pytest.raises((OSError, HeadsError), match="No space left"):
        heads_for(base, seed=1).save_pretrained(saved)
    assert files(saved) == before
    assert [path.name for path in saved.parent.iterdir()] == ["heads"], "and nothing half-made beside it"


def test_a_directory_of_other_things_is_never_replaced(heads: MedusaHeads, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    with pytest.raises(HeadsError) as error:
        heads.save_pretrained(tmp_path / "work")
    one_line(error, tmp_path / "work", "thesis.tex")
    assert files(tmp_path / "work") == {"thesis.tex": b"years"}
    (tmp_path / "file").write_text("text")
    with pytest.raises(HeadsError, match="not a directory"):
        heads.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "text"
    (tmp_path / "empty").mkdir()
    heads.save_pretrained(tmp_path / "empty")
    assert files(tmp_path / "empty").keys() == FILES


def test_sharded_parameters_of_size_zero_are_not_saved(heads: MedusaHeads, tmp_path: Path) -> None:
    heads.heads[1][0].linear.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(HeadsError, match=r"heads\.1\.0\.linear\.weight is empty"):
        heads.save_pretrained(tmp_path / "heads")
    assert list(tmp_path.iterdir()) == []


def test_shapes_are_checked_against_the_config_before_anything_is_in_place(heads: MedusaHeads, tmp_path: Path) -> None:
    heads.heads[1][0].linear.weight = nn.Parameter(torch.zeros(32, 16))
    with pytest.raises(HeadsError, match=r"shape \(32, 16\); config asks \(32, 32\)"):
        heads.save_pretrained(tmp_path / "heads")
    assert list(tmp_path.iterdir()) == []


NAME = "heads.1.0.linear.bias"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop(NAME), (f"missing tensors ['{NAME}']", "unexpected tensors none")),
        (lambda t: t.update(extra=torch.zeros(2)), ("missing tensors none", "unexpected tensors ['extra']")),
        (
            lambda t: t.update({"heads.2.0.linear.bias": t.pop(NAME)}),
            (f"missing tensors ['{NAME}']", "unexpected tensors ['heads.2.0.linear.bias']"),
        ),
        (lambda t: t.update({NAME: torch.zeros(31)}), (NAME, "(31,)", "(32,)")),
        (lambda t: t.update({NAME: torch.zeros(32, dtype=torch.int32)}), (NAME, "torch.int32", "torch.float32")),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    saved: Path, change: Callable[[dict[str, Tensor]], None], parts: tuple[str, ...]
) -> None:
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained(saved)
    one_line(error, saved / "model.safetensors", *parts)


@pytest.mark.parametrize("ids", [[40, 3, 96], [-1, 3, 4], [3, 3, 4]])
def test_draft_ids_outside_the_vocabulary_or_repeated_are_refused(tmp_path: Path, base: Base, ids: list[int]) -> None:
    heads_for(base, draft_ids=DRAFT_IDS[:3]).save_pretrained(tmp_path / "heads")
    tensors = load_file(tmp_path / "heads" / "model.safetensors")
    save_file(tensors | {"draft_ids": torch.tensor(ids)}, tmp_path / "heads" / "model.safetensors")
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained(tmp_path / "heads")
    one_line(error, tmp_path / "heads", "draft_ids", 96)


@pytest.mark.parametrize("kind", ["truncated", "garbage", "empty", "pickle", "absent"])
def test_damaged_weights(saved: Path, kind: str) -> None:
    weights = saved / "model.safetensors"
    content = weights.read_bytes()
    if kind == "absent":
        weights.unlink()
    elif kind == "pickle":
        torch.save({NAME: torch.zeros(32)}, weights)
    else:
        weights.write_bytes({"truncated": content[:-9], "garbage": b"\xff" * 99, "empty": b""}[kind])
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained(saved)
    one_line(error, saved, "model.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "does not hold a JSON object"),
        (b'["abc"]', "does not hold a JSON object"),
        (b"3", "does not hold a JSON object"),
        (b'{"model_type": "llama"}', "holds no heads of a known format"),
        (None, "has no config.json: not a directory of heads"),
    ],
)
def test_damaged_configs(saved: Path, content: bytes | None, message: str) -> None:
    if content is None:
        (saved / "config.json").unlink()
    else:
        (saved / "config.json").write_bytes(content)
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained(saved)
    one_line(error, saved, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"medusa_num_heads": 4}, "unknown keys in the heads' config: medusa_num_heads"),
        ({"format": 2}, "heads of format 2; this version reads format 1"),
        ({"num_heads": 3}, "missing tensors ['heads.2.0.linear.bias', 'heads.2.0.linear.weight']"),
        ({"hidden_size": "x"}, "hidden_size must be a positive integer"),
    ],
)
def test_configs_that_are_not_understood(saved: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained(saved)
    one_line(error, saved, message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 64),
        ("vocab_size", 50000),
        ("tokenizer_hash", "othertokenizer"),
        ("weights_hash", "otherweights"),
    ],
)
def test_another_base_is_named_together_with_the_right_one(saved: Path, base: Base, name: str, value: object) -> None:
    config = json.loads((saved / "config.json").read_text())
    ours = base.fingerprint()[name]
    changed = config | {name: value, "base_model_name_or_path": "org/other-base"}
    (saved / "config.json").write_text(json.dumps(changed))
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained(saved, base=base)
    one_line(error, "another base", name, repr(value), "'org/other-base'", repr(ours), repr(base.name))


def test_a_fine_tune_of_the_base_may_be_accepted_explicitly(saved: Path, base: Base) -> None:
    heads = MedusaHeads.from_pretrained(saved, base=base)
    tuned = tiny_base()
    tuned.weights_hash = "tuned"
    with pytest.raises(HeadsError, match="weights_hash"):
        MedusaHeads.from_pretrained(saved, base=tuned)
    assert same(MedusaHeads.from_pretrained(saved, base=tuned, check_weights=False), heads)
    check_base(heads.config, base)


def test_what_one_side_does_not_know_is_not_compared(heads: MedusaHeads) -> None:
    check_base(heads.config, Base.from_model(tiny_model(), None))


def test_embedded_heads_are_found_by_name_but_a_path_wins(
    saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetching, "ASSETS", saved.parent)
    monkeypatch.chdir(tmp_path.parent)
    assert heads_directory("heads") == saved
    (tmp_path / "elsewhere" / "heads").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert heads_directory("heads") == Path("heads")


@pytest.mark.parametrize("name", ["./no/such/directory", "a/b/c", "/nowhere/at/all", "no such name"])
def test_a_name_that_can_be_nothing(name: str) -> None:
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained(name)
    one_line(error, name, "not a directory")


def test_a_misspelt_name_is_refused_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_heads.fetching.snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(HeadsError, match=r"no heads 'smollm2-135-medusa': .*smollm2-135m-eagle3, smollm2-135m-medusa"):
        heads_directory("smollm2-135-medusa")
