"""Whether greedy text is the base's own: with heads, without, and by the base's own choice at every token.

The base's choice is read off one forward pass over prompt and answer together (teacher forcing), by a model that is
neither packed nor given a tree: nothing of the engine is in it but the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from medusa_heads.base import Base


@torch.no_grad()
def exceptions(base: Base, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens of an answer that are not the base's argmax given all before them.

    Each with its index among the new tokens, the base's choice, and by how much the base prefers it (`gap`, a
    difference of logits): a gap within the rounding of the arithmetic is a near-tie.
    """
    ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]], device=base.device)
    states = base.forward(ids).last_hidden_state[:, len(prompt_ids) - 1 :]
    logits = base.project(states)[0].float()
    emitted = torch.tensor(list(token_ids), device=logits.device)
    best = logits.argmax(-1)
    return [
        {
            "index": int(i),
            "emitted": int(emitted[i]),
            "base": int(best[i]),
            "gap": float(logits[i, best[i]] - logits[i, emitted[i]]),
        }
        for i in (best != emitted).nonzero().flatten()
    ]


@torch.no_grad()
def top_two_gap(base: Base, prompt_ids: Sequence[int], token_ids: Sequence[int], index: int) -> float:
    """How far apart the base's two likeliest tokens are, in logits, where new token `index` is to be chosen."""
    ids = torch.tensor([[*prompt_ids, *token_ids[:index]]], device=base.device)
    logits = base.project(base.forward(ids).last_hidden_state[:, -1])[0].float()
    best = logits.topk(2).values
    return float(best[0] - best[1])


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ; None where they are the same."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def check(base: Base, prompt_ids: Sequence[int], plain: Sequence[int] | None, heads: Sequence[int]) -> dict[str, Any]:
    """One prompt's verdict, for the log. plain: what the engine wrote without heads; None where it was not asked."""
    differs = None if plain is None else first_difference(plain, heads)
    return {
        "same_as_plain": None if plain is None else differs is None,
        "first_difference": differs,
        "top_two_gap": None if plain is None or differs is None else top_two_gap(base, prompt_ids, plain, differs),
        "exceptions": exceptions(base, prompt_ids, heads),
    }
