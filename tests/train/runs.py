"""Tiny training runs, in this process or launched, and what they leave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import train.train_heads as script
from tests.train.helpers import save_tiny_base, tiny_config, write_rows
from train import features
from train.config import TrainingConfig, build

REPOSITORY = Path(__file__).parents[2]


def make_place(directory, **states):
    """A tiny base, chat rows, and cached states of them in float32, as settings of `features` say."""
    save_tiny_base(directory / "base")
    write_rows(directory / "rows.jsonl")
    settings = {"directory": str(directory / "states"), "dtype": "float32", **states}
    (directory / "features.yaml").write_text(yaml.safe_dump(tiny_config(directory, features=settings)))
    assert features.main(["--config", str(directory / "features.yaml")]) == 0
    return directory


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
