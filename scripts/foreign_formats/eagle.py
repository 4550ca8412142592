"""Tiny checkpoints of EAGLE heads, written by the projects' own modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.foreign_formats.common import HIDDEN, LAYERS, LLAMA, VOCAB, T, ids, plain_base, randomise, stub


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
