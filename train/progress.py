"""What a run says while it trains: a bar, metrics.jsonl, and a tracker if asked."""

from __future__ import annotations

import json
import resource
import sys
import time
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


class Meter:
    """Gathers figures over `log_every` steps and reports their means, over all processes."""

    def __init__(self, accelerator: Accelerator, config: TrainingConfig, total: int, done: int):
        self.accelerator = accelerator
        self.config = config
        self.total = total
        self.done = done
        self.path: Path = config.run_directory / "metrics.jsonl"
        self.steps = 0
        self.positions = 0
        self.tokens = 0
        self.seconds = 0.0
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
        assert self._figures is not None
        sums = torch.cat([self._figures.flatten(), self._figures.new_tensor([self._tokens])])
        sums = self.accelerator.reduce(sums.float(), "sum").cpu()
        now = time.perf_counter()
        elapsed, self.clock = now - self.clock, now
        figures, tokens = sums[:-1].reshape(-1, 3), round(float(sums[-1]))
        loss, accuracy = (figures[:, :2] / figures[:, 2:].clamp_min(1)).T.tolist()
        positions = round(float(figures[0, 2]))
        self.steps += self._pending
        self.positions += positions
        self.tokens += tokens
        self.seconds += elapsed
        self._clear()
        row: dict[str, Any] = {
            "step": step,
            "epoch": round(epoch, 4),
            "loss": sum(loss) / len(loss),
            "learning_rate": learning_rate,
            "positions_per_second": positions / elapsed,
            "tokens_per_second": tokens / elapsed,
        }
        row |= {f"loss_head_{i}": x for i, x in enumerate(loss)}
        row |= {f"accuracy_head_{i}": x for i, x in enumerate(accuracy)}
        self.accelerator.log(row, step=step)
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            hits = " ".join(f"{x:.3f}" for x in accuracy)
            speed = f"{positions / elapsed:.0f} positions/s, {tokens / elapsed:.0f} tokens/s"
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, accuracy {hits}, {speed}")

    def summary(self) -> dict[str, float]:
        """Of this process's run: steps, positions (targets of head 0) and tokens read, and their speeds."""
        seconds = max(self.seconds, 1e-9)
        return {
            "steps": self.steps,
            "positions": self.positions,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "positions_per_second": self.positions / seconds,
            "tokens_per_second": self.tokens / seconds,
        }
