"""Speculation inside transformers' own `generate`:

    outputs = model.generate(**inputs, max_new_tokens=200, custom_generate=speculate("path/of/heads"))

`generate` prepares everything as ever (inputs, generation config, logits processors, stopping criteria) and hands it
over instead of running its own loop. The tokens are those that it would have given: the same ones in float32 greedy
decoding, and with the same law when sampling. The model is left as it is.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from decode.drafters import load_drafter
from decode.dynamic import DEFAULT, DynamicTree
from decode.engine import Decoder
from decode.hf_rows import BatchRow, row_criteria, row_processors, split_criteria
from decode.prefix import Prefix
from decode.sampling import SamplingParams
from decode.settings import GenerationResult, GenerationSettings
from decode.stats import Stats
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, UnsupportedModelError
from medusa_heads.medusa import MedusaHeads

if TYPE_CHECKING:
    from decode.drafters import Drafter
    from medusa_heads.eagle import EagleHeads
    from medusa_heads.hydra import HydraHeads

    Heads = MedusaHeads | EagleHeads | HydraHeads

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
PREPARED = {
    "attention_mask",
    "cache",
    "cache_position",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""Model arguments that `generate` prepares for its own loop. The decoder needs the mask alone; any other argument would
change what the model computes, and is refused."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`, and what the decoding cost.

    `cache` (in older releases `past_key_values`) is None: the decoder's own cache ends with the call. Where a row ended
    before others, its later `scores` and `logits` are 0 for the padding token and -inf for all others, so that
    `compute_transition_scores(…, normalize_logits=True)` adds nothing for them.
    """

    stats: list[Stats] | None = None
    """One a row."""


def speculate(
    heads: Heads | Drafter | str | Path, *, tree: Tree | DynamicTree | None = None, tokenizer: Any = None
) -> Speculation:
    """A decoding loop for `model.generate(…, custom_generate=speculate(heads))`.

    Args:
        heads: what `load_drafter` takes by name, trained heads above all; heads of any family in memory, Medusa's with
            a `tree`; or a drafter that was made for the model.
        tree: the draft tree, instead of the one saved with the heads; for EAGLE and Hydra heads also the limits of a
            dynamic one.
        tokenizer: the model's. Needed for `stop_strings`; and where it is given, heads trained with another one are
            refused.

    Besides generate's own arguments the call takes `seed=`: sampling then draws from that seed and leaves torch's
    global state alone; without it the seed is drawn from the global state, so that `torch.manual_seed` makes the text
    reproducible as it does in `generate`. And it takes `prefix=Prefix()` (`decode.engine`), for calls with one prompt
    each: what a call shares with the beginning of the one before is not computed again.

    One object serves one model, and any number of calls. Raises ConfigError for what the loop cannot do: beams,
    assistants, contrastive and other search modes, filled caches, model inputs besides `input_ids` and its mask.
    """
    return Speculation(heads, tree, tokenizer)


class Speculation:
    """See `speculate`."""

    def __init__(self, heads: Heads | Drafter | str | Path, tree: Tree | DynamicTree | None, tokenizer: Any):
        if isinstance(heads, MedusaHeads) and tree is None:
            raise ConfigError("Medusa heads in memory need a tree: speculate(heads, tree=…)")
        if isinstance(heads, MedusaHeads) and isinstance(tree, DynamicTree):
            raise ConfigError("Medusa heads fill one tree every round: give a Tree, not the limits of a dynamic one")
        if tree is not None and not isinstance(heads, nn.Module | str | Path):
            raise ConfigError("a drafter has its own tree: leave tree out")
        self._heads = heads
        self._tree = tree
        self._tokenizer = tokenizer
        self._decoder: Decoder | None = None
        self._lock = threading.Lock()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        stop_strings: str | Sequence[str] | None = None,
        seed: int | None = None,
        prefix: Prefix | None = None,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeOutput:
        """Called by `generate`, with what it prepared."""
        hidden = _arguments_kept_by_generate(self)
        streamer = streamer if streamer is not None else hidden.get("streamer")
        if hidden.get("assistant_model") is not None:
            raise ConfigError("assistant_model and custom_generate=speculate(…) both draft: leave one out")
        if hidden.get("synced_gpus"):
            raise ConfigError("synced_gpus is not supported: processes would need different numbers of forward passes")
        _check_config(generation_config)
        _check_model_arguments(model_kwargs)
        _check_positions(model_kwargs.get("position_ids"), input_ids, model_kwargs.get("attention_mask"))
        decoder = self._decoder_for(model)
        stopping_criteria = [*stopping_criteria, *self._stop_strings(stop_strings)]
        request = _Request(input_ids, model_kwargs.get("attention_mask"), generation_config, stopping_criteria)
        settings = request.settings(logits_processor, _seed(generation_config, seed))
        if prefix is not None and request.batch_size != 1:
            raise ConfigError(f"a prefix serves one prompt at a time, not {request.batch_size}")
        if streamer is not None:
            results = _stream(decoder, request, settings, streamer, prefix)
        elif prefix is not None:
            results = [decoder.generate(request.prompts[0], settings[0], prefix=prefix)]
        else:
            results = decoder.generate_batch(request.prompts, settings)
        if any(result.finish_reason == "context" for result in results):
            warnings.warn(
                f"a text was ended at the model's context of {decoder.base.max_positions} tokens", stacklevel=2
            )
        return request.output(results)

    def _decoder_for(self, model: Any) -> Decoder:
        if model.training:
            raise ConfigError("the model is in training mode, where dropout changes its law: call model.eval() first")
        with self._lock:
            if self._decoder is None:
                with _gradients_as_they_are(model):
                    base = Base.from_model(model, self._tokenizer)
                self._decoder = Decoder(base, self._drafter(base))
            if self._decoder.base.model is not model:
                raise ConfigError("a speculate(…) object serves the model of its first call: make another for this one")
            return self._decoder

    def _drafter(self, base: Base) -> Drafter:
        if isinstance(self._heads, str | Path):
            return load_drafter(self._heads, base, heads=None, **({} if self._tree is None else {"tree": self._tree}))
        if isinstance(self._heads, nn.Module):
            return _drafter_in_memory(self._heads, base, self._tree)
        return self._heads

    def _stop_strings(self, stop_strings: str | Sequence[str] | None) -> list[StopStringCriteria]:
        # `generate` drops its tokenizer argument before it calls a loop of one's own, so this is taken from its hands:
        # an argument that a custom loop names is passed on to it, and not looked at before.
        if stop_strings is None:
            return []
        if self._tokenizer is None:
            raise ConfigError("stop_strings needs the tokenizer here: speculate(…, tokenizer=tokenizer)")
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        return [StopStringCriteria(self._tokenizer, strings)]


def _drafter_in_memory(heads: Heads, base: Base, tree: Tree | DynamicTree | None) -> Drafter:
    """The drafter for heads of any family."""
    from decode.drafters.eagle import EagleDrafter
    from decode.drafters.hydra import HydraDrafter
    from decode.drafters.medusa import MedusaDrafter
    from medusa_heads.eagle import EagleHeads

    if isinstance(heads, MedusaHeads):
        assert isinstance(tree, Tree)
        return MedusaDrafter(heads, base, tree)
    if isinstance(heads, EagleHeads):
        return EagleDrafter(heads, base, tree or DEFAULT)
    return HydraDrafter(heads, base, tree or replace(DEFAULT, depth=min(DEFAULT.depth, heads.config.num_heads)))


class _Request:
    """A padded batch as rows of their own, and rows as a padded batch again."""

    def __init__(
        self, input_ids: Tensor, attention_mask: Tensor | None, config: GenerationConfig, criteria: Sequence[Any]
    ):
        self.input_ids = input_ids
        self.config = config
        self.batch_size, self.width = input_ids.shape
        starts = _starts(input_ids, attention_mask)
        self.prompts = [ids[start:] for ids, start in zip(input_ids.tolist(), starts, strict=True)]
        self.rows = [BatchRow(i, self.batch_size, input_ids[i, :start]) for i, start in enumerate(starts)]
        max_length, self.eos_token_ids, self.criteria = split_criteria(criteria)
        self.max_length = max_length if max_length is not None else config.max_length
        pad = _pad_token_id(config)
        if pad is None and self.batch_size > 1 and (self.eos_token_ids or self.criteria):
            raise ConfigError("rows of a batch may end at different lengths: give pad_token_id")
        self.pad_token_id = pad or 0

    def settings(self, processors: Sequence[Any], seed: int | None) -> list[GenerationSettings]:
        """Of each row."""
        config = self.config
        return [
            GenerationSettings(
                max_new_tokens=self.max_length - self.width,
                sampling=SamplingParams(temperature=_temperature(config)),
                seed=None if seed is None else seed + row.index,
                eos_token_ids=self.eos_token_ids,
                logits_processor=row_processors(processors, row),
                stopping_criteria=row_criteria(self.criteria, row),
                output_logits=bool(config.return_dict_in_generate and config.output_logits),
                output_scores=bool(config.return_dict_in_generate and config.output_scores),
            )
            for row in self.rows
        ]

    def output(self, results: Sequence[GenerationResult]) -> Tensor | SpeculativeOutput:
        """(B, prompt + longest new text), padded on the right as `generate` does; or the output with figures."""
        longest = max(len(result.token_ids) for result in results)
        sequences = self.input_ids.new_full((self.batch_size, self.width + longest), self.pad_token_id)
        sequences[:, : self.width] = self.input_ids
        for row, result in zip(sequences, results, strict=True):
            row[self.width : self.width + len(result.token_ids)] = row.new_tensor(result.token_ids)
        if not self.config.return_dict_in_generate:
            return sequences
        scores = self._steps([result.scores for result in results], longest) if self.config.output_scores else None
        logits = self._steps([result.logits for result in results], longest) if self.config.output_logits else None
        return SpeculativeOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=scores,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            stats=[result.stats for result in results],
        )

    def _steps(self, rows: Sequence[Tensor | None], longest: int) -> tuple[Tensor, ...]:
        """Scores of each row (new tokens, V) as a tuple over steps of (B, V)."""
        whole = []
        for row in rows:
            assert row is not None
            ended = row.new_full((longest - row.shape[0], row.shape[1]), -torch.inf)
            if len(ended):
                ended[:, self.pad_token_id] = 0.0
            whole.append(torch.cat((row, ended)).to(self.input_ids.device))
        return tuple(torch.stack(whole, dim=1))


def _stream(
    decoder: Decoder,
    request: _Request,
    settings: Sequence[GenerationSettings],
    streamer: Any,
    prefix: Prefix | None = None,
) -> list[GenerationResult]:
    """Decodes, and gives the streamer what `generate` would: one token of each row a step, padding for ended rows."""
    waiting: list[deque[int]] = [deque() for _ in request.rows]
    results: dict[int, GenerationResult] = {}
    for chunk in decoder.stream_batch(request.prompts, settings, prefix=prefix):
        waiting[chunk.row].extend(chunk.token_ids)
        if chunk.result is not None:
            results[chunk.row] = chunk.result
        while any(waiting) and all(tokens or row in results for row, tokens in enumerate(waiting)):
            step = [tokens.popleft() if tokens else request.pad_token_id for tokens in waiting]
            streamer.put(torch.tensor(step))
    streamer.end()
    return [results[row] for row in range(request.batch_size)]


def _arguments_kept_by_generate(callee: Speculation) -> dict[str, Any]:
    """Arguments of the `generate` call that it does not hand on.

    transformers (5.17 to 5.24) gives `streamer`, `assistant_model` and `synced_gpus` to its own loops only: for a
    callable they are dropped without a word, and a streamer that nobody feeds keeps its reader waiting for ever. They
    are public parameters of `generate`, read here, and only read, from the frame that called us.
    """
    frame = inspect.currentframe()
    for _ in range(3):  # this function, `__call__`, `generate`
        if frame is None:
            break
        if frame.f_code.co_name == "generate" and frame.f_locals.get("custom_generate") is callee:
            return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
        frame = frame.f_back
    return {}


def _check_config(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise ConfigError(f"the generation mode {mode.value} is not supported: only greedy search and sampling are")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ConfigError("output_attentions and output_hidden_states are not supported: a tree pass has other shapes")
    if config.cache_implementation == "quantized":
        raise ConfigError("a quantized cache is not supported: the decoder keeps keys and values as the model has them")


def _check_model_arguments(arguments: dict[str, Any]) -> None:
    extra = sorted(name for name, value in arguments.items() if name not in PREPARED and value is not None)
    if "encoder_outputs" in extra:
        raise UnsupportedModelError("an encoder-decoder model cannot be decoded by trees here: causal models only")
    if extra:
        raise ConfigError(f"{', '.join(extra)}: the decoder takes input_ids and attention_mask alone")
    cache = arguments.get("cache", arguments.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError("a filled cache cannot be continued: the decoder keeps a cache of its own")


def _check_positions(position_ids: Tensor | None, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """`generate` counts positions from a row's first token, as the decoder does; one's own may be others."""
    if position_ids is None:
        return
    seen = torch.ones_like(input_ids) if attention_mask is None else (attention_mask != 0).long()
    if position_ids.shape != seen.shape or bool(((position_ids - seen.cumsum(-1) + 1) * seen).any()):
        raise ConfigError("position_ids of one's own are not supported: positions count from a row's first token")


def _starts(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Where each row's text begins in a batch padded on the left."""
    if attention_mask is None:
        return [0] * len(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids has {tuple(input_ids.shape)}"
        )
    seen = attention_mask != 0
    starts = (~seen).sum(dim=1).tolist()
    if any(not bool(row[start:].all()) for row, start in zip(seen, starts, strict=True)):
        raise ConfigError("attention_mask hides tokens behind a row's first: pad on the left (padding_side='left')")
    return starts


def _pad_token_id(config: GenerationConfig) -> int | None:
    pad: Any = config.pad_token_id
    if pad is None:  # `generate` then pads with the first EOS
        eos: Any = config.eos_token_id
        pad = eos[0] if isinstance(eos, Sequence) and eos else eos
    return None if pad is None else int(pad)


def _temperature(config: GenerationConfig) -> float:
    """Whether to sample, and how warm drafts are to be; the base's law is made by the prepared processors."""
    if not config.do_sample:
        return 0.0
    return 1.0 if config.temperature is None else float(config.temperature)


def _seed(config: GenerationConfig, seed: int | None) -> int | None:
    """The call's seed: the user's, or one from torch's global state, which greedy decoding leaves alone."""
    if seed is not None or not config.do_sample:
        return seed
    return int(torch.randint(2**62, ()).item())


@contextmanager
def _gradients_as_they_are(model: Any) -> Iterator[None]:
    """A `Base` freezes its model; one that is borrowed for decoding may be trained further."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
