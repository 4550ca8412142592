"""From this project's heads to other projects' checkpoints: which targets there are, and how one is put in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_heads.config import EagleConfig, MedusaConfig
from medusa_heads.errors import HeadsError
from medusa_heads.formats import eagle, eagle3, medusa, read_foreign, speculators, vllm_medusa
from medusa_heads.formats.adapting import State, Written, check_shared
from medusa_heads.formats.checkpoint import CONFIG
from medusa_heads.placing import placed

if TYPE_CHECKING:
    from medusa_heads.base import Base


def _family(state: State) -> str:
    if isinstance(state.config, EagleConfig):
        return f"EAGLE-{state.config.version}"
    return "Medusa" if isinstance(state.config, MedusaConfig) else "Hydra"


Writer = Callable[[State, "Base | None", bool], Written]

WRITERS: Mapping[str, Mapping[str, Writer]] = {
    "vllm": {
        "Medusa": lambda state, base, all_rows: vllm_medusa.write(state, base),
        "EAGLE-1": lambda state, base, all_rows: eagle.write(state, base, all_rows, for_vllm=True),
        "EAGLE-3": lambda state, base, all_rows: eagle3.write_vllm(state, base),
    },
    "speculators": {"EAGLE-3": lambda state, base, all_rows: speculators.write(state, base)},
    "tgi": {"Medusa": medusa.write_tgi},
    "tensorrt-llm": {"Medusa": medusa.write_tensorrt},
    "eagle": {
        "EAGLE-1": lambda state, base, all_rows: eagle.write(state, base, all_rows, for_vllm=False),
        "EAGLE-3": lambda state, base, all_rows: eagle3.write(state, base),
    },
    "medusa": {"Medusa": medusa.write},
}
"""What can be written: target → family of heads → writer."""


def write_foreign(
    heads: Any, target: str, directory: Path, base: Base | None = None, all_rows: bool = False
) -> tuple[str, ...]:
    """Writes heads as another project's checkpoint, which appears whole or not at all, and returns what to know of it.

    What was written is read again before it is put in place and must give the heads back bit for bit (for a change
    that the format asks for: the changed heads).

    Args:
        heads: of any family.
        target: a key of `WRITERS`.
        base: the heads' own; needed where a format holds copies of its weights.
        all_rows: let heads that draft from chosen rows of the vocabulary draft from all, where a format has no choice.

    Raises:
        HeadsError: a target that cannot hold these heads, with the reason, or a base that is not theirs.
    """
    if target not in WRITERS:
        raise HeadsError(f"no format is called {target!r}; there are {', '.join(WRITERS)}")
    state = State.of(heads)
    check_shared(state, base)
    family = _family(state)
    if family not in WRITERS[target]:
        raise HeadsError(f"{target} serves {' and '.join(WRITERS[target])} heads; these are {family} heads")
    written = WRITERS[target][family](state, base, all_rows)
    with placed(directory, {CONFIG, written.file}) as scratch:
        (scratch / CONFIG).write_text(json.dumps(written.config, indent=2) + "\n", encoding="utf-8")
        _save(dict(written.tensors), scratch / written.file)
        _compare(read_foreign(scratch, base).tensors, written.expected)
    return written.notes


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        torch.save(tensors, path)


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError unless what was written reads as what was meant: a fault of this program, not of the user."""
    if found.keys() != expected.keys():
        raise RuntimeError(f"written heads read with other tensors: {sorted(found.keys() ^ expected.keys())}")
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise RuntimeError(f"written heads read with another {name}")
