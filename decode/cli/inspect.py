"""`medusa-decode inspect`: what a directory or repository of heads is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from decode.cli import common
from medusa_heads.embedded import DEFAULT_EMBEDDED, EMBEDDED
from medusa_heads.errors import HeadsError, UserError


def inspect(
    name: Annotated[
        str | None, typer.Argument(metavar="HEADS", help="Directory, Hub id or embedded name; default: the embedded.")
    ] = None,
    heads: common.HeadsOption = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="NAME", help="Compare sizes with this base, not the heads' own.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", metavar="REV", help="Of the heads on the Hub.")] = None,
    subfolder: Annotated[
        str | None, typer.Option("--subfolder", metavar="PATH", help="Within the heads' place.")
    ] = None,
    json_report: common.JsonOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Show format, family, parameters and share of the base, tree, metrics and base of trained heads. No weights of the
    base are loaded."""
    if name is not None and heads is not None:
        raise UserError(f"heads are named twice: {name} and --heads {heads}")
    report = describe(name or heads or DEFAULT_EMBEDDED, base, revision, subfolder)
    if json_report:
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        show(report)


def describe(
    name: str, base: str | None = None, revision: str | None = None, subfolder: str | None = None
) -> dict[str, Any]:
    """The report on heads. `share_of_base` is a fraction, null where the base's size cannot be found out, and then
    `base_error` says why."""
    from medusa_heads.families import heads_class
    from medusa_heads.hub import heads_directory, open_heads

    common.quiet_transformers()
    directory = heads_directory(name, revision=revision, subfolder=subfolder)
    reading = open_heads(directory, named=base)
    heads: Any = heads_class(reading.config).from_reading(reading)
    config = heads.config.to_dict()
    family = config.pop("head_family")
    base_name = base or heads.config.base_model_name_or_path
    base_parameters, base_error = None, None
    try:
        base_parameters = count_base_parameters(base_name, None if base else heads.config.base_revision)
    except UserError as error:
        base_error = str(error)
    return {
        "name": name,
        "path": str(directory),
        "format": reading.format,
        "notes": list(reading.notes),
        "family": family,
        "parameters": heads.num_parameters,
        "share_of_base": None if base_parameters is None else heads.num_parameters / base_parameters,
        "base": base_name,
        "base_parameters": base_parameters,
        "base_error": base_error,
        "dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        "config": config,
        "tree": describe_tree(directory),
        "metrics": read_json(directory / "metrics.json"),
    }


def describe_tree(directory: Path) -> dict[str, Any] | None:
    """The tree that decoding uses, or the limits within which it is grown; None where heads come without either."""
    if not (directory / "tree.json").is_file():
        return None
    from decode.dynamic import read_choice
    from decode.tree import Tree

    chosen = read_choice(directory).likeliest
    if isinstance(chosen, Tree):
        return {"size": chosen.size, "depth": chosen.depth, **chosen.to_dict()}
    return {"dynamic": chosen.to_dict()}


def read_json(path: Path) -> Any:
    """Contents of a JSON file, None where there is none."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HeadsError(f"{path} is not JSON: {error}") from error


def count_base_parameters(name: str | None, revision: str | None) -> int:
    """Parameters of a base, tied weights counted once, from its config alone. Raises `UserError` with the reason."""
    if name is None:
        raise UserError("the heads do not name their base: pass --base")
    if name in EMBEDDED:
        return EMBEDDED[name].num_parameters
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(f"cannot read the config of the base {name!r}: {first[0]}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def show(report: dict[str, Any]) -> None:
    """The report as a table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in lines(report):
        table.add_row(key, value)
    Console().print(table, markup=False)


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    config, share = report["config"], report["share_of_base"]
    rows = config["draft_vocab_size"]
    projection = "their own" if config["own_projection"] else "the base's"
    result = [
        ("heads", report["path"]),
        ("format", report["format"]),
        *(("", note) for note in report["notes"]),
        ("family", f"{report['family']}: {describe_family(report['family'], config)}"),
        ("parameters", f"{report['parameters']:,} ({report['dtype']})"),
        ("share of base", f"{share:.2%}" if share is not None else f"unknown: {report['base_error']}"),
        ("base", str(report["base"])),
        ("projection", f"{projection}, {'all rows' if rows is None else f'{rows} rows'}"),
        ("tree", tree_line(report["tree"])),
    ]
    return result + metric_lines(report["metrics"] or {})


def describe_family(family: str, config: dict[str, Any]) -> str:
    """What heads of a family consist of, in a few words."""
    if family == "medusa":
        return f"{config['num_heads']} heads of {config['num_layers']} blocks"
    if family == "hydra":
        prefix = " behind a prefix attention" if config["prefix_attention"] else ""
        return f"{config['num_heads']} heads of {config['num_layers']} layers{prefix}"
    if config["version"] == 1:
        return "version 1, one layer on the base's last state"
    return f"version 3, one layer on the states entering layers {', '.join(map(str, config['layers']))}"


def tree_line(tree: dict[str, Any] | None) -> str:
    if tree is None:
        return "none stored"
    if "dynamic" in tree:
        limits = tree["dynamic"]
        return f"grown each round: at most {limits['nodes']} nodes, depth {limits['depth']}, width {limits['width']}"
    return f"{tree['size']} nodes, depth {tree['depth']}"


def metric_lines(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """What training's evaluation on held-out text says in short; the rest is in the JSON report."""
    result = [
        ("acceptance length", f"{length:.2f} on held-out text, {law}")
        for law, length in metrics.get("tree_acceptance_length", {}).items()
    ]
    for law, measured in metrics.get("evaluation", {}).items():
        if isinstance(measured, dict) and "top_accuracy" in measured:
            top = " ".join(f"{row[0]:.2f}" for row in measured["top_accuracy"])
            result.append(("top-1 by head", f"{top} on held-out text, {law}"))
    return result
