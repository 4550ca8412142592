"""Processors and stopping criteria that `generate` prepared for a padded batch, for one row of it at a time.

Rows accept different lengths, so there is no step at which a processor could be shown the batch as plain decoding has
it. Each row's processors see that row's text with the padding it has in the batch, so that lengths and places count as
they do in `generate`. Those that do the same to every row get the row alone, (1, L); the others, one's own among them,
get a batch of the batch's size in which every row is this one, and this row of their answer is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

from decode.sampling import apply
from medusa_heads.errors import ConfigError

SAME_FOR_EVERY_ROW = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)
"""Neither the number of a row nor the other rows change what these do."""

ONE_STATE_FOR_THE_BATCH = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""These keep what they have seen of all rows, step by step: right for a batch of one alone."""


@dataclass(frozen=True)
class BatchRow:
    """Where a row stands in the batch that `generate` was given."""

    index: int
    batch_size: int
    padding: Tensor
    """(P,) the padding ids before the row's first token, on the device of the batch."""

    def padded(self, input_ids: Tensor) -> Tensor:
        """The row's text as the batch has it: (1, L) → (1, P + L), on the device of the batch."""
        return torch.cat((self.padding[None], input_ids.to(self.padding.device)), dim=1)

    def tiled(self, values: Tensor) -> Tensor:
        """A batch in which every row is this one: (1, …) → (B, …), in memory of its own."""
        return values.repeat(self.batch_size, *[1] * (values.dim() - 1))

    def needs_batch(self, step: LogitsProcessor | StoppingCriteria) -> bool:
        if self.batch_size == 1:
            return False
        if type(step) is RepetitionPenaltyLogitsProcessor:
            return isinstance(step.prompt_ignore_length, Tensor)
        return type(step) not in SAME_FOR_EVERY_ROW


class _RowProcessors(LogitsProcessor):
    """All processors of a batch, applied to one row."""

    def __init__(self, row: BatchRow, processors: Sequence[LogitsProcessor]):
        self.row = row
        self.steps: list[tuple[LogitsProcessor, bool]] = []
        for processor in processors:
            if type(processor) is PrefixConstrainedLogitsProcessor:
                self.steps.append((_constraint_of_row(processor, row.index), False))
            else:
                self.steps.append((processor, row.needs_batch(processor)))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        ids = self.row.padded(input_ids)
        values: Tensor = scores.to(ids.device)
        for process, needs_batch in self.steps:
            if needs_batch:
                values = process(self.row.tiled(ids), self.row.tiled(values))[self.row.index, None]
            else:
                values = apply(process, ids, values)
        return cast(torch.FloatTensor, values.to(scores.device))


def _constraint_of_row(processor: PrefixConstrainedLogitsProcessor, row: int) -> PrefixConstrainedLogitsProcessor:
    """The user's function is asked for this row's own number: other rows' constraints may not admit this text."""
    allowed, returned = processor._prefix_allowed_tokens_fn, processor._num_beams
    return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row // returned, ids), 1)


class _RowCriteria(StoppingCriteria):
    """The stopping criteria of a batch, asked about one row."""

    def __init__(self, row: BatchRow, criteria: Sequence[StoppingCriteria]):
        self.row = row
        self.steps = [(criterion, row.needs_batch(criterion)) for criterion in criteria]

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        ids = self.row.padded(input_ids)
        ended = torch.zeros(1, dtype=torch.bool, device=ids.device)
        for criterion, needs_batch in self.steps:
            if needs_batch:
                tiled = None if scores is None else tuple(map(self.row.tiled, scores))
                ended = ended | criterion(self.row.tiled(ids), tiled, **kwargs)[self.row.index]
            else:
                ended = ended | criterion(ids, scores, **kwargs)
        return cast(torch.BoolTensor, ended)


def row_processors(processors: Sequence[LogitsProcessor], row: BatchRow) -> LogitsProcessorList:
    """The batch's processors for one row. Raises ConfigError for those that cannot be asked row by row."""
    for processor in processors:
        if row.batch_size > 1 and isinstance(processor, ONE_STATE_FOR_THE_BATCH):
            raise ConfigError(
                f"{type(processor).__name__} keeps one state for all rows of a batch, and rows are decoded at their "
                "own pace here: give it one prompt at a time"
            )
    return LogitsProcessorList([_RowProcessors(row, processors)] if processors else [])


def row_criteria(criteria: Sequence[StoppingCriteria], row: BatchRow) -> StoppingCriteriaList | None:
    """The batch's stopping criteria for one row; None where there are none."""
    return StoppingCriteriaList([_RowCriteria(row, criteria)]) if criteria else None


def split_criteria(criteria: Sequence[StoppingCriteria]) -> tuple[int | None, tuple[int, ...], list[StoppingCriteria]]:
    """Takes from prepared stopping criteria what the engine decides itself.

    Returns:
        The greatest length, padding and prompt included; the ids that end a text; and all other criteria.
    """
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    ends = [criterion.eos_token_id.tolist() for criterion in criteria if type(criterion) is EosTokenCriteria]
    others = [criterion for criterion in criteria if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)]
    return min(lengths, default=None), tuple(token for ids in ends for token in ids), others
