"""`medusa-decode convert`: heads of any known format as another project's checkpoint, or as this project's own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decode.cli import common
from medusa_heads.errors import BaseNeeded, HeadsError

if TYPE_CHECKING:
    from medusa_heads.base import Base


class Target(str, Enum):
    """What can be written; `heads` is this project's own layout."""

    vllm = "vllm"
    speculators = "speculators"
    tgi = "tgi"
    tensorrt_llm = "tensorrt-llm"
    eagle = "eagle"
    medusa = "medusa"
    heads = "heads"


@dataclass(frozen=True)
class Conversion:
    """What was done; the report of `--json`."""

    heads: str
    taken_for: str
    target: str
    path: str
    family: str
    parameters: int
    notes: tuple[str, ...]


def convert(
    heads: Annotated[str, typer.Argument(metavar="HEADS", help="Directory, Hub id or embedded name.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; replaced if it holds the same.")],
    target: Annotated[Target, typer.Option("--to", help="Format to write.")],
    base: common.BaseOption = None,
    all_rows: Annotated[
        bool,
        typer.Option("--all-rows", help="Where a format has no draft vocabulary, draft from the whole one instead."),
    ] = False,
    revision: Annotated[str | None, typer.Option("--revision", metavar="REV", help="Of the heads on the Hub.")] = None,
    subfolder: Annotated[
        str | None, typer.Option("--subfolder", metavar="PATH", help="Within the heads' place.")
    ] = None,
    json_report: common.JsonOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Write trained heads in the format of another project: vLLM, speculators, TGI, TensorRT-LLM, EAGLE, Medusa.

    The base is loaded where a format holds copies of its weights. What is written is read again and compared."""
    from medusa_heads.hub import heads_directory

    common.quiet_transformers()
    source = heads_directory(heads, revision=revision, subfolder=subfolder)
    if directory.exists() and directory.resolve() == source.resolve():
        raise HeadsError(f"{directory} is where the heads lie: write them elsewhere")
    loaded = None if base is None else load_base(base, None)
    try:
        report = run(heads, source, target.value, directory, loaded, all_rows)
    except BaseNeeded:
        if loaded is not None:
            raise
        report = run(heads, source, target.value, directory, load_named_base(source), all_rows)
    if json_report:
        typer.echo(json.dumps(asdict(report), ensure_ascii=False))
    else:
        show(report)


def run(heads: str, source: Path, target: str, directory: Path, base: Base | None, all_rows: bool) -> Conversion:
    """Reads, writes and says what was done. Raises BaseNeeded where it cannot go on without the base."""
    from medusa_heads.families import heads_class
    from medusa_heads.formats.writing import write_foreign
    from medusa_heads.hub import EXTRAS, open_heads

    reading = open_heads(source, base)
    module: Any = heads_class(reading.config).from_reading(reading)
    extras = {name: (source / name).read_text(encoding="utf-8") for name in EXTRAS if (source / name).is_file()}
    if target == Target.heads.value:
        module.save_pretrained(directory, dtype=None, extras=extras)
        notes = reading.notes
    else:
        notes = (*reading.notes, *write_foreign(module, target, directory, base, all_rows))
        if "tree.json" in extras:
            notes += ("the heads' tree stays behind: engines draft chains or trees of their own",)
    family = reading.config.family
    return Conversion(heads, reading.format, target, str(directory), family, module.num_parameters, notes)


def load_named_base(source: Path) -> Base:
    """The base that heads name. Raises BaseNeeded if they name none."""
    from medusa_heads.hub import base_of

    name, revision = base_of(source)
    if name is None:
        raise BaseNeeded("this conversion needs the base, and the heads do not name it: pass --base")
    return load_base(name, revision)


def load_base(name: str, revision: str | None) -> Base:
    """A base in its own dtype, whose weights are copied from."""
    from medusa_heads.base import Base

    with common.notices_on_stderr():
        return Base.load(name, revision=revision, prepack=False)


def show(report: Conversion) -> None:
    """The report for people."""
    typer.echo(f"{report.heads} ({report.taken_for}, {report.parameters:,} parameters) written for {report.target}")
    typer.echo(f"  {report.path}")
    for note in report.notes:
        typer.echo(f"  note: {note}")
