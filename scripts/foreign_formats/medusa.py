"""Tiny checkpoints of Medusa heads, written by the projects' own modules."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.foreign_formats.common import HIDDEN, LLAMA, VOCAB, T, ids, no_tokenizer, randomise, save_base, stub


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
