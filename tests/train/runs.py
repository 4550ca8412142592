"""Tiny training runs, in this process or launched, and what they leave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import train.train_heads as script
from tests.train.helpers import tiny_config
from train.config import TrainingConfig, build

REPOSITORY = Path(__file__).parents[2]


def run(place, output, **changes):
    """Trains over `place`, by its cached states unless told otherwise. Returns the heads' directory."""
    AcceleratorState._reset_state(reset_partial_state=True)
    changes.setdefault("features", {"directory": str(place / "states"), "dtype": "float32"})
    config = build(TrainingConfig, tiny_config(place, output=str(output), **changes))
    script.train(config)
    return Path(config.output)


def weights(directory):
    return load_file(directory / "model.safetensors")


def logged(output):
    return [json.loads(line) for line in (Path(str(output) + ".run") / "metrics.jsonl").read_text().splitlines()]


def assert_same_weights(a, b):
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(v.float().abs().sum() > 0 for k, v in first.items() if k != "draft_ids")


def launch(arguments, processes):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name = "cpu.yaml" if processes == 1 else "cpu-2.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(REPOSITORY / "configs/accelerate" / name), "--main_process_port", str(port)]
    command += [str(REPOSITORY / "train/train_heads.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def repeated(directory, text, count=1):
    """A training set of one conversation, `count` times."""
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]
    rows = [{"id": f"r{i}", "temperature": 0.0, "finished": False, "messages": messages} for i in range(count)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
