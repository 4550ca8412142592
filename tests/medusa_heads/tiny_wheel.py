"""A tiny Llama in a GGUF file, inside a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

HIDDEN, LAYERS, HEADS, KV_HEADS, FEED, CONTEXT = 32, 2, 4, 2, 64, 64
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in kept}
    for byte in range(256):
        names.setdefault(byte, chr(256 + len(names) - len(kept)))
    return [names[byte] for byte in range(256)]


def tiny_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    vocab, key = 256 + 5, HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        parts = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (key, HIDDEN),
            "attn_v": (key, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FEED, HIDDEN),
            "ffn_up": (FEED, HIDDEN),
            "ffn_down": (HIDDEN, FEED),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path) -> int:
    """A tiny random Llama with tied embeddings, in float32. Returns its number of parameters."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "ab", "cd"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 258)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    tensors = tiny_tensors()
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sum(tensor.size for tensor in tensors.values())


def write_wheel(directory: Path, gguf: Path) -> Path:
    wheel = directory / "tiny_embedded-1.0-py3-none-any.whl"
    info = "tiny_embedded-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_embedded/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA",
            # pip must not follow this: the real wheel names dependencies that reading the file does not need
            "Metadata-Version: 2.1\nName: tiny-embedded\nVersion: 1.0\nRequires-Dist: not-to-be-found-anywhere\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel
