"""What drafters that grow their trees (`decode.drafters.growth`) have in common: how they are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from decode.dynamic import DynamicTree, load_choice
from decode.tree import Tree
from medusa_heads.fetching import heads_directory

if TYPE_CHECKING:
    from medusa_heads.base import Base

D = TypeVar("D", bound="GrowingDrafter")


class GrowingDrafter(ABC):
    """Heads of one family and how far their trees may grow.

    Args:
        tree: limits of a dynamic tree, or a topology for every round.
        drawn: topology for rows whose children are drawn; default see `TreeChoice.of`.
    """

    heads_class: ClassVar[Any]

    @abstractmethod
    def __init__(self, heads: Any, base: Base, tree: DynamicTree | Tree, drawn: Tree | None = None): ...

    @classmethod
    def deepest(cls, heads: Any) -> int | None:
        """The deepest tree that heads can fill; None: there is no such bound."""
        return None

    @classmethod
    def from_pretrained(
        cls: type[D],
        name: str | Path,
        base: Base,
        *,
        tree: DynamicTree | Tree | None = None,
        drawn: Tree | None = None,
        depth: int | None = None,
        width: int | None = None,
        nodes: int | None = None,
        revision: str | None = None,
    ) -> D:
        """Heads by directory, embedded name or Hub id, with what was tuned for this machine (see `decode.profiles`), or
        else their own `tree.json`, unless another tree is given, or other limits of a dynamic one."""
        directory = heads_directory(name, revision=revision)
        heads = cls.heads_class.from_pretrained(directory, base=base)
        limits = {"depth": depth, "width": width, "nodes": nodes}
        choice = load_choice(directory, base, deepest=cls.deepest(heads), tree=tree, drawn=drawn, limits=limits)
        return cls(heads, base, choice.likeliest, choice.drawn)
