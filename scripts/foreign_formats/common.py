"""What the builders share: sizes, random weights, stand-ins for what is not wanted, the base that heads are for."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

HIDDEN, VOCAB, LAYERS, T = 32, 96, 8, 7
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


def plain_base(out: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    randomise(base)
    save_base(base, out)
    return base
