"""Bases from directories and GGUF files: the same weights come back, and each failure is one clear line."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertLMHeadModel, LlamaModel, T5Config, T5ForConditionalGeneration

from medusa_heads import loading
from medusa_heads.attention import FOLDED
from medusa_heads.base import Base
from medusa_heads.errors import BaseLoadError, ConfigError, UnsupportedModelError, UserError
from medusa_heads.prepack import PackedLinear, can_prepack
from tests.conftest import FAMILIES, VOCAB, tiny_model, tiny_tokenizer
from tests.medusa_heads.tiny_wheel import TEMPLATE, tiny_tensors, write_gguf

IDS = torch.tensor([[5, 17, 40, 8, 61, 33]])
CPU = torch.device("cpu")


def saved(directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory, **options)
    tiny_tokenizer().save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bases") / "llama"
    saved(directory)
    return directory


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A directory that a test may damage."""
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def one_line(error: pytest.ExceptionInfo[UserError], *parts: object) -> None:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    for part in parts:
        assert str(part) in text


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
def test_a_directory_gives_back_its_model(tmp_path: Path, family: str, prepack: bool) -> None:
    model = saved(tmp_path / "base", family)
    base = Base.load(str(tmp_path / "base"), dtype="float32", device="cpu", prepack=prepack)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # the one that caps its scores
    with torch.no_grad():
        expected = model(IDS).logits
    states = base.forward(IDS).last_hidden_state
    torch.testing.assert_close(base.project(states), expected, rtol=1e-4, atol=1e-4)
    assert base.name == str(tmp_path / "base") and base.revision is None
    assert base.tokenizer_hash == Base.from_model(model, tiny_tokenizer()).tokenizer_hash
    assert base.weights_hash == Base.from_model(model).weights_hash
    packed = sum(isinstance(m, PackedLinear) for m in base.model.modules())
    assert (packed > 0) == (prepack and can_prepack(CPU, torch.float32))


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes_by_name_and_by_object(llama: Path, asked: Any, got: torch.dtype) -> None:
    assert Base.load(str(llama), dtype=asked, device="cpu", prepack=False).dtype == got


def test_auto_is_the_checkpoints_own_dtype_where_the_cpu_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "base", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert Base.load(str(tmp_path / "base"), device="cpu", prepack=False).dtype == torch.bfloat16
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert Base.load(str(tmp_path / "base"), device="cpu", prepack=False).dtype == torch.float32


def test_an_unknown_dtype_names_the_known_ones(llama: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Base.load(str(llama), dtype="int7")
    one_line(error, "'int7'", "auto", "float32", "bfloat16", "float16")


def test_device_and_device_map_exclude_each_other(llama: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Base.load(str(llama), device="cpu", device_map="auto")
    one_line(error, "device='cpu'", "device_map='auto'")


def test_a_device_map_places_the_base(llama: Path) -> None:
    base = Base.load(str(llama), dtype="float32", device_map="cpu", prepack=False)
    assert base.device.type == "cpu" and base.forward(IDS).last_hidden_state.shape == (1, 6, 32)


def test_shards_are_put_together_and_a_lost_one_is_missed(tmp_path: Path) -> None:
    model = saved(tmp_path / "base", max_shard_size="20KB")
    shards = sorted((tmp_path / "base").glob("model-*.safetensors"))
    assert len(shards) > 2
    base = Base.load(str(tmp_path / "base"), dtype="float32", device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(base.project(base.forward(IDS).last_hidden_state), model(IDS).logits)
    shards[1].unlink()
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(tmp_path / "base"), dtype="float32", device="cpu")
    one_line(error, tmp_path / "base")


def test_grouped_queries_are_folded_and_capped_scores_are_eager(tmp_path: Path) -> None:
    expected = {"llama": FOLDED, "gpt2": "sdpa", "gemma2": "eager"}
    for family, attention in expected.items():
        saved(tmp_path / family, family)
        assert Base.load(str(tmp_path / family), device="cpu").config._attn_implementation == attention


def test_a_local_directory_touches_no_network(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    tried: list[Any] = []

    def connect(self: socket.socket, address: Any) -> None:
        tried.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: connect(socket.socket(), address))
    Base.load(str(llama), device="cpu")
    assert tried == []


def test_an_embedded_name_is_resolved_and_kept(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "resolve_embedded", lambda name: llama)
    base = Base.load("smollm2-135m", device="cpu", prepack=False)
    assert base.name == "smollm2-135m" and base.vocab_size == VOCAB


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(tmp_path / "nothing"), device="cpu")
    one_line(error, tmp_path / "nothing")


def test_a_corrupt_config(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "llama", ')
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(copy), device="cpu")
    one_line(error, copy)


def test_an_unknown_architecture(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(UserError) as error:
        Base.load(str(copy), device="cpu")
    one_line(error, copy)


@pytest.mark.parametrize("kind", ["truncated", "garbage", "empty", "absent"])
def test_damaged_weights(copy: Path, kind: str) -> None:
    weights = copy / "model.safetensors"
    if kind == "absent":
        weights.unlink()
    else:
        content = weights.read_bytes()
        weights.write_bytes({"truncated": content[: len(content) // 2], "garbage": b"\xff" * 500, "empty": b""}[kind])
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(copy), device="cpu")
    one_line(error, copy)


def test_a_missing_tensor_is_never_replaced_by_a_random_one(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(copy), device="cpu")
    one_line(error, copy, "model.layers.1.mlp.up_proj.weight")


def test_a_body_without_a_projection(tmp_path: Path) -> None:
    """A checkpoint of the model's body alone would get a random projection."""
    LlamaModel(FAMILIES["llama-untied-biased"]()).save_pretrained(tmp_path / "body")
    tiny_tokenizer().save_pretrained(tmp_path / "body")
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(tmp_path / "body"), device="cpu")
    one_line(error, tmp_path / "body", "lm_head.weight")


def test_a_misshapen_tensor(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(copy), device="cpu")
    one_line(error, copy, "mlp.down_proj.weight", "(32, 64)", "(32, 48)")


def test_a_missing_tokenizer(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(copy), device="cpu")
    one_line(error, copy)


SMALL_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_what_is_no_causal_language_model_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model: nn.Module = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes))
    else:
        model = BertLMHeadModel(BertConfig(**SMALL_BERT))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / kind)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path / kind)
    with pytest.raises(UnsupportedModelError) as error:
        Base.load(str(tmp_path / kind), device="cpu")
    one_line(error, tmp_path / kind)


def test_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    base = Base.load(str(tmp_path / "tiny.gguf"), dtype="float32", device="cpu")
    tensors = tiny_tensors()
    assert torch.equal(base.projection_weight, torch.from_numpy(tensors["token_embd.weight"]))
    assert base.name == str(tmp_path / "tiny.gguf") and base.num_layers == 2
    assert base.tokenizer.chat_template == TEMPLATE
    logits = base.project(base.forward(IDS).last_hidden_state)
    assert logits.isfinite().all() and logits.shape == (1, 6, len(tensors["token_embd.weight"]))
    assert Base.load(str(tmp_path / "tiny.gguf"), device="cpu", prepack=False).dtype == torch.bfloat16


def test_a_missing_or_damaged_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(BaseLoadError, match=r"there is no file .*none\.gguf"):
        Base.load(str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\x00" * 40)
    with pytest.raises(BaseLoadError) as error:
        Base.load(str(tmp_path / "bad.gguf"), device="cpu")
    one_line(error, tmp_path / "bad.gguf")
