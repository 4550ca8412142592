"""What all Medusa checkpoints have in common, whatever they call it: blocks of a weight and a bias, and perhaps a
vocabulary projection for each head."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from medusa_heads.errors import HeadsError
from medusa_heads.formats.reading import expect_shape, refuse_leftovers


@dataclass(frozen=True)
class Naming:
    """Names of one format. `{head}` and `{layer}` stand for numbers from 0."""

    format: str
    weight: str
    bias: str
    projection: str
    """May hold `{layers}`: the number of blocks, where a head's projection follows them in one sequence."""

    def pattern(self, template: str) -> re.Pattern[str]:
        escaped = re.escape(template)
        for field in ("head", "layers", "layer"):
            escaped = escaped.replace(rf"\{{{field}\}}", rf"(?P<{field}>0|[1-9]\d{{0,3}})")
        return re.compile(escaped)

    def block_names(self, heads: int, layers: int) -> dict[str, str]:
        """Their names of all blocks' tensors → ours."""
        return {
            template.format(head=i, layer=j): f"heads.{i}.{j}.linear.{part}"
            for i in range(heads)
            for j in range(layers)
            for template, part in ((self.weight, "weight"), (self.bias, "bias"))
        }

    def projection_names(self, heads: int, layers: int) -> dict[str, str]:
        return {self.projection.format(head=i, layers=layers): f"lm_heads.{i}.weight" for i in range(heads)}


SEQUENCE = Naming(
    "Medusa names", "{head}.{layer}.linear.weight", "{head}.{layer}.linear.bias", "{head}.{layers}.weight"
)
"""Each head is one sequence of blocks and projection, as the first project names them."""


def prefixed(naming: Naming, prefix: str) -> Naming:
    return Naming(naming.format, prefix + naming.weight, prefix + naming.bias, prefix + naming.projection)


@dataclass(frozen=True)
class Outline:
    """What the names of a checkpoint's tensors tell."""

    heads: int
    layers: int
    own_projection: bool
    names: Mapping[str, str]
    """Theirs → ours, for all tensors."""
    shared_block: bool = False
    """Each head's blocks are one module, of which the file holds a single copy."""
    biased: bool = True


def outline(naming: Naming, names: Iterable[str], where: Path) -> Outline:
    """Counts heads and blocks by the tensors alone; a gap or a leftover is a HeadsError that names it.

    A head's blocks may be one module repeated (the first project makes them so); a file that drops such repetitions
    holds block 0 alone while the projection's number counts all of them.
    """
    rest = set(names)
    blocks: set[tuple[int, int]] = set()
    biases: set[tuple[int, int]] = set()
    projections: dict[int, int | None] = {}
    weight, bias, projection = (naming.pattern(t) for t in (naming.weight, naming.bias, naming.projection))
    for name in sorted(rest):
        if match := weight.fullmatch(name):
            blocks.add((int(match["head"]), int(match["layer"])))
        elif match := bias.fullmatch(name):
            biases.add((int(match["head"]), int(match["layer"])))
        elif match := projection.fullmatch(name):
            layers = match.groupdict().get("layers")
            projections[int(match["head"])] = None if layers is None else int(layers)
        else:
            continue
        rest.discard(name)
    refuse_leftovers(rest, naming.format, where)
    if not blocks:
        raise HeadsError(f"{where}: not {naming.format}: no block of a head")
    heads = 1 + max([head for head, _ in blocks | biases] + list(projections))
    stored = 1 + max(layer for _, layer in blocks | biases)
    ends = set(projections.values()) - {None}
    layers = ends.pop() if len(ends) == 1 else stored
    assert layers is not None
    shared = stored == 1 and layers > 1
    kept = stored if shared else layers
    expected = dict(naming.block_names(heads, kept))
    if not biases:
        expected = {theirs: ours for theirs, ours in expected.items() if ours.endswith("weight")}
    if projections:
        expected |= naming.projection_names(heads, layers)
    missing = sorted(set(expected) - set(names))
    refuse_leftovers(set(names) - set(expected), naming.format, where)
    if missing:
        raise HeadsError(f"{where}: {naming.format} of {heads} heads and {layers} blocks, but {missing[0]} is missing")
    return Outline(heads, layers, bool(projections), expected, shared, bool(biases))


def assemble(shape: Outline, tensors: Mapping[str, Tensor], where: Path) -> tuple[dict[str, Tensor], int, int | None]:
    """Our tensors from theirs, with the hidden size and, where heads own projections, their rows.

    Blocks without biases get biases of zero, which is the same function.
    """
    first = next(theirs for theirs, ours in shape.names.items() if ours.endswith("linear.weight"))
    hidden = tensors[first].shape[0]
    rows = None
    for theirs, ours in shape.names.items():
        if ours.startswith("lm_heads"):
            rows = rows or tensors[theirs].shape[0]
            expect_shape(tensors, theirs, (rows, hidden), where)
        else:
            expect_shape(tensors, theirs, (hidden, hidden) if ours.endswith("weight") else (hidden,), where)
    found = {ours: tensors[theirs] for theirs, ours in shape.names.items()}
    for i in range(shape.heads):
        for j in range(shape.layers):
            name = f"heads.{i}.{j}.linear"
            if shape.shared_block and j > 0:
                for part in ("weight", "bias") if shape.biased else ("weight",):
                    found[f"{name}.{part}"] = found[f"heads.{i}.0.linear.{part}"].clone()
            if not shape.biased:
                found[f"{name}.bias"] = torch.zeros(hidden, dtype=found[f"{name}.weight"].dtype)
    return found, hidden, rows
