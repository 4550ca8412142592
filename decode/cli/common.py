"""What the commands share: their options, and loading a base with its heads."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_heads.embedded import DEFAULT_EMBEDDED
from medusa_heads.errors import UserError

if TYPE_CHECKING:
    from decode.drafters import Drafter
    from decode.engine import Decoder
    from decode.settings import GenerationSettings
    from decode.stats import Stats
    from medusa_heads.base import Base


class Dtype(str, Enum):
    """Arithmetic of the base; `auto` is what its checkpoint says."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Acceptance(str, Enum):
    """By which rule drafts are kept."""

    exact = "exact"
    approximate_typical = "approximate-typical"


BaseOption = Annotated[
    str | None,
    typer.Option("--base", metavar="NAME", help="Local directory, Hub id, .gguf file or embedded name."),
]
HeadsOption = Annotated[
    str | None, typer.Option("--heads", metavar="NAME", help="Directory, Hub id or embedded name of trained heads.")
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="SPEC",
        help="How to draft: heads (the default), lookup, model:NAME, exit:L, or some of them, as in heads+lookup.",
    ),
]
PlainOption = Annotated[bool, typer.Option("--plain", help="The same engine without heads.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Greedy text is the base's own, exactly, in float32.")]
DeviceOption = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="Default: a GPU if there is one.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option("--top-k", min=0, help="0 keeps all tokens.")]
TopPOption = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="1 keeps all tokens.")]
AcceptanceOption = Annotated[
    Acceptance,
    typer.Option("--acceptance", help="approximate-typical keeps plausible drafts: not the base's law. For sampling."),
]
EpsilonOption = Annotated[float | None, typer.Option("--typical-epsilon", help="Of approximate-typical; default 0.09.")]
AlphaOption = Annotated[float | None, typer.Option("--typical-alpha", help="Of approximate-typical; default 0.3.")]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1)]
SeedOption = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")]
NoGuardOption = Annotated[
    bool, typer.Option("--no-guard", help="Keep drafting where it does not pay. The text is the same.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="For machines: JSON on standard output.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class Pair:
    """A base, and a drafter with its heads unless it decodes plainly."""

    base: Base
    drafter: Drafter | None

    def decoder(self, *, guarded: bool = True) -> Decoder:
        from decode.engine import Decoder
        from decode.guard import DEFAULT_GUARD

        return Decoder(self.base, self.drafter, guard=DEFAULT_GUARD if guarded else None)


def choose(base: str | None, heads: str | None, plain: bool) -> tuple[str | None, str | None]:
    """Names of the base and the heads to use; a base of None is the one that the heads name.

    With neither named, the embedded pair. Raises `UserError` where a base is named whose heads are not known.
    """
    if plain:
        if heads is not None:
            raise UserError(f"--plain decodes without heads, and --heads {heads} names some: leave one out")
        return base or DEFAULT_EMBEDDED, None
    if heads is not None:
        return base, heads
    if base in (None, DEFAULT_EMBEDDED):
        return DEFAULT_EMBEDDED, DEFAULT_EMBEDDED
    raise UserError(f"no heads are named for the base {base}: pass --heads, or --plain to decode without")


def choose_drafter(
    base: str | None, heads: str | None, plain: bool, drafter: str | None
) -> tuple[str | None, str | None, str | None]:
    """Names of the base and the heads to use as in `choose`, and the drafter: None decodes plainly.

    Without `--drafter` the heads of `--heads` draft, or, where none are named, what drafts best for the embedded base.
    A drafter without heads needs none, and has the embedded base by default.
    """
    from decode.drafters.specs import EMBEDDED_WAY, OWN_HEADS, parse_all

    if drafter is None:
        own = OWN_HEADS if heads is not None else EMBEDDED_WAY
        base, heads = choose(base, heads, plain)
        return base, heads, None if heads is None else own
    if plain:
        raise UserError(f"--plain drafts nothing, and --drafter {drafter} says how to: leave one out")
    named = [value for kind, value, _ in parse_all(drafter) if kind == "heads"]
    if heads is not None and OWN_HEADS not in named:
        raise UserError(f"--drafter {drafter} drafts without the heads of --heads {heads}: leave one out")
    if OWN_HEADS in named:
        base, heads = choose(base, heads, False)
    elif named and base is None:
        heads = named[0]
    return (base, heads, drafter) if named else (base or DEFAULT_EMBEDDED, None, drafter)


def load_pair(
    base: str | None, heads: str | None, *, plain: bool, dtype: Dtype, device: str | None, drafter: str | None = None
) -> Pair:
    """Load a base and a drafter that is checked against it; see `choose_drafter`."""
    base_name, heads_name, drafter = choose_drafter(base, heads, plain, drafter)
    from decode.drafters import load_drafter
    from medusa_heads.base import Base
    from medusa_heads.hub import base_of, heads_directory

    quiet_transformers()
    directory = None if heads_name is None else heads_directory(heads_name)
    revision = None
    if base_name is None:
        assert directory is not None
        base_name, revision = base_of(directory)
        if base_name is None:
            raise UserError(f"the heads {heads_name} do not name their base: pass --base")
    with notices_on_stderr():
        loaded = Base.load(base_name, dtype=dtype.value, device=device, revision=revision)
    return Pair(loaded, None if drafter is None else load_drafter(drafter, loaded, heads=directory))


def settings(
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    acceptance: Acceptance = Acceptance.exact,
    epsilon: float | None = None,
    alpha: float | None = None,
    plain: bool = False,
) -> GenerationSettings:
    """The engine's settings from the options of a command; an approximate rule is announced on standard error."""
    from decode.sampling import SamplingParams
    from decode.settings import GenerationSettings

    if acceptance is Acceptance.exact and (epsilon is not None or alpha is not None):
        raise UserError("--typical-epsilon and --typical-alpha go with --acceptance approximate-typical")
    if plain and acceptance is not Acceptance.exact:
        raise UserError(f"--plain drafts nothing that --acceptance {acceptance.value} could keep: leave one out")
    built = GenerationSettings(
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p),
        seed=seed,
        stop=stop,
        acceptance=acceptance.value,
        typical_epsilon=GenerationSettings.typical_epsilon if epsilon is None else epsilon,
        typical_alpha=GenerationSettings.typical_alpha if alpha is None else alpha,
    )
    if built.acceptance != "exact":
        typer.echo(f"{built.acceptance} acceptance: the text does not have the base's law", err=True)
    return built


def render(base: Base, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of the conversation through the base's chat template, which must have one."""
    return base.render_chat(messages, add_generation_prompt=True)


def summary(stats: Stats) -> str:
    """One line for people: tokens, tokens a second, acceptance length."""
    figures = f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, acceptance length {stats.tau:.2f}"
    return figures + rule_of(stats.acceptance)


def rule_of(acceptance: str) -> str:
    """What a line of figures says of the rule by which drafts were kept: nothing of an exact one."""
    return "" if acceptance == "exact" else f" ({acceptance} acceptance)"


def quiet_transformers() -> None:
    """No progress bars and no advice of transformers between the lines of a command."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


@contextmanager
def notices_on_stderr() -> Iterator[None]:
    """Say on standard error what a first use is waiting for: the embedded base is fetched and converted once."""
    logger = logging.getLogger("medusa_heads.embedded")
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
