"""What heads are worth on text of the base's own: answers to a fixed set of prompts, and how far a tree gets on them.

A round that starts behind a token accepts the longest path of its tree that the text takes. So a text with the rank of
its every token among the heads' candidates tells, for any tree, the very rounds that decoding it would have had: the
walk of `tokens_per_round`. An average over all positions would not do: rounds begin where drafts have just failed, and
there heads are right less often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from decode.engine import Decoder
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.errors import ConfigError

if TYPE_CHECKING:
    from decode.drafters.medusa import MedusaDrafter
    from decode.tuning import RankPath
    from medusa_heads.base import Base

CANDIDATES = 10
"""Of each head, that a rank is looked for among."""

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a Python function that counts how often each word occurs in a text.",
    "A train covers 180 km in two and a half hours. What is its average speed? Show the steps.",
    "List ten things to pack for a week of camping.",
    "Write the beginning of a story about a lighthouse keeper who finds a letter.",
    "Summarise in three sentences what photosynthesis is and why it matters.",
    "Translate into French: The library opens at nine and closes at six.",
    "Who wrote 'Pride and Prejudice', when, and what is it about?",
    "Compare electric and petrol cars in a table with price, range and upkeep.",
    "Write a polite e-mail to a landlord about a broken heater.",
    "What is the difference between a virus and a bacterium?",
    "Write a SQL query for the five customers who spent most last year.",
    "Solve for x: 3x + 7 = 2x - 5. Explain each step.",
    "Give me a recipe for vegetable soup for four people.",
    "Write a short poem about the first snow of the year.",
    "Rewrite more formally: hey, can't make it today, let's do tomorrow?",
    "How does a refrigerator keep food cold?",
    "Describe the water cycle, one step after the other.",
    "Write a bash script that renames all .txt files of a directory to .md.",
    "What were the main causes of the First World War?",
    "Plan a day in Rome for a family with two small children.",
    "I feel nervous before exams. What can I do about it?",
    "Explain what an interest rate is, with an example in numbers.",
    "Write a dialogue between a customer and a baker about a wedding cake.",
)
"""Own words, varied on purpose. Even ones calibrate, odd ones check what was predicted."""
CALIBRATION, HELD_OUT = PROMPTS[::2], PROMPTS[1::2]


@dataclass(frozen=True)
class Text:
    """An answer of the base as the heads see it."""

    prompt_ids: list[int]
    ranks: list[tuple[int, ...]]
    """[j]: the state behind new token j - 1 (j = 0: behind the prompt) gave token j; depth by depth the rank of token
    j + 1, j + 2, … among the candidates of that state's heads, up to the first that is not among them or the end."""


def read_answers(
    base: Base,
    drafter: MedusaDrafter,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Text]:
    """Lets the base answer each prompt plainly, and ranks its tokens by the heads of `drafter`, down to its tree's
    depth. Answers of fewer than two tokens are left out: ConfigError where that leaves none."""
    decoder = Decoder(base)
    texts = []
    for number, prompt in enumerate(prompts):
        prompt_ids = base.render_chat([{"role": "user", "content": prompt}])
        settings = GenerationSettings(new_tokens, SamplingParams(temperature=temperature), seed=seed + number)
        answer = decoder.generate(prompt_ids, settings).token_ids
        if len(answer) > 1:
            texts.append(Text(prompt_ids, true_ranks(base, drafter, prompt_ids, answer)))
    if not texts:
        raise ConfigError("the base has answered none of the calibration prompts with two tokens or more")
    return texts


@torch.no_grad()
def true_ranks(
    base: Base, drafter: MedusaDrafter, prompt_ids: Sequence[int], answer: Sequence[int]
) -> list[tuple[int, ...]]:
    """`Text.ranks` of one answer."""
    ids = torch.tensor([[*prompt_ids, *answer]], device=base.device)
    # The last answer token has no successor to be right about.
    states = base.forward(ids).last_hidden_state[0, len(prompt_ids) - 1 : -2]
    logits = drafter.logits(states, drafter.tree.depth)
    best = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1).indices
    best = best if drafter.draft_ids is None else drafter.draft_ids[best]
    found = []
    for start, by_depth in enumerate(best.tolist()):
        ranks: list[int] = []
        for token, candidates in zip(answer[start + 1 :], by_depth, strict=False):
            if token not in candidates:
                break
            ranks.append(candidates.index(token))
        found.append(tuple(ranks))
    return found


def path_probabilities(texts: Sequence[Text]) -> list[RankPath]:
    """How often each rank path is what the text does, over all positions."""
    counts: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for ranks in text.ranks:
            counts.update(ranks[:depth] for depth in range(1, len(ranks) + 1))
    positions = sum(len(text.ranks) for text in texts)
    return [(path, count / positions) for path, count in counts.items()]


def tokens_per_round(tree: Tree, texts: Sequence[Text]) -> float:
    """Tokens a round that greedy decoding of these texts with `tree` has; what the prompt's pass gives is not
    counted. With sampled texts the same holds of likeliest drafts."""
    paths = set(tree.rank_paths())
    tokens = rounds = 0
    for text in texts:
        position = 0
        while position < len(text.ranks):
            accepted: tuple[int, ...] = ()
            for rank in text.ranks[position]:
                if (*accepted, rank) not in paths:
                    break
                accepted = (*accepted, rank)
            position += len(accepted) + 1
            rounds += 1
        tokens += len(text.ranks)
    return tokens / rounds
