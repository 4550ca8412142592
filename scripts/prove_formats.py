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
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

HIDDEN, VOCAB, LAYERS, T = 32, 96, 8, 7
TOLERANCE = 1e-5
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Proof:
    """One format: the checkout that writes it, and how."""

    checkout: str
    build: Callable[[Path, Path], dict[str, Any]]
    """Writes `heads/` and `base/` below a directory with the project's own modules; returns what went in and came out,
    as tensors by name: `input_ids` or states, and `logits` (and `features`)."""


def randomise(module: Any) -> None:
    """Random weights, large enough that every part shows in logits of about one; norms around one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.12 if parameter.dim() > 1 else 0.1)
            if "norm" in name:
                parameter.add_(1.0)


def stub(name: str, path: Path | None = None, **content: Any) -> None:
    """A module or package in place of one that is not wanted here; with `path`, its real files stay importable."""
    module = types.ModuleType(name)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def no_tokenizer(module: Any) -> None:
    """Their models load a tokenizer that the outcome does not depend on."""
    module.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *a, **k: types.SimpleNamespace(pad_token_id=0))


def save_base(model: Any, out: Path) -> None:
    from safetensors.torch import save_file

    directory = out / "base"
    directory.mkdir()
    config = {**LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}
    (directory / "config.json").write_text(json.dumps(config))
    wanted = ("model.", "lm_head.")
    state = {
        k: v.detach().clone() for k, v in model.state_dict().items() if k.startswith(wanted) and "inv_freq" not in k
    }
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, T), generator=torch.Generator().manual_seed(seed))


# Medusa


def medusa_model(checkout: Path, heads: int, layers: int) -> Any:
    """The first project's model on a base of its own, either release."""
    sys.path.insert(0, str(checkout))
    module = importlib.import_module("medusa.model.medusa_model_legacy")
    no_tokenizer(module)
    from transformers import LlamaConfig

    base = module.KVLlamaForCausalLM(LlamaConfig(**LLAMA))
    model = module.MedusaModel(base, medusa_num_heads=heads, medusa_num_layers=layers).eval()
    randomise(model)
    return module, model


def build_medusa_v01(checkout: Path, out: Path) -> dict[str, Any]:
    module, model = medusa_model(checkout, heads=3, layers=2)
    config = module.MedusaConfig(medusa_num_heads=2, medusa_num_layers=2, base_model_name_or_path=str(out / "base"))
    config.save_pretrained(out / "heads")
    torch.save(model.medusa_head.state_dict(), out / "heads" / "medusa_lm_head.pt")
    save_base(model.base_model, out)
    return {"input_ids": ids(), "logits": model(input_ids=ids())}


def build_medusa_trainer(checkout: Path, out: Path) -> dict[str, Any]:
    from safetensors.torch import save_file

    module, model = medusa_model(checkout, heads=3, layers=1)
    config = module.MedusaConfig(medusa_num_heads=3, medusa_num_layers=1, base_model_name_or_path=str(out / "base"))
    config.save_pretrained(out / "heads")
    save_file(model.medusa_head.state_dict(), out / "heads" / "medusa_lm_head.safetensors")
    save_base(model.base_model, out)
    return {"input_ids": ids(), "logits": model(input_ids=ids())}


def build_medusa_merged(checkout: Path, out: Path) -> dict[str, Any]:
    sys.path.insert(0, str(checkout))
    module = importlib.import_module("medusa.model.medusa_model")
    no_tokenizer(module)
    from transformers import LlamaConfig

    config = LlamaConfig(**{**LLAMA, "medusa_num_heads": 3, "medusa_num_layers": 2})
    model = module.MedusaModelLlama(config).eval()
    randomise(model)
    model.save_pretrained(out / "heads")
    save_base(model, out)
    logits, _, _ = model(input_ids=ids(), medusa_forward=True, output_orig=True)
    return {"input_ids": ids(), "logits": logits}


def build_tgi(checkout: Path, out: Path, version: int) -> dict[str, Any]:
    """TGI's own layers over a file with its names; a process group of one."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    root = checkout / "server" / "text_generation_server"
    for name in ("", ".layers", ".utils"):
        stub(f"text_generation_server{name}", root.joinpath(*name.strip(".").split(".")) if name else root)
    stub("text_generation_server.utils.import_utils", SYSTEM="cpu")
    speculate = importlib.import_module("text_generation_server.utils.speculate")
    speculate.set_speculate(3)
    module = importlib.import_module("text_generation_server.layers.medusa")
    generator = torch.Generator().manual_seed(1)
    layers = 2 if version == 1 else 1
    tensors = {}
    for i in range(3):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.3
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=generator) * 0.1
        if version == 1:
            tensors[f"{i}.{layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    (out / "heads").mkdir()
    save_file(tensors, out / "heads" / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers, "base_model_name_or_path": str(out / "base")}
    (out / "heads" / "config.json").write_text(json.dumps(config))
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    randomise(base)
    save_base(base, out)
    head = base.lm_head.weight.data
    group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    class Weights:
        """What TGI's loader gives its layers, over the file and the base's projection."""

        process_group = group

        def __init__(self) -> None:
            self.routing: dict[str, str] = {}

        def get_tensor(self, name: str, **_: Any) -> torch.Tensor:
            if name == "lm_head.weight":
                return head
            with safe_open(self.routing[name], framework="pt") as file:
                return file.get_tensor(name)

        def get_sharded(self, name: str, dim: int) -> torch.Tensor:
            return self.get_tensor(name)

        def get_multi_weights_col(self, prefixes: Sequence[str], dim: int) -> torch.Tensor:
            return torch.cat([self.get_tensor(f"{prefix}.weight") for prefix in prefixes], dim)

        get_multi_weights = get_multi_weights_col

        def get_weights_col(self, prefix: str) -> torch.Tensor:
            return self.get_tensor(f"{prefix}.weight")

        get_weights = get_weights_col

    def gather(found: list[torch.Tensor], x: torch.Tensor, **_: Any) -> None:
        found[0].copy_(x)  # a group of one

    distributed: Any = torch.distributed
    distributed.all_gather = gather
    speculator = {"path": out / "heads", "model_paths": ["medusa_lm_head.safetensors"]}
    server = types.SimpleNamespace(speculator=speculator, quantize=None, tie_word_embeddings=False)
    x = torch.randn(T, HIDDEN, generator=generator)
    with torch.no_grad():
        if version == 1:
            _, logits = module.MedusaHeadV1.load(server, "lm_head", Weights())(x)
        else:
            _, logits = module.MedusaHeadV2(server, "lm_head", Weights())(x)
    return {"states": x, "logits": logits.transpose(0, 1)}


def build_modelopt(checkout: Path, out: Path) -> dict[str, Any]:
    sys.path.insert(0, str(checkout))
    speculative = importlib.import_module("modelopt.torch.speculative")
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    speculative.convert(model, mode=[("medusa", {"medusa_num_heads": 3, "medusa_num_layers": 1})])
    randomise(model)
    model.save_pretrained(out / "heads")
    save_base(model, out)
    with torch.no_grad():
        logits = model(input_ids=ids()).medusa_logits
    return {"input_ids": ids(), "logits": torch.stack(list(logits))}


# Hydra


def build_hydra(checkout: Path, out: Path, prefix: bool) -> dict[str, Any]:
    sys.path.insert(0, str(checkout))
    module = importlib.import_module("hydra.model.hydra_model")
    no_tokenizer(module)
    from transformers import LlamaConfig

    base = module.KVLlamaForCausalLM(LlamaConfig(**LLAMA))
    arch = "prefix-mlp" if prefix else "mlp"
    options = {"hydra_num_heads": 3, "hydra_num_layers": 3, "hydra_head_arch": arch, "grounded_heads": True}
    model = module.HydraModel(base, **options, base_model_name_or_path=str(out / "base")).eval()
    randomise(model)
    module.HydraConfig(**options, base_model_name_or_path=str(out / "base")).save_pretrained(out / "heads")
    torch.save(model.hydra_head.state_dict(), out / "heads" / "hydra_lm_head.pt")
    save_base(base, out)
    with torch.no_grad():
        states = base.model(input_ids=ids())[0]
        logits, _ = model.hydra_head(base_hidden_states=states, input_ids=ids())
    return {"input_ids": ids(), "logits": torch.stack(list(logits))}


# EAGLE


def plain_base(out: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    randomise(base)
    save_base(base, out)
    return base


def eagle_config(module: Any, **more: Any) -> Any:
    return module.EConfig(**{**LLAMA, "num_hidden_layers": 1, "rope_theta": 10000.0, **more})


def states_entering(base: Any, layers: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden = base.model(input_ids=ids(), output_hidden_states=True).hidden_states
    return torch.cat([hidden[i] for i in layers], -1)


def draft_vocabulary() -> torch.Tensor:
    return torch.arange(0, VOCAB, 3)


def set_vocabulary(model: Any) -> None:
    chosen = draft_vocabulary()
    model.d2t.copy_(chosen - torch.arange(len(chosen)))
    model.t2d.zero_()
    model.t2d[chosen] = True


def build_eagle1(checkout: Path, out: Path) -> dict[str, Any]:
    sys.path.insert(0, str(checkout))
    module = importlib.import_module("eagle.model.cnets1")
    base = plain_base(out)
    model = module.Model(eagle_config(module), bias=True).eval()
    model.tree_mask = None
    randomise(model)
    model.embed_tokens.weight.data.copy_(base.model.embed_tokens.weight.data)
    eagle_config(module).save_pretrained(out / "heads")
    torch.save(model.state_dict(), out / "heads" / "pytorch_model.bin")
    with torch.no_grad():
        states = base.model(input_ids=ids())[0][:, :-1]
        features = model(states, input_ids=ids()[:, 1:])
        return {"input_ids": ids(), "features": features, "logits": base.lm_head(features)}


def build_eagle3(checkout: Path, out: Path) -> dict[str, Any]:
    sys.path.insert(0, str(checkout))
    module = importlib.import_module("eagle.model.cnets")
    base = plain_base(out)
    config = eagle_config(module, draft_vocab_size=len(draft_vocabulary()))
    model = module.Model(config, bias=True).eval()
    model.tree_mask = None
    randomise(model)
    model.embed_tokens.weight.data.copy_(base.model.embed_tokens.weight.data)
    set_vocabulary(model)
    config.save_pretrained(out / "heads")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "embed_tokens.weight"}
    torch.save(state, out / "heads" / "pytorch_model.bin")
    with torch.no_grad():
        states = states_entering(base, (2, LAYERS // 2, LAYERS - 3))[:, :-1]
        features = model(states, input_ids=ids()[:, 1:])
        return {"input_ids": ids(), "features": features, "logits": model.lm_head(model.norm(features))}


def build_specforge(checkout: Path, out: Path) -> dict[str, Any]:
    for name in ("", ".modeling", ".modeling.draft"):
        stub(f"specforge{name}", checkout.joinpath("specforge", *name.strip(".").split(".")))
    stub("specforge.utils", print_with_rank=lambda *a, **k: None)
    stub("specforge.distributed", get_sp_ring_group=None, get_sp_ulysses_group=None)
    module = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    from transformers import LlamaConfig

    base = plain_base(out)
    one = {**LLAMA, "num_hidden_layers": 1, "draft_vocab_size": len(draft_vocabulary())}
    config = LlamaConfig(**one, architectures=["LlamaForCausalLMEagle3"])
    model = module.LlamaForCausalLMEagle3(config).eval()
    randomise(model)
    model.embed_tokens.weight.data.copy_(base.model.embed_tokens.weight.data)
    set_vocabulary(model)
    model.save_pretrained(out / "heads")
    with torch.no_grad():
        states = states_entering(base, (2, LAYERS // 2, LAYERS - 3))[:, :-1]
        embeddings = model.embed_input_ids(ids()[:, 1:])
        normed = model(states, embeddings)
        return {"input_ids": ids(), "logits": model.lm_head(normed)}


def build_speculators(checkout: Path, out: Path, norms: str | None, before: bool) -> dict[str, Any]:
    sys.path.insert(0, str(checkout / "src"))
    config_module = importlib.import_module("speculators.models.eagle3.config")
    core = importlib.import_module("speculators.models.eagle3.core")
    base_config = importlib.import_module("speculators.config")
    proposals = importlib.import_module("speculators.proposals.greedy")
    from transformers import LlamaConfig

    base = plain_base(out)
    layer = LlamaConfig(**{**LLAMA, "num_hidden_layers": 1}, head_dim=HIDDEN // 4)
    layer._attn_implementation = "eager"
    verifier = base_config.VerifierConfig(name_or_path=str(out / "base"), architectures=["LlamaForCausalLM"])
    config = config_module.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(draft_vocabulary()),
        norm_before_residual=before,
        norm_before_fc=norms == "joined",
        fc_norm=norms == "each",
        eagle_aux_hidden_state_layer_ids=[2, LAYERS // 2, LAYERS - 3],
        speculators_config=base_config.SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposals.GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    model = core.Eagle3DraftModel(config).eval()
    randomise(model)
    model.embed_tokens.weight.data.copy_(base.model.embed_tokens.weight.data)
    set_vocabulary(model)
    model.save_pretrained(out / "heads")
    heard: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _args, output: heard.append(output))
    with torch.no_grad():
        states = states_entering(base, (2, LAYERS // 2, LAYERS - 3))[:, :-1]
        documents = torch.zeros(1, T - 1, dtype=torch.long)
        positions = torch.arange(T - 1)[None]
        model(states, ids()[:, 1:], documents, position_ids=positions, ttt_steps=1)
    return {"input_ids": ids(), "logits": heard[0]}


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
