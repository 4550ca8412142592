"""Drafters of every kind for tests, by name, and what their texts are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from decode.drafters.adaptive import Reach
from decode.drafters.combined import CombinedDrafter
from decode.drafters.crossmodel import SharedDrafter, TextDrafter
from decode.drafters.eagle import EagleDrafter
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.hydra import HydraDrafter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.model import ModelDrafter, SameTokenizer
from decode.dynamic import DynamicTree
from decode.tree import Tree
from medusa_heads.base import Base
from tests.conftest import GROUPED, VOCAB, tiny_tokenizer
from tests.decode.eagle_heads import random_heads

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]
REPETITIVE = [5, 17, 40, 8, 61, 5, 17, 40, 8, 33, 5, 17]
CHAIN = Reach(depth=4, pass_cost=0.0, node_floor=0.0)
LIMITS = DynamicTree(depth=3, width=3, nodes=9)
STATIC = Tree.from_rank_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
BUSHY = Reach(depth=3, width=3, nodes=9, pass_cost=0.0, node_floor=0.0)


def relative(base: Base, noise: float = 0.03, seed: int = 1) -> Base:
    """A draft model that often agrees with the base: the base, with noise on its weights."""
    model = copy.deepcopy(base.model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return Base.from_model(model, tiny_tokenizer(), name="relative")


def other_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """The characters of the tests' tokenizer under other ids, and tokens of several characters by `merges`."""
    ours = tiny_tokenizer().get_vocab()
    vocabulary = {token: permuted(i) for token, i in ours.items()}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


def permuted(i: int) -> int:
    return (7 * i + 5) % VOCAB


def translated(base: Base) -> Base:
    """The base's own law in the vocabulary of `other_tokenizer()`."""
    model = copy.deepcopy(base.model)
    with torch.no_grad():
        weights = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
        for weight in weights.values():
            weight[[permuted(i) for i in range(VOCAB)]] = weight.clone()
    return _ending_by_tokenizer(Base.from_model(model, other_tokenizer(), name="translated"))


def _ending_by_tokenizer(base: Base) -> Base:
    """The tests' configs name the end of a text by the id that it has in the tests' own tokenizer."""
    base.eos_token_ids = (base.tokenizer.eos_token_id,)
    return base


def with_own_vocabulary(base: Base) -> ModelDrafter:
    """A draft model that drafts from 40 tokens, as one that was trained to."""
    model = relative(base)
    return ModelDrafter(model, base, link=SameTokenizer(model, base, OWN_TOKENS), reach=BUSHY)


OWN_TOKENS = [(11 * i + 3) % VOCAB for i in range(40)]
MERGES = [("t", "h"), ("th", "e"), ("I", "J"), ("=", ">"), ("a", "b"), ("#", "$"), ("$", "%")]


def foreign() -> Base:
    """A random model with tokens of several characters."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**GROUPED, "vocab_size": VOCAB + len(MERGES) + 3})).eval()
    return _ending_by_tokenizer(Base.from_model(model, other_tokenizer(MERGES), name="foreign"))


DRAFTERS: dict[str, Callable[[Base], Any]] = {
    "lookup": lambda base: LookupDrafter(base, least=0.0),
    "model-chain": lambda base: ModelDrafter(relative(base), base, reach=CHAIN),
    "model-tree": lambda base: ModelDrafter(relative(base), base, reach=BUSHY),
    "model-vocabulary": with_own_vocabulary,
    "shared-translated": lambda base: SharedDrafter(translated(base), base, reach=BUSHY),
    "shared-foreign": lambda base: SharedDrafter(foreign(), base, reach=BUSHY),
    "text-translated": lambda base: TextDrafter(translated(base), base, reach=CHAIN),
    "text-foreign": lambda base: TextDrafter(foreign(), base, reach=BUSHY),
    "lookup+model": lambda base: CombinedDrafter(
        [LookupDrafter(base), ModelDrafter(relative(base), base, reach=CHAIN)], base.device
    ),
    "exit+lookup": lambda base: CombinedDrafter(
        [EarlyExitDrafter(base, 1, reach=BUSHY), LookupDrafter(base)], base.device, nodes=8
    ),
    "exit-chain": lambda base: EarlyExitDrafter(base, 1, reach=CHAIN),
    "exit-tree": lambda base: EarlyExitDrafter(base, 1, reach=BUSHY),
    "eagle1": lambda base: EagleDrafter(random_heads(base, "eagle1"), base, LIMITS),
    "eagle3": lambda base: EagleDrafter(random_heads(base, "eagle3"), base, LIMITS),
    "hydra": lambda base: HydraDrafter(random_heads(base, "hydra"), base, LIMITS),
    "hydra-prefix": lambda base: HydraDrafter(random_heads(base, "hydra-prefix"), base, STATIC),
}


def greedy_by_hand(base: Base, prompt: list[int], count: int) -> list[int]:
    """The base's own greedy text, by whole forward passes without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(base.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
