"""What is kept of one call for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode.cache import TreeCache
from decode.drafters import Drafter, DraftSession
from medusa_heads.base import Base


@dataclass
class Prefix:
    """What a caller keeps between turns, so that a shared beginning is not computed again. Owned by the caller; one
    call at a time may use it. A call that fails, or is left before its end, leaves what it had read by then."""

    base: Base | None = None
    cache: TreeCache | None = None
    ids: list[int] | None = None
    """The tokens that the cache holds; None while a call changes it, and where one failed in doing so."""
    drafter: Drafter | None = None
    session: DraftSession | None = None

    def shared_length(self, prompt_ids: Sequence[int]) -> int:
        """Tokens of the prompt that need not be computed again. The last one always is: its state is needed."""
        length = 0
        for ours, theirs in zip(self.ids or [], prompt_ids[:-1], strict=False):
            if ours != theirs:
                break
            length += 1
        return length
