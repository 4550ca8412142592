"""The base behind its interface: logits, states, tree passes and fingerprints of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CohereConfig, DynamicCache, GraniteConfig, LlamaModel, OPTConfig

from medusa_heads.attention import FOLDED, register
from medusa_heads.base import Base
from medusa_heads.config import MedusaConfig
from medusa_heads.errors import ConfigError, UnsupportedModelError
from tests.conftest import FAMILIES, GROUPED, VOCAB, tiny_base, tiny_model, tiny_tokenizer

SCALED = {
    "cohere": lambda: CohereConfig(**GROUPED, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**GROUPED, logits_scaling=3.0, embedding_multiplier=2.0),
}
IDS = torch.tensor([[5, 17, 40, 8, 61, 33, 12, 70, 21], [9, 2, 77, 30, 31, 32, 8, 8, 50]])


def scaled_model(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SCALED[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.5)
    return model


def perturb_vectors(model: Any) -> Any:
    """Norms and biases away from their ones and zeros, as in a trained model."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *SCALED])
def test_projection_of_the_last_states_equals_the_models_logits(family: str) -> None:
    model = perturb_vectors(scaled_model(family) if family in SCALED else tiny_model(family))
    base = Base.from_model(model, None)
    with torch.no_grad():
        logits = model(IDS).logits
    states = base.forward(IDS).last_hidden_state
    assert states.shape == (2, 9, base.hidden_size)
    torch.testing.assert_close(base.project(states), logits, rtol=1e-5, atol=1e-5)
    rows = torch.tensor([71, 0, 3, VOCAB - 1])
    torch.testing.assert_close(base.project_rows(states, rows), logits[..., rows], rtol=1e-4, atol=1e-4)
    assert logits.abs().max() > 1.0, "small logits would hide a missing scale or cap"


def test_projection_keeps_the_dtype_of_the_base() -> None:
    base = Base.from_model(tiny_model("gemma2").to(torch.bfloat16))
    states = base.forward(IDS).last_hidden_state
    assert base.dtype == states.dtype == base.project(states).dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(base.project(states), base.model(IDS).logits)


def decoder_layers(base: Base) -> nn.ModuleList:
    found = [m for m in base.model.modules() if isinstance(m, nn.ModuleList) and len(m) == base.num_layers]
    return found[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3", "phi"])
def test_chosen_states_are_those_that_enter_the_layers(family: str) -> None:
    base = tiny_base(family)
    entering: dict[int, Tensor] = {}
    for i, layer in enumerate(decoder_layers(base)):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: entering.__setitem__(i, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
    out = base.forward(IDS, layers=(1, 0))
    assert len(out.layer_states) == 2
    assert torch.equal(out.layer_states[0], entering[1]), "in the order they were asked for"
    assert torch.equal(out.layer_states[1], entering[0])
    assert not torch.equal(entering[0], entering[1])
    assert base.forward(IDS).layer_states == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_either_side_leaves_the_states_alone(family: str) -> None:
    base = tiny_base(family)
    short = IDS[1, :5]
    alone = base.forward(short[None]).last_hidden_state[0]
    for left in (True, False):
        rows = torch.zeros(2, 9, dtype=torch.long)
        mask = torch.zeros(2, 9, dtype=torch.long)
        rows[0], mask[0] = IDS[0], 1
        place = slice(4, 9) if left else slice(0, 5)
        rows[1, place], mask[1, place] = short, 1
        states = base.forward(rows, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(states[1, place], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[0], base.forward(IDS[:1]).last_hidden_state[0], rtol=1e-4, atol=1e-4)


PARENTS = (-1, 0, 0, 1, 1, 2)
DEPTHS = (0, 1, 1, 2, 2, 2)


def path_to(node: int) -> list[int]:
    return [*path_to(PARENTS[node]), node] if node else [0]


def tree_states(base: Base, tokens: Tensor) -> Tensor:
    """States of the tree of `tokens` (B, 6) behind the prompts `IDS`, in one pass."""
    batch, length = IDS.shape
    cache = DynamicCache()
    base.forward(IDS, cache=cache)
    ancestors = torch.zeros(6, 6, dtype=torch.bool)
    for node in range(6):
        ancestors[node, path_to(node)] = True
    visible = torch.cat((torch.ones(6, length, dtype=torch.bool), ancestors), dim=1).expand(batch, 6, length + 6)
    positions = (length + torch.tensor(DEPTHS)).expand(batch, 6)
    keys = torch.cat((torch.arange(length).expand(batch, length), positions), dim=1)
    return base.forward(
        tokens, position_ids=positions, attention_mask=visible, key_positions=keys, cache=cache
    ).last_hidden_state


@pytest.mark.parametrize("attention", ["sdpa", "eager", FOLDED])
@pytest.mark.parametrize("family", [*FAMILIES, *SCALED])
def test_a_tree_in_one_pass_equals_its_paths_one_by_one(family: str, attention: str) -> None:
    register()
    model = scaled_model(family) if family in SCALED else tiny_model(family)
    model.set_attn_implementation("eager" if family == "gemma2" else attention)
    base = Base.from_model(model)
    tokens = torch.tensor([[3, 11, 12, 13, 14, 15], [60, 61, 62, 63, 64, 65]])
    states = tree_states(base, tokens)
    for leaf in (3, 4, 5):
        path = path_to(leaf)
        plain = base.forward(torch.cat((IDS, tokens[:, path]), dim=1)).last_hidden_state[:, -3:]
        torch.testing.assert_close(states[:, path], plain, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_a_window_needs_the_positions_of_the_keys(family: str) -> None:
    base = tiny_base(family)
    with pytest.raises(ValueError, match="key_positions"):
        base.forward(IDS, position_ids=torch.arange(9).expand(2, 9), attention_mask=torch.ones(2, 9, 9).bool())


def test_the_base_is_frozen() -> None:
    model = tiny_model().train()
    base = Base.from_model(model)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert not base.forward(IDS).last_hidden_state.requires_grad


def test_tied_weights_are_counted_once_and_shared() -> None:
    tied, untied = tiny_base("llama"), Base.from_model(tiny_model("llama-untied-biased"))
    assert tied.num_parameters == sum(p.numel() for p in tied.model.parameters())
    assert tied.projection_weight.data_ptr() == tied.model.get_input_embeddings().weight.data_ptr()
    assert untied.projection_weight.data_ptr() != untied.model.get_input_embeddings().weight.data_ptr()
    assert torch.equal(tied.embed(IDS), tied.model.get_input_embeddings().weight[IDS])
    assert tied.num_parameters == VOCAB * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32) + 32


def test_a_biased_projection_is_used_whole_and_by_rows() -> None:
    base = Base.from_model(perturb_vectors(tiny_model("phi")))
    assert base.projection_bias is not None and base.projection_bias.abs().max() > 0.1
    assert tiny_base("llama").projection_bias is None
    base.prepack()
    ids = torch.tensor([4, 90])
    states = base.forward(IDS).last_hidden_state
    torch.testing.assert_close(base.project_rows(states, ids), base.project(states)[..., ids], rtol=1e-4, atol=1e-4)


def test_a_padded_vocabulary_keeps_its_rows() -> None:
    """More rows in the projection than the tokenizer has tokens, as many published models have."""
    config = FAMILIES["llama"]()
    config.vocab_size = 128
    base = Base.from_model(AutoModelForCausalLM.from_config(config), tiny_tokenizer())
    assert base.vocab_size == 128 == base.project(base.forward(IDS).last_hidden_state).shape[-1]
    assert base.fingerprint()["vocab_size"] == 128 and len(base.tokenizer) == VOCAB


def test_sizes_come_from_the_config() -> None:
    base = tiny_base("gpt2")
    assert (base.hidden_size, base.num_layers, base.max_positions, base.vocab_size) == (32, 2, 256, VOCAB)
    assert tiny_base("qwen3").config.head_dim * 4 != tiny_base("qwen3").hidden_size


def test_every_eos_id_counts() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [2, 7]
    assert Base.from_model(model).eos_token_ids == (2, 7)
    model = tiny_model()
    model.generation_config.eos_token_id = None
    assert Base.from_model(model).eos_token_ids == (2,), "the model's own config"
    model.config.eos_token_id = None
    assert Base.from_model(model).eos_token_ids == ()
    assert Base.from_model(model, tiny_tokenizer()).eos_token_ids == (2,), "the tokenizer's"


def test_the_fingerprint_is_what_heads_remember() -> None:
    base = tiny_base("qwen2")
    assert base.fingerprint() == {
        "base_model_name_or_path": "tiny-qwen2",
        "base_revision": None,
        "hidden_size": 32,
        "vocab_size": VOCAB,
        "tokenizer_hash": base.tokenizer_hash,
        "weights_hash": base.weights_hash,
    }
    MedusaConfig(**base.fingerprint())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi", "gemma3"])
def test_the_weights_hash_survives_dtype_and_packing_but_tells_models_apart(family: str) -> None:
    ours = Base.from_model(perturb_vectors(tiny_model(family))).weights_hash
    assert Base.from_model(perturb_vectors(tiny_model(family)).to(torch.bfloat16)).weights_hash == ours
    assert Base.from_model(perturb_vectors(tiny_model(family)).to(torch.bfloat16).float()).weights_hash == ours
    assert Base.from_model(perturb_vectors(tiny_model(family)), prepack=True).weights_hash == ours
    other = perturb_vectors(tiny_model(family))
    with torch.no_grad():
        norm = next(p for n, p in other.named_parameters() if "norm" in n.lower() or "ln_" in n)
        norm[0] += 0.1
    assert Base.from_model(other).weights_hash != ours


def test_the_tokenizer_hash_tells_vocabularies_apart() -> None:
    assert tiny_base().tokenizer_hash == tiny_base("gpt2").tokenizer_hash
    assert Base.from_model(tiny_model()).tokenizer_hash is None
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|tool|>"])
    assert Base.from_model(tiny_model(), tokenizer).tokenizer_hash != tiny_base().tokenizer_hash


def test_a_chat_is_rendered_by_the_bases_own_template() -> None:
    base = tiny_base()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    rendered = base.render_chat(messages, add_generation_prompt=False)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert base.tokenizer.decode(rendered) == text
    opened = base.render_chat(messages[:1])
    assert base.tokenizer.decode(opened) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered[: len(opened)] == opened, "what decoding is given is how training's text begins"
    assert all(isinstance(token, int) for token in rendered)


def test_a_chat_without_a_template_is_an_error() -> None:
    with pytest.raises(ConfigError, match="without a tokenizer"):
        Base.from_model(tiny_model(), name="bare").render_chat([{"role": "user", "content": "Hi"}])
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="'untemplated' has no chat template"):
        Base.from_model(tiny_model(), tokenizer, name="untemplated").render_chat([{"role": "user", "content": "Hi"}])


def test_models_without_a_usable_projection_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no output embeddings"):
        Base.from_model(LlamaModel(FAMILIES["llama"]()))
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(UnsupportedModelError, match=r"16 features, not from its hidden size 32"):
        Base.from_model(AutoModelForCausalLM.from_config(config))


def test_layers_that_read_tokens_in_order_are_refused_with_the_reason() -> None:
    model = tiny_model()
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match=r"kind linear_attention: .* branches of a tree"):
        Base.from_model(model)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2", "gemma", "gemma3", "mistral-window"])
def test_the_first_layers_are_shared_and_compute_what_they_do_in_the_base(family: str) -> None:
    base = tiny_base(family)
    part = base.first_layers(1)
    ids = torch.tensor([[5, 9, 31, 8, 77, 12, 60, 3]])
    entering = base.forward(ids, layers=[1]).layer_states[0]
    children = dict(base.model.get_decoder().named_children())
    norm = next(children[name] for name in ("norm", "ln_f", "final_layer_norm") if name in children)
    assert torch.allclose(part.forward(ids).last_hidden_state, norm(entering), atol=1e-6)
    assert part.num_layers == 1 and part.num_parameters < base.num_parameters
    assert torch.allclose(base.project(base.forward(ids).last_hidden_state), base.model(ids).logits, atol=1e-5)
    with pytest.raises(ConfigError, match="not a part of them"):
        base.first_layers(base.num_layers)
