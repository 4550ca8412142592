"""What the guard costs and what it saves, by the clock: the parts of scripts/measure_guard.py.

A case is a kind of text and a way of drafting. In each repetition it is decoded plainly, with the guard and without it,
one after the other, and only times of one repetition are divided by one another: a machine that slows down for minutes
slows all three. Every call has a decoder of its own, so that the guard begins with no knowledge of the machine, as it
does in a command that answers once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from decode.benchmark.methods import timed
from decode.drafters import Drafter
from decode.drafters.combined import CombinedDrafter
from decode.drafters.medusa import MedusaDrafter
from decode.drafters.model import ModelDrafter
from decode.drafters.specs import OWN_HEADS, Part, parse_all
from decode.engine import Decoder
from decode.guard import DEFAULT_GUARD
from decode.measure import spread
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from medusa_heads.base import Base
from medusa_heads.embedded import DEFAULT_EMBEDDED
from medusa_heads.errors import ConfigError
from medusa_heads.families import load_heads

Row = Mapping[str, Any]
WAYS = ("plain", "guarded", "unguarded")
PAIRS = (("unguarded", "plain"), ("guarded", "plain"), ("guarded", "unguarded"))
ADVERSARIAL, FRIENDLY = ("guarded", "plain", 1.03), ("guarded", "unguarded", 1.02)
"""What is asked: the time of the first at most so many times that of the second."""
RANDOM_WORDS = 64


@dataclass(frozen=True)
class Case:
    """One kind of text."""

    name: str
    prompts: Sequence[Sequence[int]]
    """Token ids; repetitions take them in turn."""
    drafter: Drafter
    asked: tuple[str, str, float] = ADVERSARIAL
    words: Sequence[int] | None = None
    """The text is drawn from these tokens, whatever the base says; None: it is the base's greedy text."""

    def settings(self, tokens: int, seed: int) -> GenerationSettings:
        """Exactly `tokens` new tokens: none ends the text."""
        if self.words is None:
            return GenerationSettings(tokens, eos_token_ids=())
        # Likeliest drafts: with drawn ones a seeded call is not guarded.
        return GenerationSettings(
            tokens,
            SamplingParams(temperature=1.0),
            seed,
            eos_token_ids=(),
            logits_processor=LogitsProcessorList([OneOf(self.words)]),
            drafting="likeliest",
        )


class OneOf(LogitsProcessor):
    """Makes the next token any of the given ones, with equal chances. A draft is then right once in as many times as
    there are tokens, if it is one of them at all; and prompt lookup finds each of them in the text before."""

    def __init__(self, words: Sequence[int]):
        self.words = torch.tensor(list(words))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_fill_(-1, self.words.to(scores.device), 0.0)


def random_tokens(base: Base, count: int, seed: int) -> list[int]:
    """Any tokens but those that end a text, none of them twice."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(base.vocab_size, generator=generator).tolist()
    return [token for token in drawn if token not in base.eos_token_ids][:count]


def with_noise(module: nn.Module, seed: int) -> nn.Module:
    """Replaces every parameter, in place, by normal noise of the parameter's own shape, mean and deviation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            mean, deviation = parameter.float().mean(), parameter.float().std(correction=0)
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.copy_(mean + deviation * noise)
    return module


def drafter_of_noise(drafter: Drafter, name: str, base: Base, heads: str | None, seed: int) -> Drafter | None:
    """The same way of drafting, with the same trees, whose heads are noise; None for a way without heads.

    Args:
        drafter: what `load_drafter(name, base, heads=heads)` gives.
    """
    sources = drafter.drafters if isinstance(drafter, CombinedDrafter) else [drafter]
    noisy = [_noisy_part(own, part, base, heads, seed) for own, part in zip(sources, parse_all(name), strict=True)]
    if all(new is own for new, own in zip(noisy, sources, strict=True)):
        return None
    if not isinstance(drafter, CombinedDrafter):
        return noisy[0]
    return CombinedDrafter(noisy, base.device, nodes=drafter.nodes, least=drafter.least)


def _noisy_part(drafter: Drafter, part: Part, base: Base, heads: str | None, seed: int) -> Drafter:
    kind, value, _ = part
    if kind != "heads" or isinstance(drafter, ModelDrafter):  # a draft model may be named as heads are
        return drafter
    module = with_noise(load_heads((heads or DEFAULT_EMBEDDED) if value == OWN_HEADS else value, base=base), seed)
    own: Any = drafter
    trees = (own.tree,) if isinstance(drafter, MedusaDrafter) else (own.choice.likeliest, own.choice.drawn)
    made: Drafter = type(own)(module, base, *trees)
    return made


def order(repetition: int) -> list[str]:
    """The ways in the order of a repetition: six of them see every order once."""
    turn = repetition % len(WAYS)
    turned = [*WAYS[turn:], *WAYS[:turn]]
    return turned[::-1] if repetition // len(WAYS) % 2 else turned


def measure(base: Base, case: Case, repetition: int, tokens: int, seed: int) -> dict[str, Any]:
    """One repetition of a case, as a row: by way, seconds of the whole call and what was done in it."""
    place = repetition % len(case.prompts)
    settings = case.settings(tokens, seed + repetition)
    row: dict[str, Any] = {"case": case.name, "repetition": repetition, "prompt": place}
    for way in order(repetition):
        drafter = None if way == "plain" else case.drafter
        decoder = Decoder(base, drafter, guard=DEFAULT_GUARD if way == "guarded" else None)
        result, seconds = timed(lambda ids, d=decoder: d.generate(ids, settings), case.prompts[place], base.device)  # type: ignore[misc]
        stats = result.stats
        if stats.new_tokens != tokens:
            raise ConfigError(f"{case.name}: the text ended after {stats.new_tokens} tokens ({result.finish_reason})")
        row[way] = {
            "seconds": round(seconds, 6),
            "new_tokens": stats.new_tokens,
            "rounds": stats.rounds,
            "guarded_rounds": stats.guarded_rounds,
            "digest": hashlib.sha256(json.dumps(result.token_ids).encode()).hexdigest()[:16],
        }
    return row


def ratios(rows: Sequence[Row], way: str, other: str) -> list[float]:
    """Time of one way ÷ time of another, by repetition."""
    return [row[way]["seconds"] / row[other]["seconds"] for row in rows]


def figures(rows: Sequence[Row], asked: tuple[str, str, float]) -> dict[str, Any]:
    """One case: medians with quartiles over its repetitions, and whether what is asked is kept by the median."""
    way, other, most = asked
    found: dict[str, Any] = {
        "repetitions": len(rows),
        "tokens_per_second": {w: spread([row[w]["new_tokens"] / row[w]["seconds"] for row in rows]) for w in WAYS},
        "tokens_per_round": sum(row["unguarded"]["new_tokens"] for row in rows)
        / max(1, sum(row["unguarded"]["rounds"] for row in rows)),
        "held_back": sum(row["guarded"]["guarded_rounds"] for row in rows)
        / max(1, sum(row["guarded"]["rounds"] for row in rows)),
        "same_text": sum(len({row[w]["digest"] for w in WAYS}) == 1 for row in rows),
        "ratios": {f"{a}/{b}": spread(ratios(rows, a, b)) for a, b in PAIRS},
        "asked": {"ratio": f"{way}/{other}", "at_most": most},
    }
    return found | {"kept": found["ratios"][f"{way}/{other}"][1] <= most}


def markdown(cases: Mapping[str, Any]) -> str:
    """A table of all cases; a ratio is one of times, below 1 where the first is the faster."""
    headings = ["case", *(f"{way} tokens/s" for way in WAYS), "tokens a round, unguarded", "rounds held back"]
    headings += [*(f"{a} ÷ {b}" for a, b in PAIRS), "asked", "kept"]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for name, found in cases.items():
        low_middle_high = [found["ratios"][f"{a}/{b}"] for a, b in PAIRS]
        cells = [name, *(f"{found['tokens_per_second'][way][1]:.1f}" for way in WAYS)]
        cells += [f"{found['tokens_per_round']:.2f}", f"{found['held_back']:.0%}"]
        cells += [f"{middle:.3f} ({low:.3f}–{high:.3f})" for low, middle, high in low_middle_high]
        cells += [f"{found['asked']['ratio'].replace('/', ' ÷ ')} ≤ {found['asked']['at_most']}"]
        cells += ["yes" if found["kept"] else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
