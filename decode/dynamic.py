"""How far the trees may grow that are grown anew each round, and what heads say about it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.tree import Tree, search_tree
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.hub import WEIGHTS

if TYPE_CHECKING:
    from medusa_heads.base import Base


@dataclass(frozen=True)
class DynamicTree:
    """How far a dynamic tree may grow. A confidence is the draft model's probability of a whole path."""

    depth: int
    """Steps of the draft model at most: the most tokens that a round can accept."""
    width: int
    """Nodes read in a step, and children looked at for each, at most."""
    nodes: int
    """Nodes to verify at most, the root included."""
    node_floor: float = 0.0
    """A node below this confidence is not worth verifying."""
    step_floor: float = 0.0
    """A step is not worth taking where the confidences of the nodes it would read sum to less."""

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} of a dynamic tree must be a positive integer, not {value!r}")
        for name, top in (("node_floor", 1.0), ("step_floor", math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= top:
                raise ConfigError(f"{name} of a dynamic tree must be a number from 0 on, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DynamicTree:
        """Raises ConfigError for unknown and missing keys."""
        try:
            return cls(**data)
        except TypeError:
            raise ConfigError(
                f"a dynamic tree has depth, width, nodes and may have node_floor, step_floor; not {data!r}"
            ) from None


DEFAULT = DynamicTree(depth=5, width=4, nodes=12)
"""For heads that say nothing."""
DRAWN_RATES = (0.45, 0.12, 0.06, 0.04)
"""How often the first, second, … drawn child of a node is kept, given that the node is: assumed, not measured. Where
nothing was measured, they decide the topology of drawn trees, and that of any tree for Medusa heads that come without
one. Only speed depends on them: any tree leaves the text its law. `medusa-decode tune --sampled` puts measured rates in
their place. (The embedded Medusa heads' at T = 1, first depth: 0.25, 0.07, 0.04, 0.04, from
docs/results/drafting_by_temperature.json; EAGLE heads have better first guesses.)"""


@dataclass(frozen=True)
class TreeChoice:
    """The trees of a drafter that grows them."""

    likeliest: DynamicTree | Tree
    """Of rows whose children are the likeliest tokens: limits, or one topology for every round."""
    drawn: Tree
    """Of rows whose children are drawn: one topology, since none may depend on what is drawn (docs/eagle.md)."""

    @classmethod
    def of(cls, tree: DynamicTree | Tree, drawn: Tree | None = None) -> TreeChoice:
        """Without a topology for drawn children: the given one, or the best within the limits by `DRAWN_RATES`."""
        if drawn is None:
            drawn = tree if isinstance(tree, Tree) else search_tree([DRAWN_RATES] * tree.depth, tree.nodes)
        return cls(tree, drawn)

    @property
    def depth(self) -> int:
        """The most steps of a round."""
        return max(self.likeliest.depth, self.drawn.depth)


def read_choice(directory: Path, deepest: int | None = None) -> TreeChoice:
    """What heads were saved with: `tree.json` with limits (`dynamic`), a topology (`tree`), or both, of which the
    topology then serves drawn children; the defaults, not deeper than `deepest`, where there is no such file."""
    path = directory / "tree.json"
    if not path.is_file():
        return TreeChoice.of(replace(DEFAULT, depth=min(DEFAULT.depth, deepest or DEFAULT.depth)))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        tree = Tree.from_dict(data["tree"]) if "tree" in data else None
        if "dynamic" not in data:
            return TreeChoice.of(Tree.from_dict(data["tree"]))
        return TreeChoice.of(DynamicTree.from_dict(data["dynamic"]), tree)
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise HeadsError(f"{path} holds no tree: {error}") from None


def tuned_choice(directory: Path, base: Base, deepest: int | None = None) -> TreeChoice:
    """The choice of heads (see `read_choice`) with what was tuned on this machine in its place: limits for the
    likeliest children, a topology for drawn ones (`medusa-decode tune`, and the same with `--sampled`). Where limits
    alone were tuned, drawn trees have as few nodes: what a node costs here does not depend on how it was chosen."""
    from decode.profiles import read_profile

    choice = read_choice(directory, deepest)
    if not (directory / WEIGHTS).is_file():  # profiles go by this project's own files; a foreign checkpoint has none
        return choice
    limits, drawn = read_profile(directory, base), read_profile(directory, base, drawn=True)
    if isinstance(limits, Tree):  # where versions before this one kept drawn trees
        limits, drawn = None, limits if drawn is None else drawn
    if not isinstance(drawn, Tree):
        drawn = choice.drawn if limits is None else choice.drawn.pruned(limits.nodes)
    return TreeChoice(choice.likeliest if limits is None else limits, drawn)


def load_choice(
    directory: Path,
    base: Base,
    *,
    deepest: int | None = None,
    tree: DynamicTree | Tree | None = None,
    drawn: Tree | None = None,
    limits: Mapping[str, Any],
) -> TreeChoice:
    """What to draft with: what was tuned or saved, unless another tree is given, or other limits by name.

    Raises ConfigError for limits beside a tree, and for ones that are none.
    """
    given = {name: value for name, value in limits.items() if value is not None}
    if tree is not None:
        if given:
            raise ConfigError(f"{', '.join(sorted(given))} and a tree exclude each other")
        return TreeChoice.of(tree, drawn)
    choice = tuned_choice(directory, base, deepest)
    if given:
        start = choice.likeliest if isinstance(choice.likeliest, DynamicTree) else DEFAULT
        return TreeChoice.of(replace(start, **given), drawn)
    return TreeChoice(choice.likeliest, drawn or choice.drawn)
