"""A tiny random base and heads that lie in directories: fixtures for tests of the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from decode.tree import Tree
from medusa_heads import Base, MedusaHeads

CONTEXT = 160
METRICS = {
    "tree_acceptance_length": {"greedy": 1.5},
    "evaluation": {"greedy": {"top_accuracy": [[0.5, 0.6], [0.25, 0.3]]}},
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'][0] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama and a byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|s|>", "<|u|>", "<|a|>"]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", extra_special_tokens=special[1:], chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def heads_dir(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New heads with a small tree."""
    path = tmp_path_factory.mktemp("heads") / "heads"
    heads = MedusaHeads.for_base(Base.load(str(base_dir), dtype="float32"), num_heads=2)
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0)])
    extras = {"tree.json": json.dumps({"tree": tree.to_dict()}), "metrics.json": json.dumps(METRICS)}
    heads.save_pretrained(path, extras=extras)
    return path
