"""End to end, statistically: what the decoder writes has the base's law at every prefix it reaches.

Each token is compared with the base's own law at its prefix, scored afterwards by a plain pass of the model: the
probability integral transform, u = (mass of the tokens before it) + v * (its own mass) with v uniform, is uniform and
independent from token to token exactly if the law is the base's. Tokens are ordered from the likeliest, so that a rule
that favours or neglects what drafters guess shifts u. A G-test over cells of u, and one over cells of pairs of
neighbours, at level 1e-4 with fixed seeds: each must pass, and must fail for a rule broken by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from decode import rows, verify
from decode.drafters import Draft, DraftRow
from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder
from decode.sampling import SamplingParams, build_processors
from decode.settings import GenerationSettings
from decode.tree import Tree
from decode.verify import draw_siblings
from medusa_heads.base import Base, BaseOutput
from medusa_heads.medusa import MedusaHeads
from tests.decode.small import small_base

VOCABULARY, LEVEL = 6, 1e-4
TREE = Tree.from_rank_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
WIDE = Tree.from_rank_paths(
    [p for n, ranks in ((1, 5), (2, 4), (3, 3)) for p in itertools.product(range(ranks), repeat=n)]
)
SAMPLING = SamplingParams(temperature=0.9, top_p=0.95)
WARM, HOT = SamplingParams(temperature=1.0, top_p=0.95), SamplingParams(temperature=1.5)
"""From temperature 1 on the heads draft by drawing."""


@pytest.fixture(scope="module")
def base() -> Base:
    return small_base(VOCABULARY, positions=600)


def medusa(base: Base, tree: Tree = TREE) -> MedusaDrafter:
    """Random heads: guesses with little to do with the base."""
    heads = MedusaHeads.for_base(base, tree.depth, 1)
    source = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=source)
    return MedusaDrafter(heads, base, tree)


class SamplingDrafter:
    """Draws the children of every node from a random law of the token there: sampled drafts with their law."""

    layers: Sequence[int] = ()

    def __init__(self) -> None:
        self.table = torch.softmax(2.0 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator()), dim=-1)
        self.generator = torch.Generator().manual_seed(3)

    def start(self, rows: Sequence[DraftRow]) -> SamplingDrafter:
        return self

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        pass

    def keep_rows(self, rows: Sequence[int]) -> None:
        pass

    def resume(self, row: DraftRow, length: int) -> None:
        pass

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        tokens = torch.tensor([[root] * TREE.size for root in roots])
        for row in tokens:
            for node, children in enumerate(TREE.children):
                if children:
                    row[list(children)] = torch.tensor(
                        draw_siblings(self.table[row[node]], len(children), self.generator)
                    )
        return Draft([TREE] * len(roots), tokens, list(self.table[tokens]))


def uniforms(base: Base, prompt: list[int], texts: Sequence[list[int]], sampling: SamplingParams) -> np.ndarray:
    """(len(texts), T) transformed tokens; the laws come from plain passes of the model over the finished texts."""
    processors = build_processors(sampling)
    ids = torch.tensor([prompt + text for text in texts])
    with torch.no_grad():
        logits = torch.cat([base.model(part).logits for part in ids.split(50)])[:, len(prompt) - 1 : -1]
    flat = logits.reshape(-1, VOCABULARY)
    law = processors(torch.zeros(len(flat), 0, dtype=torch.long), flat).softmax(-1).double()
    ordered, order = law.sort(dim=-1, descending=True)
    place = (order == ids[:, len(prompt) :].reshape(-1, 1)).int().argmax(-1, keepdim=True)
    own = ordered.gather(-1, place).squeeze(-1).numpy()
    before = (ordered.cumsum(-1).gather(-1, place).squeeze(-1)).numpy() - own
    assert (own > 0).all()  # nothing that the processors ruled out
    u = before + np.random.default_rng(4).random(len(own)) * own
    return u.clip(0.0, 1.0 - 1e-12).reshape(len(texts), -1)


def g_test(cells: np.ndarray, count: int) -> float:
    """The p-value of observed cell numbers 0 … count - 1 under equal probabilities."""
    observed = np.bincount(cells.ravel(), minlength=count)
    assert len(observed) == count
    expected = observed.sum() / count
    seen = observed[observed > 0]
    return float(chi2.sf(2.0 * np.sum(seen * np.log(seen / expected)), df=count - 1))


def p_values(u: np.ndarray) -> tuple[float, float]:
    """Of the transformed tokens, and of pairs of neighbours (each token in one pair)."""
    pairs = u[:, : u.shape[1] // 2 * 2].reshape(-1, 2)
    coarse = (pairs * 8).astype(int)
    return g_test((u * 50).astype(int), 50), g_test(coarse[:, 0] * 8 + coarse[:, 1], 64)


def write(
    decoder: Decoder,
    prompt: list[int],
    count: int,
    length: int,
    batch: int,
    first_seed: int,
    sampling: Sequence[SamplingParams] = (SAMPLING,),
) -> list[list[int]]:
    """Text i is sampled by `sampling[i % len(sampling)]`."""
    settings = [
        GenerationSettings(max_new_tokens=length, sampling=sampling[i % len(sampling)], seed=first_seed + i)
        for i in range(count)
    ]
    texts: list[list[int]] = []
    for start in range(0, count, batch):
        if batch == 1:
            results = [decoder.generate(prompt, settings[start])]
        else:
            results = decoder.generate_batch([prompt] * batch, settings[start : start + batch])
        assert all(result.finish_reason == "length" for result in results)
        assert max(result.stats.base_forwards for result in results) < length  # drafts were accepted
        texts += [result.token_ids for result in results]
    return texts


@pytest.mark.parametrize(
    ("drafter", "sampling", "count", "length", "batch"),
    [
        (lambda base: medusa(base, WIDE), [SAMPLING], 125, 400, 1),
        (medusa, [SAMPLING], 500, 100, 250),
        (lambda base: SamplingDrafter(), [SAMPLING], 500, 100, 250),
        (medusa, [WARM, HOT], 126, 400, 1),
        (medusa, [WARM, HOT], 502, 100, 251),
    ],
    ids=[
        "deterministic drafts, single",
        "deterministic drafts, batch",
        "sampled drafts, batch",
        "heads that draw, single",
        "heads that draw, batch",
    ],
)
def test_50_000_tokens_have_the_law_of_the_base(
    base: Base,
    drafter: Callable[[Base], MedusaDrafter],
    sampling: Sequence[SamplingParams],
    count: int,
    length: int,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = []
    sampled = verify.verify_sampled
    monkeypatch.setattr(rows, "verify_sampled", lambda *given: rounds.append(0) or sampled(*given))
    prompt = [1, 2, 3]
    texts = write(Decoder(base, drafter(base)), prompt, count, length, batch, 1000, sampling)
    assert sum(len(text) for text in texts) >= 50_000
    parts = [uniforms(base, prompt, texts[i :: len(sampling)], own) for i, own in enumerate(sampling)]
    assert min(p_values(np.concatenate(parts))) > LEVEL
    drawn = sampling[0].temperature >= 1.0 or isinstance(drafter(base), SamplingDrafter)
    assert bool(rounds) == drawn, "by the rule for drawn drafts where they are drawn"


def broken_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the target is left as it was."""
    monkeypatch.setattr(
        verify, "_accept", lambda p, q, token, chooser: None if chooser.accept(min(1.0, p[token] / q[token])) else p
    )


def likeliest_passed_off_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads' likeliest tokens, with a law from which they were not drawn."""
    monkeypatch.setattr(
        "decode.drafters.medusa.draw_siblings", lambda law, count, generator: law.topk(count).indices.tolist()
    )


def typical(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "verify_point_mass", verify.verify_typical)


@pytest.mark.parametrize(
    ("drafter", "fault", "sampling"),
    [
        (lambda base: SamplingDrafter(), broken_residual, SAMPLING),
        (medusa, typical, SAMPLING),
        (medusa, broken_residual, HOT),
        (medusa, likeliest_passed_off_as_drawn, HOT),
    ],
    ids=["residual", "typical", "residual, heads that draw", "likeliest passed off as drawn"],
)
def test_the_test_notices_a_wrong_rule(
    base: Base,
    drafter: Callable[[Base], MedusaDrafter],
    fault: Callable[[pytest.MonkeyPatch], None],
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    texts = write(Decoder(base, drafter(base)), [1, 2, 3], 100, 50, 100, 1, [sampling])
    assert min(p_values(uniforms(base, [1, 2, 3], texts, sampling))) < LEVEL
