"""Drafters by name: what `--drafter` and `speculate` take. The grammar is in `decode.drafters.load_drafter`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.drafters import Drafter
from medusa_heads.embedded import DEFAULT_EMBEDDED
from medusa_heads.errors import ConfigError

if TYPE_CHECKING:
    from medusa_heads.base import Base

FAMILIES = {"medusa": "MedusaDrafter", "eagle": "EagleDrafter", "hydra": "HydraDrafter"}
OWN_HEADS = "heads"
"""The name of heads that are given apart, or embedded."""
LOOKUP = "lookup"
EMBEDDED_WAY = f"{OWN_HEADS}+{LOOKUP}"
"""What drafts best for the embedded base of all that was measured (docs/results/paradigms)."""


def load(name: str | Path, base: Base, heads: str | Path | None, options: Mapping[str, Any]) -> Drafter:
    """See `decode.drafters.load_drafter`."""
    parts = parse_all(name)
    if len(parts) == 1:
        kind, value, own = parts[0]
        return _one(kind, value, base, heads, {**own, **options})
    if options:
        raise ConfigError(f"{', '.join(sorted(options))}: a combination takes its settings within its name, {name!r}")
    from decode.drafters.combined import CombinedDrafter

    return CombinedDrafter([_one(kind, value, base, heads, own) for kind, value, own in parts], base.device)


Part = tuple[str, str, dict[str, Any]]


def parse_all(name: str | Path) -> list[Part]:
    """The parts of a name. A `Path` is one of heads, and so is a text that is a path which is there; but the texts
    `heads` and `lookup` always mean what they say, and a directory of that name is written `./heads`."""
    if isinstance(name, Path):
        return [("heads", str(name.absolute() if name.exists() else name), {})]
    if name not in (OWN_HEADS, LOOKUP) and Path(name).exists():
        return [("heads", name, {})]
    return [parse(part) for part in name.split("+")]


def parse(part: str) -> Part:
    """(kind, value, settings) of one way of drafting; the kind is heads, lookup, model or exit.

    Raises ConfigError for a name that can be none, before anything is looked for on the Hub.

    >>> parse("exit:4,depth=3")
    ('exit', '4', {'depth': 3})
    """
    name, *settings = part.split(",")
    options = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"a setting of a drafter is written key=value, not {setting!r} (in {part!r})")
        options[key.strip()] = _value(value.strip())
    kind, colon, value = name.strip().partition(":")
    if kind == LOOKUP and not colon:
        return kind, "", options
    if kind in ("model", "exit") and value:
        return kind, value, options
    if not name.strip():
        raise ConfigError("a drafter has a name: heads, lookup, model:NAME or exit:L")
    if kind in ("model", "exit"):
        raise ConfigError(f"{kind} needs a value: {'model:NAME' if kind == 'model' else 'exit:L'}")
    if name.strip() != OWN_HEADS:
        check_can_be_heads(name.strip())
    return "heads", name.strip(), options


def check_can_be_heads(name: str) -> None:
    """Raises ConfigError, with the closest name that there is, for what is neither a path, nor the name of embedded
    heads, nor written as an id of the Hub, where heads have an owner."""
    from medusa_heads.fetching import embedded_heads

    embedded = embedded_heads()
    if ("/" in name and ":" not in name) or name in embedded or Path(name).exists():
        return
    close = get_close_matches(name.partition(":")[0], [OWN_HEADS, LOOKUP, "model", "exit", *embedded], n=1)
    raise ConfigError(
        f"no way of drafting is named {name!r}{f' (is it {close[0]!r}?)' if close else ''}: there are heads, lookup, "
        f"model:NAME, exit:L, heads by directory or Hub id (owner/name), and embedded ones: {', '.join(embedded)}"
    )


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _one(kind: str, value: str, base: Base, heads: str | Path | None, options: dict[str, Any]) -> Drafter:
    if kind == LOOKUP:
        from decode.drafters.lookup import LookupDrafter

        return _made(LookupDrafter, (base,), options, LOOKUP)
    if kind == "model":
        from decode.drafters.model import ModelDrafter

        return ModelDrafter.from_pretrained(value, base, **options)
    if kind == "exit":
        from decode.drafters.early_exit import EarlyExitDrafter
        from decode.drafters.model import reach_of

        if not value.isdecimal():
            raise ConfigError(f"exit:L names a number of layers, not {value!r}")
        return EarlyExitDrafter(base, int(value), reach=reach_of(options))
    if value != OWN_HEADS:
        return _heads(value, base, options)
    if heads is None and base.name != DEFAULT_EMBEDDED:
        raise ConfigError(f"there are no embedded heads for the base {base.name!r}: name some in place of 'heads'")
    return _heads(heads or DEFAULT_EMBEDDED, base, options)


def _heads(name: str | Path, base: Base, options: dict[str, Any]) -> Drafter:
    """Heads of whichever family their config says, or a draft model that was trained like them."""
    from medusa_heads.draft_model import drafting_in
    from medusa_heads.hub import family_of, heads_directory

    directory = heads_directory(name, revision=options.pop("revision", None))
    if drafting_in(directory) is not None:
        return _one("model", str(name), base, None, options)
    family = family_of(directory)
    drafter = getattr(import_module(f"decode.drafters.{family}"), FAMILIES[family])
    return _made(drafter.from_pretrained, (directory, base), options, f"heads of the family {family}")


def _made(make: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], what: str) -> Any:
    known = {p.name: str(p.annotation) for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"{what} has no setting {', '.join(unknown)}; there are {', '.join(known)}")
    check_kinds(what, options, known)
    return make(*arguments, **options)


def check_kinds(what: str, options: Mapping[str, Any], annotations: Mapping[str, str]) -> None:
    """Raises ConfigError for a number or text where an annotation, such as `int | None`, has no place for it."""
    for key, value in options.items():
        kinds = {kind.strip() for kind in annotations[key].split("|")}
        fits = {int: {"int", "float"}, float: {"float"}, str: {"str"}}.get(type(value))
        if fits is not None and not fits & kinds:
            raise ConfigError(f"{what}: {key} is {' or '.join(sorted(kinds - {'None'}))}, not {value!r}")
