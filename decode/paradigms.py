"""Ways of drafting side by side on one base, one set of prompts, one clock: what is run and what is written down.

Every way answers every prompt, in an order that turns from prompt to prompt, through the same engine; transformers' own
`generate`, plain and with its prompt lookup, can be run beside them. Each answer is a line of `rows.jsonl`, so that a
run which was cut goes on where it stopped. What the figures mean is in `decode.paradigms_report`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from decode.benchmark.log import Log
from decode.benchmark.methods import Method, Request, generate_method, timed
from decode.benchmark.prompts import Prompt
from decode.drafters import Drafter, load_drafter
from decode.drafters.combined import CombinedDrafter
from decode.drafters.crossmodel import TextDrafter
from decode.drafters.eagle import EagleDrafter
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.model import ModelDrafter
from decode.engine import Decoder
from decode.guard import DEFAULT_GUARD
from decode.machine import describe_machine, load_average, versions
from decode.measure import Costs, measure_costs
from decode.sampling import SamplingParams
from decode.settings import GenerationResult, GenerationSettings
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, UserError

PLAIN = "plain"
GENERATE = {"generate": False, "generate, prompt lookup": True}
"""transformers' own loop, by whether it drafts from the prompt."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Footprint:
    """What a way of drafting adds to the base."""

    parameters: int
    weight_bytes: int
    cache_bytes_per_token: int | None
    """Of keys, values and states that it keeps for each token of the text; None where that is not known here."""

    def __add__(self, other: Footprint) -> Footprint:
        caches = self.cache_bytes_per_token, other.cache_bytes_per_token
        known = None if None in caches else sum(c for c in caches if c is not None)
        return Footprint(self.parameters + other.parameters, self.weight_bytes + other.weight_bytes, known)


def footprint(drafter: Drafter, base: Base) -> Footprint:
    """Weights in the dtype that they are run in. What the base has anyway (its layers, its projection) counts nothing,
    and neither do the few integers a token of a text's index."""
    if isinstance(drafter, CombinedDrafter):
        whole = Footprint(0, 0, 0)
        for part in drafter.drafters:
            whole += footprint(part, base)
        return whole
    if isinstance(drafter, LookupDrafter | EarlyExitDrafter):
        return Footprint(0, 0, 0)
    if isinstance(drafter, ModelDrafter):
        model = drafter.model
        size = model.dtype.itemsize
        return Footprint(model.num_parameters, model.num_parameters * size, kv_values(model) * size)
    heads: Any = drafter.heads  # type: ignore[attr-defined]
    parameters, size = getattr(drafter, "num_parameters", None) or heads.num_parameters, base.dtype.itemsize
    kept: int | None = None
    if isinstance(drafter, EagleDrafter):
        shape = heads.config.shape
        kept = (2 * shape.num_key_value_heads * shape.head_dim + base.hidden_size) * size
    elif heads.config.family == "medusa":
        kept = 0
    elif heads.config.family == "hydra":
        shape = heads.config.shape if heads.config.prefix_attention else None
        kept = 0 if shape is None else 2 * shape.num_key_value_heads * shape.head_dim * size
    return Footprint(parameters, parameters * size, kept)


def kv_values(model: Base) -> int:
    """Keys and values that a token leaves in a model's cache."""
    config = model.config
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * model.num_layers * heads * size


def draws(drafter: Drafter) -> bool:
    """Whether a way of drafting draws its drafts for rows that are sampled at a temperature from which that pays."""
    if isinstance(drafter, CombinedDrafter):
        return any(draws(part) for part in drafter.drafters)
    return not isinstance(drafter, LookupDrafter | TextDrafter)


def rule(drafter: Drafter | None, settings: GenerationSettings) -> str:
    """By which rule drafts are kept."""
    if drafter is None:
        return "none"
    if settings.acceptance != "exact":
        return settings.acceptance
    if settings.sampling.greedy:
        return "greedy"
    return "rejection of draws" if settings.draft_temperature > 0.0 and draws(drafter) else "point mass"


@dataclass(frozen=True)
class Paradigm:
    """One way of answering: its label, and how the engine drafts (None: not at all), or `generate` itself."""

    label: str
    drafter: Drafter | None
    method: Method | None = None


def load_paradigms(base: Base, specs: Sequence[str], heads: str | Path | None = None) -> list[Paradigm]:
    """Plain decoding, then a way of drafting for each name (see `load_drafter`), labelled by it."""
    if len(set(specs)) < len(specs):
        raise ConfigError(f"a way of drafting is named twice: {', '.join(specs)}")
    drafters = [Paradigm(name, load_drafter(name, base, heads=heads)) for name in specs]
    return [Paradigm(PLAIN, None), *drafters]


def generate_paradigms(unpacked: Base) -> list[Paradigm]:
    """transformers' `generate` on a model as `from_pretrained` gives it, plain and with its prompt lookup."""
    return [Paradigm(name, None, generate_method(unpacked, lookup)) for name, lookup in GENERATE.items()]


def default_specs(base: Base, heads: bool) -> list[str]:
    """What there is to compare on a base that has no draft model: heads where there are some, prompt lookup, an exit at
    two thirds of the layers, and heads with prompt lookup."""
    own = ["lookup"] + ([f"exit:{max(1, 2 * base.num_layers // 3)}"] if base.num_layers > 1 else [])
    return ["heads", *own, "heads+lookup"] if heads else own


@dataclass(frozen=True)
class Plan:
    """What a comparison asks."""

    prompts: Sequence[Prompt]
    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 128
    seed: int = 0
    guarded: bool = False
    """With the guard of the engine, as users decode; without, so that each way is measured by itself."""
    slow: frozenset[str] | None = None
    """Ids of the prompts that other programs' loops are asked too; None: all."""
    sampled: frozenset[str] | None = None
    """Ids of the prompts that are asked above temperature 0 too; None: all."""

    def asks(self, paradigm: Paradigm, prompt: Prompt, temperature: float) -> bool:
        slow = self.slow is None or paradigm.method is None or prompt.id in self.slow
        return slow and (temperature == 0.0 or self.sampled is None or prompt.id in self.sampled)

    def settings(self, temperature: float, number: int) -> GenerationSettings:
        return GenerationSettings(self.max_new_tokens, SamplingParams(temperature=temperature), seed=self.seed + number)


def run(
    base: Base,
    paradigms: Sequence[Paradigm],
    plan: Plan,
    log: Log,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Measures what the log does not have yet."""
    done = {(row["method"], row["id"], row["temperature"]) for row in log.rows}
    asked = product(paradigms, plan.prompts, plan.temperatures)
    todo = {(p.label, prompt.id, t) for p, prompt, t in asked if plan.asks(p, prompt, t)} - done
    if not todo:
        return
    log.add_session({"machine": describe_machine(base.device), "versions": versions(), "load_average": load_average()})
    guard = DEFAULT_GUARD if plan.guarded else None
    decoders = {p.label: Decoder(base, p.drafter, guard=guard) for p in paradigms if p.method is None}
    _warm_up(base, paradigms, decoders, plan)
    for number, prompt in enumerate(plan.prompts):
        ids = render(base, prompt)
        turn = number % len(paradigms)
        for temperature, paradigm in product(plan.temperatures, [*paradigms[turn:], *paradigms[:turn]]):
            if (paradigm.label, prompt.id, temperature) in todo:
                settings = plan.settings(temperature, number)
                row = _measure(base, paradigm, decoders.get(paradigm.label), ids, settings)
                log.add({"id": prompt.id, "category": prompt.category, "temperature": temperature, **row})
        progress(f"{number + 1} of {len(plan.prompts)} prompts")


def render(base: Base, prompt: Prompt) -> list[int]:
    """Through the chat template where the base has one, else as it is. Raises UserError where there is none and the
    prompt is a conversation."""
    if getattr(base.tokenizer, "chat_template", None):
        return base.render_chat([dict(m) for m in prompt.messages] or [{"role": "user", "content": prompt.text}])
    if base.tokenizer is None:
        raise UserError(f"the base {base.name!r} has no tokenizer to read prompts with")
    if prompt.messages:
        raise UserError(f"prompt {prompt.id!r} is a conversation, and the base {base.name!r} has no chat template")
    return list(base.tokenizer.encode(prompt.text))


def _warm_up(base: Base, paradigms: Sequence[Paradigm], decoders: Mapping[str, Decoder], plan: Plan) -> None:
    ids = render(base, plan.prompts[0])
    for paradigm in paradigms:
        for temperature in plan.temperatures:
            settings = GenerationSettings(WARM_UP_TOKENS, SamplingParams(temperature=temperature), seed=0)
            _measure(base, paradigm, decoders.get(paradigm.label), ids, settings)


def _measure(
    base: Base, paradigm: Paradigm, decoder: Decoder | None, ids: list[int], settings: GenerationSettings
) -> dict[str, Any]:
    temperature, seed = settings.sampling.temperature, settings.seed or 0
    request = Request(ids, settings.max_new_tokens, temperature, seed)
    if paradigm.method is not None:
        answer, seconds = timed(paradigm.method, request, base.device)
        counts: dict[str, Any] = {"forwards": answer.forwards, "rounds": None, "nodes": None, "rule": None}
        return _row(paradigm.label, answer.token_ids, seconds, counts | {"histogram": [], "stages": {}})
    assert decoder is not None
    results: list[GenerationResult] = []

    def engine(_: Request) -> Any:
        results.append(decoder.generate(ids, settings))

    _, seconds = timed(engine, request, base.device)
    stats = results[0].stats
    counts = {
        "forwards": stats.base_forwards,
        "rounds": stats.rounds,
        "nodes": stats.tree_nodes,
        "rule": rule(paradigm.drafter, settings),
        "exact": stats.exact,
        "histogram": stats.acceptance_histogram,
        "stages": stats.stage_seconds,
    }
    return _row(paradigm.label, results[0].token_ids, seconds, counts)


def _row(label: str, token_ids: Sequence[int], seconds: float, counts: Mapping[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]
    return {"method": label, "new_tokens": len(token_ids), "seconds": seconds, "digest": digest, **counts}


def costs_of(base: Base, path: Path | None, *, sizes: Sequence[int], contexts: Sequence[int], repeats: int) -> Costs:
    """The base's cost of a pass by its nodes, from the file where the same was measured before."""
    if path is not None and path.is_file():
        costs = Costs.from_dict(json.loads(path.read_text(encoding="utf-8")))
        measured = {context: sorted(at) for context, at in costs.forward.items()}
        if measured == dict.fromkeys(contexts, sorted(sizes)) and costs.repeats == repeats:
            return costs
    costs = measure_costs(base, sizes=sizes, contexts=contexts, repeats=repeats)
    if path is not None:
        scratch = path.with_suffix(".partial")
        scratch.write_text(json.dumps(costs.as_dict(), indent=1) + "\n", encoding="utf-8")
        scratch.replace(path)
    return costs
