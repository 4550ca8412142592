"""Tiny checkpoints of Hydra heads, written by their project's own modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.foreign_formats.common import LLAMA, ids, no_tokenizer, randomise, save_base


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
