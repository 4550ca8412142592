"""Checkpoints that resume exactly, and stopping without losing work."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

from medusa_heads.errors import ConfigError
from train.config import TrainingConfig, build
from train.progress import Totals

if TYPE_CHECKING:
    from accelerate import Accelerator

RUN_KEYS = ("output", "log_every", "checkpoint_every", "keep_checkpoints", "resume", "tracker", "evaluation")
"""Settings that do not touch the course of training: they may differ between a checkpoint and the run it resumes."""


def _course(config: TrainingConfig) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(config).items() if key not in RUN_KEYS}


def checkpoints(run_directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(run_directory.glob("checkpoint-*[0-9]"))


def latest_checkpoint(run_directory: Path) -> Path | None:
    return found[-1] if (found := checkpoints(run_directory)) else None


def data_digest(rows: Iterable[tuple[str, int]], draft_ids: Tensor | None) -> str:
    """Identity of what a run trains on.

    Args:
        rows: id and supervised positions of each row, in the order in which steps are planned over them.
        draft_ids: (V,), the draft vocabulary; None for the whole one.
    """
    known = [list(rows), None if draft_ids is None else draft_ids.tolist()]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def save_checkpoint(accelerator: Accelerator, config: TrainingConfig, step: int, data: str, totals: Totals) -> Path:
    """Weights, optimizer, schedule, random states, step, the data's digest and what the run did so far.

    Written beside, then renamed.
    """
    target = config.run_directory / f"checkpoint-{step:07d}"
    partial = config.run_directory / f"partial-{step:07d}"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        run = {"step": step, "config": config.to_yaml(), "data": data, "totals": dataclasses.asdict(totals)}
        (partial / "run.json").write_text(json.dumps(run))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        for old in checkpoints(config.run_directory)[: -config.keep_checkpoints]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return target


def load_checkpoint(accelerator: Accelerator, path: Path, config: TrainingConfig, data: str) -> tuple[int, Totals]:
    """Restores a checkpoint. Returns the number of steps done, and what they came to: where the checkpoint is of a
    version that did not say, steps alone.

    Raises:
        ConfigError: the checkpoint was made with other settings, which the message names, or with other data. A setting
            that did not exist when it was made counts as its default; the digest of the data may be missing, too.
    """
    run = json.loads((path / "run.json").read_text())
    then, now = _course(build(TrainingConfig, yaml.safe_load(run["config"]))), _course(config)
    changed = sorted(key for key in now if then.get(key) != now[key])
    if changed:
        raise ConfigError(
            f"{path} was made with other settings of {', '.join(changed)}: give another output, or resume=false"
        )
    if run.get("data", data) != data:
        raise ConfigError(
            f"the data are others than those that {path} was made with: give another output, or resume=false"
        )
    accelerator.load_state(str(path))
    return int(run["step"]), Totals(**run.get("totals", {"steps": run["step"]}))


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a request that the loop answers at the end of its step.

    The second one interrupts at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def agreed(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked to stop; the same answer in all of them."""
        if accelerator.num_processes == 1:
            return self.asked
        asked = torch.tensor([float(self.asked)], device=accelerator.device)
        return bool(accelerator.reduce(asked, "sum").item())
