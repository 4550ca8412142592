"""The law of sampling with each drafter that draws or is verified as a point mass: by enumeration of every draw and
every decision through the drafter's own code, and statistically over what the engine writes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.drafters import DraftRow, SharesCache
from decode.drafters.adaptive import Reach
from decode.drafters.combined import CombinedDrafter
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.model import ModelDrafter
from decode.verify import Chooser, verify_point_mass, verify_sampled
from medusa_heads.base import Base
from tests.decode.small import small_base
from tests.decode.test_verify_exact import Prefix, assert_same_joint, emitted_tokens

Enumerate = Callable[[Callable[[Chooser], Hashable]], dict[Hashable, float]]
SIZE = 3
PROMPT = (1, 0, 2, 1, 0)


class Part:
    """A link to a vocabulary of which only some tokens are shared, under other ids."""

    columns, rows = torch.tensor([2, 0]), torch.tensor([0, 2])

    def reader(self) -> Callable[[list[int]], list[int]]:
        return lambda text: [{0: 2, 2: 0}.get(token, 3) for token in text]

    def to_draft(self, token: int) -> int:
        return {0: 2, 2: 0}[token]


CHAIN = Reach(depth=2, pass_cost=0.0)
BUSHY = Reach(depth=2, width=2, nodes=5, pass_cost=0.0)
DRAWING: dict[str, Callable[[Base], Any]] = {
    "chain": lambda base: ModelDrafter(small_base(SIZE, layers=2, seed=3), base, reach=CHAIN),
    "tree": lambda base: ModelDrafter(small_base(SIZE, layers=2, seed=3), base, reach=BUSHY),
    "shared part": lambda base: ModelDrafter(small_base(4, layers=2, seed=3), base, link=Part(), reach=BUSHY),
    "exit": lambda base: EarlyExitDrafter(base, 1, reach=BUSHY),
    "exit+lookup": lambda base: CombinedDrafter(
        [EarlyExitDrafter(base, 1, reach=CHAIN), LookupDrafter(base)], base.device
    ),
    "lookup": lambda base: LookupDrafter(base, nodes=4, least=0.0),
}


@pytest.mark.parametrize(("name", "temperature"), [*((name, 1.0) for name in DRAWING), ("chain", 1.5)])
def test_a_round_has_the_law_of_the_base(enumerate_law: Enumerate, name: str, temperature: float) -> None:
    base = small_base(SIZE, layers=2)
    drafter = DRAWING[name](base)
    known: dict[Prefix, Tensor] = {}

    def law(prefix: Prefix) -> Tensor:
        if prefix not in known:
            logits = base.model(torch.tensor([prefix])).logits[0, -1]
            known[prefix] = torch.softmax(logits.double() / temperature, dim=-1)
        return known[prefix]

    depths = set()

    def one_round(chooser: Chooser) -> Prefix:
        session = drafter.start([DraftRow(PROMPT, temperature, cast(torch.Generator, chooser))])
        cache = TreeCache(base.num_layers)
        if isinstance(session, SharesCache):
            session.share(cache)
        seen = torch.tensor([PROMPT[:-1]])
        output = base.forward(seen, position_ids=torch.arange(seen.shape[1])[None], cache=cache)
        cache.commit([range(seen.shape[1])])
        session.observe(output, seen, [range(seen.shape[1])])
        draft = session.draft([PROMPT[-1]])
        tree, tokens = draft.trees[0], draft.tokens[0].tolist()
        depths.add(tree.depth)
        laws = None if draft.laws is None else draft.laws[0]

        def node_law(node: int) -> Tensor:
            return law((*PROMPT, *(tokens[n] for n in tree.path(node)[1:])))

        if laws is None:
            return emitted_tokens(tokens, verify_point_mass(tree, draft.tokens[0], node_law, chooser))
        return emitted_tokens(tokens, verify_sampled(tree, draft.tokens[0], laws, node_law, chooser))

    with torch.no_grad():
        emitted = enumerate_law(one_round)
        assert max(depths) >= 2 and len(emitted) > SIZE, "drafts of depth two are accepted, in more than one way"
        assert_same_joint(emitted, law, SIZE, max(depths) + 1, PROMPT)
