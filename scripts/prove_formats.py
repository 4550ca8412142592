"""Is a format understood? Each project's own modules write a tiny checkpoint and compute; the heads read here must
compute the same, to 1e-5.

    python scripts/prove_formats.py --checkouts DIR --output docs/results/formats.json

DIR holds a checkout of each project, under the names of `PROOFS`. A part that needs other releases of transformers than
this project is run by the Python named for it (`--python medusa-v0.1=/path/to/python`); it imports nothing of this
project. No code of theirs is kept here: their classes are imported from the checkouts, filled with random numbers,
called, and saved as they save them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

# Run by whichever Python, from wherever: this directory's packages are found, behind all others of their names.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.foreign_formats.common import T
from scripts.foreign_formats.eagle import build_eagle1, build_eagle3, build_specforge, build_speculators
from scripts.foreign_formats.hydra import build_hydra
from scripts.foreign_formats.medusa import (
    build_medusa_merged,
    build_medusa_trainer,
    build_medusa_v01,
    build_modelopt,
    build_tgi,
)

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Proof:
    """One format: the checkout that writes it, and how."""

    checkout: str
    build: Callable[[Path, Path], dict[str, Any]]
    """Writes `heads/` and `base/` below a directory with the project's own modules; returns what went in and came out,
    as tensors by name: `input_ids` or states, and `logits` (and `features`)."""


PROOFS: dict[str, Proof] = {
    "medusa-v0.1": Proof("Medusa-v0.1", build_medusa_v01),
    "medusa-trainer": Proof("Medusa", build_medusa_trainer),
    "medusa-merged": Proof("Medusa", build_medusa_merged),
    "tgi-v1": Proof("text-generation-inference", lambda c, o: build_tgi(c, o, 1)),
    "tgi-v2": Proof("text-generation-inference", lambda c, o: build_tgi(c, o, 2)),
    "modelopt-medusa": Proof("TensorRT-Model-Optimizer", build_modelopt),
    "hydra": Proof("Hydra", lambda c, o: build_hydra(c, o, prefix=False)),
    "hydra++": Proof("Hydra", lambda c, o: build_hydra(c, o, prefix=True)),
    "eagle-1": Proof("EAGLE", build_eagle1),
    "eagle-3": Proof("EAGLE", build_eagle3),
    "specforge-eagle-3": Proof("SpecForge", build_specforge),
    "speculators-eagle-3": Proof("speculators", lambda c, o: build_speculators(c, o, None, before=False)),
    "speculators-norm-before-residual": Proof(
        "speculators", lambda c, o: build_speculators(c, o, "joined", before=True)
    ),
    "speculators-norms-each": Proof("speculators", lambda c, o: build_speculators(c, o, "each", before=False)),
}


# Here


def compare(directory: Path) -> dict[str, Any]:
    """Reads what was written and computes the same with this project's modules; the greatest differences."""
    from transformers import AutoModelForCausalLM

    from medusa_heads.base import Base
    from medusa_heads.families import load_heads
    from medusa_heads.formats import read_foreign

    model = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32)
    base = Base.from_model(model, None, name=str(directory / "base"))
    theirs = torch.load(directory / "io.pt", weights_only=True)
    reading = read_foreign(directory / "heads", base)
    heads: Any = load_heads(directory / "heads", base=base)
    with torch.no_grad():
        ours = computed(heads, base, theirs)
    errors = {name: float((ours[name] - theirs[name]).abs().max()) for name in ours if name in theirs}
    return {
        "taken_for": reading.format,
        "family": heads.config.family,
        "parameters": heads.num_parameters,
        "greatest_logit": round(float(theirs["logits"].abs().max()), 3),
        "greatest_difference": errors,
        "notes": [note.replace(str(directory), "DIR") for note in reading.notes],
        "passed": max(errors.values()) <= TOLERANCE,
    }


def computed(heads: Any, base: Any, theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits (and features) of this project's modules for the same inputs."""
    family = heads.config.family
    if "states" in theirs:
        return {"logits": heads.head_logits(heads(theirs["states"]), base)}
    given = theirs["input_ids"]
    if family == "medusa":
        states = base.forward(given).last_hidden_state
        return {"logits": heads.head_logits(heads(states), base)}
    if family == "hydra":
        states = base.forward(given).last_hidden_state
        if heads.prefix is not None:
            states = heads.prefix(states, torch.arange(T)[None])
        ahead = [torch.roll(base.embed(given), -(i + 1), dims=1) for i in range(heads.config.num_heads)]
        return {"logits": heads.head_logits(heads(states, torch.stack(ahead, dim=-2)), base)}
    output = base.forward(given[:, :-1], layers=heads.layers)
    features = heads(base.embed(given[:, 1:]), heads.fuse(output), torch.arange(T - 1)[None])
    return {"features": features, "logits": heads.head_logits(features, base)}


def prove(name: str, checkouts: Path, python: str) -> dict[str, Any]:
    """Builds in a process of its own, compares here."""
    from medusa_heads.errors import UserError

    proof = PROOFS[name]
    checkout = checkouts / proof.checkout
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, str(Path(__file__).resolve()), "--build", name, "--checkouts", str(checkouts)]
        run = subprocess.run([*command, "--output", scratch], capture_output=True, text=True, env={**os.environ})
        if run.returncode != 0:
            lines = (run.stderr.strip() or run.stdout.strip()).splitlines() or ["it said nothing"]
            return {"checkout": proof.checkout, "passed": False, "error": lines[-1]}
        try:
            return {"checkout": proof.checkout, "commit": commit(checkout), **compare(Path(scratch))}
        except UserError as error:
            return {"checkout": proof.checkout, "passed": False, "error": str(error)}


def commit(checkout: Path) -> str | None:
    """What a file COMMIT beside the sources says, else git."""
    if (checkout / "COMMIT").is_file():
        return (checkout / "COMMIT").read_text().strip()
    run = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or None


def build(name: str, checkouts: Path, out: Path) -> int:
    torch.manual_seed(0)
    made = PROOFS[name].build(checkouts / PROOFS[name].checkout, out)
    torch.save({key: value.detach() for key, value in made.items()}, out / "io.pt")
    return 0


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, help="directory with a checkout of each project")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    parser.add_argument("--only", nargs="+", choices=list(PROOFS), default=list(PROOFS))
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON", help="Python for one proof")
    parser.add_argument("--build", choices=list(PROOFS), help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    if options.build is not None:
        return build(options.build, options.checkouts, options.output)
    from decode.machine import versions

    pythons = dict(pair.split("=", 1) for pair in options.python)
    results = {}
    for name in options.only:
        results[name] = prove(name, options.checkouts.resolve(), pythons.get(name, sys.executable))
        shown = results[name].get("greatest_difference") or results[name].get("error")
        print(f"{name}: {'passed' if results[name]['passed'] else 'FAILED'} {shown}", flush=True)
    report = {
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "tolerance": TOLERANCE,
        "dtype": "float32",
        "proofs": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
