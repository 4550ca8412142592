"""Tiny models of every family, a tokenizer with a chat template, and bases made of the two. No network, no data."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from medusa_heads.base import Base

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama-untied-biased": lambda: LlamaConfig(
        **GROUPED, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=16),
    "mistral-window": lambda: MistralConfig(**GROUPED, sliding_window=5, head_dim=8),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "phi": lambda: PhiConfig(**GROUPED, partial_rotary_factor=0.5),
    "gemma": lambda: GemmaConfig(**GROUPED, head_dim=16),
    "gemma2": lambda: Gemma2Config(**GROUPED, head_dim=16, sliding_window=5, query_pre_attn_scalar=16),
    "gemma3": lambda: Gemma3TextConfig(
        **{**GROUPED, "num_hidden_layers": 3},
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(family: str = "llama", seed: int = 0) -> Any:
    """A random model with weights large enough that its choices are clear and depend on the context."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.3 if "embed" not in name and "wte" not in name else 1.0)
    return model


def tiny_recurrent_model() -> Any:
    return AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    ).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character (printable ASCII and a newline), three special tokens, a ChatML template."""
    specials = ["<unk>", "<|im_start|>", "<|im_end|>"]
    characters = ["\n", *map(chr, range(32, 32 + VOCAB - len(specials) - 1))]
    vocabulary = {token: i for i, token in enumerate(specials + characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHATML,
    )


def tiny_base(family: str = "llama", seed: int = 0) -> Base:
    """A base in float32 on a tiny model with random weights."""
    return Base.from_model(tiny_model(family, seed), tiny_tokenizer(), name=f"tiny-{family}")


@pytest.fixture(scope="session")
def base() -> Base:
    return tiny_base()


@pytest.fixture(autouse=True)
def _no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard goes by the clock, and tests that count rounds must not: it is off where a test does not name one."""
    from decode.engine import Decoder

    monkeypatch.setitem(Decoder.__init__.__kwdefaults__, "guard", None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny models are fastest, and their sums reproducible, on one thread."""
    torch.set_num_threads(1)
