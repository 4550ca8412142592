"""A real model at test size: stories260K in llama2.c's format, and the same model over another vocabulary."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_heads.base import Base

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data" / "fixtures"
DATA = Path(os.environ.get("STORIES260K", BESIDE))
"""Directory of the two files, which are not part of the project (karpathy/tinyllamas, MIT)."""
WEIGHTS, VOCABULARY = DATA / "stories260K.bin", DATA / "tok512.bin"


def read_tokens() -> list[str]:
    """The pieces of the vocabulary in SentencePiece's spelling."""
    data, place, tokens = VOCABULARY.read_bytes(), 4, []
    while place < len(data):
        (length,) = struct.unpack_from("i", data, place + 4)
        tokens.append(data[place + 8 : place + 8 + length].decode().replace(" ", "\u2581"))
        place += 8 + length
    tokens[1], tokens[2] = "<s>", "</s>"
    return tokens


def sentencepiece(tokens: list[str]) -> PreTrainedTokenizerFast:
    """A BPE tokenizer whose merges are tried in the order of the ids that they make."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in tokens[3:]
        if not token.startswith("<0x")
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def stories() -> Base:
    return Base.from_model(_model(), sentencepiece(read_tokens()), name="stories260K")


def respelled(dropped: int = 60) -> Base:
    """The same model whose tokenizer lacks the last merges, under other ids: it reads and writes smaller pieces."""
    tokens = read_tokens()
    long = [i for i, token in enumerate(tokens) if i > 258 and len(token) > 1]
    kept = [i for i in range(len(tokens)) if i not in set(long[-dropped:])]
    order = kept[:3] + kept[3:][::-1]  # special tokens first, the rest the other way round
    merged = [i for i in order if i > 258 and len(tokens[i]) > 1]
    order = [i for i in order if i not in set(merged)] + sorted(merged)  # merges are tried in the order of ids
    whole = _model()
    config = LlamaConfig(**{**whole.config.to_dict(), "vocab_size": len(order)})
    model = LlamaForCausalLM(config).eval()
    state = {name: weight for name, weight in whole.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][order]
    model.load_state_dict(state)
    return Base.from_model(model, sentencepiece([tokens[i] for i in order]), name="respelled")


def _model() -> LlamaForCausalLM:
    data = WEIGHTS.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack("7i", data[:28])
    values = torch.from_numpy(np.frombuffer(data, dtype=np.float32, offset=28).copy())
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    size, place = dim // heads, 0

    def take(*shape: int) -> Tensor:
        nonlocal place
        count = int(np.prod(shape))
        place += count
        return values[place - count : place].view(*shape)

    def halves(weight: Tensor, count: int) -> Tensor:
        """llama2.c rotates neighbouring pairs, transformers the two halves of a head."""
        return weight.view(count, size // 2, 2, dim).transpose(1, 2).reshape(count * size, dim)

    state: dict[str, Tensor] = {"model.embed_tokens.weight": take(vocabulary, dim)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    shapes = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_heads * size, dim),
        "self_attn.v_proj": (kv_heads * size, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    for name, shape in shapes.items():
        for layer, weight in enumerate(take(layers, *shape)):
            counts = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
            own = halves(weight, counts[name]) if name in counts else weight
            state[f"model.layers.{layer}.{name}.weight"] = own
    state["model.norm.weight"] = take(dim)
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model
