"""Shared by the training tests: chat templates of several families, tokenizers for them, tiny runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_heads.base import Base
from tests.conftest import tiny_model

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen's: a system message of its own, and reasoning dropped from earlier turns.
QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in text and not loop.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>' + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' </s>' }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<s>' }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role'])"
    " + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES: dict[str, tuple[str, str, bool]] = {
    "chatml": (CHATML, "<|im_end|>", False),
    "qwen": (QWEN, "<|im_end|>", False),
    "llama2": (LLAMA2, "</s>", True),
    "llama3": (LLAMA3, "<|eot_id|>", False),
    "gemma": (GEMMA, "<end_of_turn>", False),
}
"""Template, the token that ends a turn, and whether the tokenizer puts a space before text as SentencePiece does."""


def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A token a character, the family's special tokens (its end of turn is id 2) and template."""
    template, end, spaced = TEMPLATES[family]
    specials = ["<unk>", "<s>", end, "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>"]
    letters = ["\n", *map(chr, range(32, 127)), "é", "世", "▁"]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(specials + letters)}, merges=[], unk_token="<unk>")
    )
    if spaced:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    else:
        tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token=end, chat_template=template
    )


def chat_base(family: str) -> Base:
    return Base.from_model(tiny_model("llama"), chat_tokenizer(family), name=family)


def save_tiny_base(directory: Path) -> Path:
    """A tiny Llama with the ChatML tokenizer, as a local model directory."""
    from tests.conftest import tiny_tokenizer

    tiny_model("llama").save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def write_rows(path: Path, count: int = 24, seed: int = 0, letters: str = "abcdef ") -> Path:
    """Chat rows of random letters, answers of 5 to 30 characters."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        words = ["".join(draw.choices(letters, k=draw.randint(5, 30))).strip() or letters[0] for _ in range(2)]
        messages = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": words[1]}]
        rows.append({"id": f"r{i}", "temperature": [0.0, 0.7][i % 2], "finished": i % 3 != 0, "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_config(directory: Path, **changes: Any) -> dict[str, Any]:
    """Plain data of a small training config over `directory/base` and `directory/rows.jsonl`."""
    return {
        "base": str(directory / "base"),
        "base_dtype": "float32",
        "output": str(directory / "heads"),
        "data": {"paths": [str(directory / "rows.jsonl")], "held_out": 0.2},
        "heads": {"num_heads": 3, "num_layers": 1},
        "optimizer": {"warmup_steps": 2},
        "epochs": 4,
        "positions_per_step": 100,
        "mixed_precision": "no",
        "log_every": 2,
        "evaluation": {"tree_nodes": 6},
        **changes,
    }
