"""What a run says while it trains: a bar, metrics.jsonl, and a tracker if asked."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from train.config import TrainingConfig


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: of the device where it is a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_memory(device: torch.device) -> str:
    return f"peak memory of the {'GPU' if device.type == 'cuda' else 'process'}: {peak_bytes(device) / 2**30:.2f} GiB"


@dataclass(frozen=True)
class Totals:
    """What a run, or a part of it, did."""

    steps: int = 0
    positions: int = 0
    """Targets of head 0."""
    tokens: int = 0
    """Read, prompts included."""
    seconds: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Totals) -> Totals:
        return Totals(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def summary(self) -> dict[str, float]:
        """The totals and their speeds; no time has none."""
        speeds = {
            f"{name}_per_second": getattr(self, name) / self.seconds if self.seconds else 0.0
            for name in ("positions", "tokens")
        }
        return {**asdict(self), **speeds}


class Meter:
    """Gathers figures over `log_every` steps and reports their means, over all processes.

    Args:
        total, done: steps of the run and those behind it.
        before: totals of the sessions behind it, as `totals` gave them to a checkpoint.
    """

    def __init__(self, accelerator: Accelerator, config: TrainingConfig, total: int, done: int, before: Totals):
        self.accelerator = accelerator
        self.config = config
        self.total = total
        self.done = done
        self.path: Path = config.run_directory / "metrics.jsonl"
        self._reported = before
        self._clear()

    def __enter__(self) -> Meter:
        if self.accelerator.is_main_process:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.config.tracker is not None:
            self.accelerator.init_trackers("medusa-heads", config={"config": self.config.to_yaml()})
        shown = self.accelerator.is_main_process
        self.bar = tqdm(total=self.total, initial=self.done, disable=not shown, unit="step", dynamic_ncols=True)
        self.clock = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()

    def _clear(self) -> None:
        self._figures: Tensor | None = None
        self._tokens = 0
        self._pending = 0

    def add(self, figures: Tensor, tokens: int) -> None:
        """Figures (K, 3) of one micro-batch (see `train.losses`) and the tokens of its rows, prompts included."""
        self._figures = figures.double() if self._figures is None else self._figures + figures
        self._tokens += tokens

    def step(self, step: int, epoch: float, learning_rate: float) -> None:
        """Ends step number `step` (1 for the first)."""
        self.bar.update()
        self._pending += 1
        if step % self.config.log_every and step != self.total:
            return
        figures, part = self._gather()
        loss, accuracy = (figures[:, :2] / figures[:, 2:].clamp_min(1)).T.tolist()
        self._reported += part
        self.clock += part.seconds
        self._clear()
        speeds = part.summary()
        row: dict[str, Any] = {
            "step": step,
            "epoch": round(epoch, 4),
            "loss": sum(loss) / len(loss),
            "learning_rate": learning_rate,
            "positions_per_second": speeds["positions_per_second"],
            "tokens_per_second": speeds["tokens_per_second"],
        }
        row |= {f"loss_head_{i}": x for i, x in enumerate(loss)}
        row |= {f"accuracy_head_{i}": x for i, x in enumerate(accuracy)}
        self.accelerator.log(row, step=step)
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            hits = " ".join(f"{x:.3f}" for x in accuracy)
            speed = "{positions_per_second:.0f} positions/s, {tokens_per_second:.0f} tokens/s".format(**speeds)
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, accuracy {hits}, {speed}")

    def _gather(self) -> tuple[Tensor, Totals]:
        """Figures (K, 3) and totals of the steps since the last report, over all processes."""
        assert self._figures is not None
        sums = torch.cat([self._figures.flatten(), self._figures.new_tensor([self._tokens])])
        sums = self.accelerator.reduce(sums.float(), "sum").cpu()
        figures, tokens = sums[:-1].reshape(-1, 3), round(float(sums[-1]))
        seconds = time.perf_counter() - self.clock
        return figures, Totals(self._pending, round(float(figures[0, 2])), tokens, seconds)

    def totals(self) -> Totals:
        """Of the whole run so far, its earlier sessions included. All processes ask together."""
        return self._reported + self._gather()[1] if self._pending else self._reported
