"""Heads as an engine can hold them: what has to be changed, changed exactly, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.errors import BaseNeeded, HeadsError

if TYPE_CHECKING:
    from medusa_heads.base import Base


@dataclass(frozen=True)
class State:
    """Heads as a config and tensors under our names, on the CPU."""

    config: HeadsConfig
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, heads: Any) -> State:
        tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in heads.state_dict().items()}
        return cls(heads.config, tensors)

    def changed(self, tensors: Mapping[str, Tensor], **config: Any) -> State:
        return State(replace(self.config, **config), tensors)

    @property
    def dtype(self) -> torch.dtype:
        return next(t.dtype for t in self.tensors.values() if t.is_floating_point())


@dataclass(frozen=True)
class Written:
    """A checkpoint to be written, and the heads that reading it must give back."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    file: str
    expected: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()


def projection_rows(base: Base | None, ids: Tensor | None, what: str) -> tuple[Tensor, tuple[str, ...]]:
    """A copy of the base's projection, or of its rows `ids`, in the base's dtype, and what to say of it.

    Args:
        what: of the format, for the error where the base is needed and not given.

    Raises:
        BaseNeeded: no base.
        HeadsError: a projection that is more than a matrix.
    """
    if base is None:
        raise BaseNeeded(f"{what} holds a copy of the base's projection: name the base (--base)")
    if base.projection_bias is not None:
        raise HeadsError(f"{what} has no place for the bias of the projection of {base.name!r}")
    weight = base.projection_weight
    rows = (weight if ids is None else weight[ids.to(weight.device)]).to("cpu", copy=True).contiguous()
    probe = torch.tensor([-3.0, 1.0])
    if torch.equal(base.rescale(probe), probe):
        return rows, ()
    return rows, (
        f"{base.name!r} rescales its logits after the projection, which the copy does not: the order of tokens is the "
        "same, their probabilities are not",
    )


def check_shared(state: State, base: Base | None) -> None:
    """Raises HeadsError if the base at hand is not the heads' own."""
    if base is not None:
        from medusa_heads.hub import check_base

        check_base(state.config, base)


def without_choice(state: State, format: str, all_rows: bool) -> tuple[State, tuple[str, ...]]:
    """Heads that draft from the whole vocabulary.

    Args:
        all_rows: the caller agrees that heads which draft from chosen rows will draft from all of them.

    Raises:
        HeadsError: the heads draft from chosen rows and the caller does not agree, or the other rows do not exist.
    """
    rows = state.config.draft_vocab_size
    if rows is None:
        return state, ()
    if state.config.own_projection:
        raise HeadsError(f"{format} has no draft vocabulary, and these heads' projections have {rows} rows alone")
    if not all_rows:
        raise HeadsError(
            f"{format} has no draft vocabulary, and these heads draft from {rows} rows of {state.config.vocab_size}: "
            "--all-rows lets them draft from all, which changes what they propose"
        )
    tensors = {name: tensor for name, tensor in state.tensors.items() if name != "draft_ids"}
    note = f"drafts from all {state.config.vocab_size} tokens, not from the {rows} that the heads were trained on"
    return state.changed(tensors, draft_vocab_size=None), (note,)


def with_own_projections(state: State, base: Base | None, format: str) -> tuple[State, tuple[str, ...]]:
    """Medusa heads of which each holds a projection: copies of the base's where they share it."""
    if state.config.own_projection:
        return state, ()
    rows, notes = projection_rows(base, state.tensors.get("draft_ids"), format)
    count = state.config.num_heads  # type: ignore[attr-defined]
    copies = {f"lm_heads.{i}.weight": rows.clone() for i in range(count)}
    return state.changed({**state.tensors, **copies}, own_projection=True), (
        *notes,
        "each head holds a copy of the base's projection",
    )
