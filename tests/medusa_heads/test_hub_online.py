"""Heads on the Hub, and other projects' there: what is fetched, what is pushed, and what is out of reach."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard

from medusa_heads.base import Base
from medusa_heads.errors import BaseLoadError, HeadsError
from medusa_heads.families import load_heads
from medusa_heads.hub import heads_directory
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer
from tests.medusa_heads.fake_hub import FakeHub, Repo
from tests.medusa_heads.formats.layouts import random_tensors, sequence_shapes, store, store_sharded
from tests.medusa_heads.saved_heads import FILES, files, heads_for, one_line, same


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub of the test's own; huggingface_hub knows no other, and has an empty cache and no token."""
    constants = huggingface_hub.constants
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with FakeHub() as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        huggingface_hub.utils.close_session()
        yield fake
    huggingface_hub.utils.close_session()


@pytest.fixture
def repo(online: FakeHub, saved: Path) -> Repo:
    """`org/heads` on the Hub: the saved heads, and files that are none of ours."""
    online.repos["org/heads"] = repo = Repo()
    repo.commit(files(saved) | {"training.log": b"long", "optimizer.bin": b"x" * 100})
    return repo


def test_heads_are_loaded_by_their_id(repo: Repo, online: FakeHub, heads: MedusaHeads, base: Base) -> None:
    loaded = MedusaHeads.from_pretrained("org/heads", base=base)
    assert same(loaded, heads.to(torch.bfloat16).float())
    fetched = {path.rsplit("/", 1)[1] for path in online.paths("GET") if "/resolve/" in path}
    assert fetched == FILES | {"tree.json"}, "and nothing else of the repository"


def test_a_revision_is_a_branch_a_tag_or_a_commit(repo: Repo, base: Base, tmp_path: Path) -> None:
    other = heads_for(base, seed=1)
    other.save_pretrained(tmp_path / "other")
    repo.refs["v1"] = repo.refs["main"]
    oid = repo.commit(files(tmp_path / "other"), ref="next")
    rounded = other.to(torch.bfloat16)
    for revision in ("next", oid):
        assert same(MedusaHeads.from_pretrained("org/heads", revision=revision), rounded)
    for revision in ("v1", None):
        assert not same(MedusaHeads.from_pretrained("org/heads", revision=revision), rounded)


def test_the_token_goes_to_the_hub(repo: Repo, online: FakeHub) -> None:
    repo.token = "hf_secret"
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained("org/heads")
    one_line(error, "'org/heads'", "no such repository for you")
    MedusaHeads.from_pretrained("org/heads", token="hf_secret")
    assert {seen.token for seen in online.seen if "/resolve/" in seen.path} == {"hf_secret"}


def test_what_is_cached_is_not_fetched_again_and_serves_offline(
    repo: Repo, online: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = MedusaHeads.from_pretrained("org/heads", cache_dir=tmp_path / "mine")
    assert (tmp_path / "mine" / "models--org--heads").is_dir() and not (tmp_path / "cache").exists()
    online.seen.clear()
    again = MedusaHeads.from_pretrained("org/heads", cache_dir=tmp_path / "mine")
    assert not any("/resolve/" in path for path in online.paths("GET"))
    MedusaHeads.from_pretrained("org/heads", cache_dir=tmp_path / "mine", force_download=True)
    assert any(path.endswith("model.safetensors") for path in online.paths("GET"))
    online.seen.clear()
    local = MedusaHeads.from_pretrained("org/heads", cache_dir=tmp_path / "mine", local_files_only=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    offline = MedusaHeads.from_pretrained("org/heads", cache_dir=tmp_path / "mine")
    assert online.seen == []
    assert all(same(first, heads) for heads in (again, local, offline))


@pytest.mark.parametrize("how", ["local_files_only", "offline", "unreachable", "broken"])
def test_out_of_reach_and_not_in_the_cache(
    repo: Repo, online: FakeHub, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif how == "unreachable":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    online.broken = how == "broken"
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained("org/heads", local_files_only=how == "local_files_only")
    one_line(error, "'org/heads'", "not in the cache")


def test_an_unknown_repository(online: FakeHub) -> None:
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained("org/nothing", token="hf_any")
    one_line(error, "'org/nothing'", "no such repository")


def test_an_unknown_revision_is_named(repo: Repo) -> None:
    with pytest.raises(HeadsError) as error:
        MedusaHeads.from_pretrained("org/heads", revision="v99")
    one_line(error, "'org/heads'", "revision 'v99'")


def test_a_repository_without_heads(online: FakeHub) -> None:
    online.repos["org/other"] = repo = Repo()
    repo.commit({"README.md": b"hello"})
    with pytest.raises(HeadsError, match=r"has no config\.json: not a directory of heads"):
        MedusaHeads.from_pretrained("org/other")


def test_heads_travel_through_the_hub(online: FakeHub, heads: MedusaHeads, base: Base) -> None:
    url = heads.push_to_hub(
        "org/new", extras={"tree.json": "{}"}, token="hf_writer", private=True, commit_message="First heads"
    )
    repo = online.repos["org/new"]
    assert url == f"{online.url}/org/new/commit/{repo.refs['main']}"
    assert repo.messages[-1] == "First heads" and repo.visibility == "private"
    assert {seen.token for seen in online.seen if seen.method == "POST" and "validate" not in seen.path} == {
        "hf_writer"
    }
    stored = repo.commits[repo.refs["main"]]
    assert stored.keys() == {*FILES, "tree.json", "README.md", ".gitattributes"}
    card = ModelCard(stored["README.md"].decode())
    assert card.data.library_name == "medusa-heads" and "--heads org/new" in card.text
    loaded = MedusaHeads.from_pretrained("org/new", base=base)
    assert same(loaded, heads.to(torch.bfloat16).float()) and loaded.config == heads.config


def test_large_files_go_by_lfs(online: FakeHub, heads: MedusaHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    online.upload_mode = "lfs"
    heads.push_to_hub("org/new", token="hf_writer")
    assert len(online.blobs) == 1 and len(online.paths("PUT")) == 1
    assert same(MedusaHeads.from_pretrained("org/new"), heads.to(torch.bfloat16))


def test_a_push_goes_to_its_branch_and_can_be_repeated(repo: Repo, base: Base, heads: MedusaHeads) -> None:
    other = heads_for(base, seed=1)
    for _ in range(2):
        other.push_to_hub("org/heads", token="hf_writer", revision="next")
    assert same(MedusaHeads.from_pretrained("org/heads", revision="next"), other.to(torch.bfloat16))
    assert same(MedusaHeads.from_pretrained("org/heads"), heads.to(torch.bfloat16))


def test_saving_and_pushing_in_one_call(online: FakeHub, heads: MedusaHeads, tmp_path: Path) -> None:
    url = heads.save_pretrained(
        tmp_path / "mine", extras={"README.md": "# Mine"}, repo_id="org/mine", push_to_hub=True, token="hf_writer"
    )
    assert url is not None and files(tmp_path / "mine").keys() == {*FILES, "README.md"}
    assert online.repos["org/mine"].commits[online.repos["org/mine"].refs["main"]]["README.md"] == b"# Mine"


@pytest.mark.parametrize("how", ["refused", "offline", "invalid"])
def test_a_push_that_fails_is_one_line(
    online: FakeHub, heads: MedusaHeads, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    online.writers = {"hf_writer"}
    if how == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    name = "not an id" if how == "invalid" else "org/new"
    with pytest.raises(HeadsError) as error:
        heads.push_to_hub(name, token="hf_reader")
    one_line(error, f"cannot push the heads to {name!r}")


def test_a_base_is_loaded_by_its_id_and_remembers_the_commit(online: FakeHub, tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    online.repos["org/base"] = repo = Repo()
    first = repo.commit(files(tmp_path / "base"))
    repo.commit({"README.md": b"later"})
    base = Base.load("org/base", revision=first, device="cpu", dtype="float32")
    assert base.name == "org/base" and base.revision == first
    assert MedusaHeads.for_base(base).config.base_revision == first
    assert Base.load("org/base", device="cpu").revision == repo.refs["main"]
    for name, revision in (("org/nothing", None), ("org/base", "v99")):
        with pytest.raises(BaseLoadError) as error:
            Base.load(name, revision=revision, device="cpu", token="hf_any")
        one_line(error, f"'{name}'")


# Other projects' heads on the Hub


def medusa_files(own: bool, file: str, tmp_path: Path) -> dict[str, bytes]:
    """A repository in the first Medusa project's layout."""
    tensors = random_tensors(sequence_shapes(2, 1, own=own))
    directory = store(tmp_path / file, {"medusa_num_heads": 2, "vocab_size": 96}, file, tensors)
    return files(directory)


def resolved(hub: FakeHub) -> set[str]:
    return {path.rsplit("/", 1)[1] for path in hub.paths("GET") if "/resolve/" in path}


def test_a_pickle_is_fetched_only_where_there_are_no_safetensors(online: FakeHub, tmp_path: Path) -> None:
    pickled = medusa_files(True, "medusa_lm_head.pt", tmp_path)
    safe = medusa_files(True, "medusa_lm_head.safetensors", tmp_path)
    online.repos["org/old"] = old = Repo()
    old.commit(pickled)
    online.repos["org/both"] = both = Repo()
    both.commit(pickled | safe)
    first = MedusaHeads.from_pretrained("org/old")
    assert resolved(online) == {"config.json", "medusa_lm_head.pt"}
    online.seen.clear()
    second = MedusaHeads.from_pretrained("org/both")
    assert resolved(online) == {"config.json", "medusa_lm_head.safetensors"}
    assert same(first, second) and first.config.num_heads == 2


def test_of_a_merged_model_only_the_shards_with_heads_are_fetched(online: FakeHub, tmp_path: Path) -> None:
    tensors = random_tensors(sequence_shapes(2, 1, own=True, prefix="medusa_head."))
    rest = {"model.layers.0.mlp.up_proj.weight": torch.zeros(8, 8)}
    shards = {"model-1.safetensors": rest, "model-2.safetensors": tensors}
    online.repos["org/merged"] = repo = Repo()
    repo.commit(files(store_sharded(tmp_path / "merged", {"model_type": "llama"}, shards)))
    heads = load_heads("org/merged")
    assert resolved(online) == {"config.json", "model.safetensors.index.json", "model-2.safetensors"}
    assert heads.config.num_heads == 2


def test_heads_in_a_subfolder_with_a_token_from_the_cache_and_offline(
    online: FakeHub, heads: MedusaHeads, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = medusa_files(False, "medusa_lm_head.safetensors", tmp_path)
    online.repos["org/many"] = repo = Repo(token="hf_secret")
    own = {f"heads/small/{name}": content for name, content in files(saved).items()}
    repo.commit(own | {f"tgi/{name}": content for name, content in foreign.items()} | {"README.md": b"both"})
    options: dict[str, Any] = {"token": "hf_secret", "cache_dir": tmp_path / "mine"}
    assert same(MedusaHeads.from_pretrained("org/many", subfolder="heads/small", **options), heads.to(torch.bfloat16))
    assert not any("tgi/" in path for path in online.paths("GET")), "and nothing of its neighbours"
    other = load_heads("org/many", subfolder="tgi", **options)
    assert not other.config.own_projection and other.config.num_heads == 2
    online.seen.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert same(load_heads("org/many", subfolder="tgi", **options), other)
    assert online.seen == []
    with pytest.raises(HeadsError, match="have no subfolder 'nothing'"):
        load_heads("org/many", subfolder="nothing", **options)


@pytest.mark.parametrize("subfolder", ["../elsewhere", "/etc", "a/../../b", "a\\b"])
def test_a_subfolder_lies_below(saved: Path, subfolder: str) -> None:
    with pytest.raises(HeadsError, match="does not lie below the heads' place"):
        heads_directory(saved, subfolder=subfolder)
    with pytest.raises(HeadsError, match="does not lie below the heads' place"):
        heads_directory("org/heads", subfolder=subfolder)


def test_a_subfolder_of_a_directory(saved: Path, heads: MedusaHeads) -> None:
    assert heads_directory(saved.parent, subfolder="heads") == saved
    with pytest.raises(HeadsError, match="have no subfolder 'nothing'"):
        heads_directory(saved, subfolder="nothing")


def test_an_index_on_the_hub_cannot_lead_out_of_the_repository(online: FakeHub) -> None:
    index = {"weight_map": {"medusa_head.0.0.linear.weight": "../../../../secret.safetensors"}}
    online.repos["org/evil"] = repo = Repo()
    repo.commit({"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(HeadsError, match="is no file name in this directory"):
        load_heads("org/evil")
    assert not any("secret" in path for path in online.paths("GET"))
