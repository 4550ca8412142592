"""The model card: valid metadata, and the facts a reader needs."""

from __future__ import annotations

from huggingface_hub import ModelCard

from medusa_heads.card import model_card
from medusa_heads.config import HydraConfig, MedusaConfig

CONFIG = MedusaConfig(
    hidden_size=32,
    vocab_size=96,
    num_heads=3,
    num_layers=2,
    base_model_name_or_path="org/base",
    base_revision="abc123",
)


def test_the_metadata_say_what_the_hub_asks() -> None:
    data = ModelCard(model_card(CONFIG, 1000)).data
    assert data.library_name == "medusa-heads"
    assert data.base_model == "org/base"
    assert data.pipeline_tag == "text-generation"
    assert "speculative-decoding" in data.tags


def test_a_base_that_is_no_repository_is_not_linked() -> None:
    config = MedusaConfig(hidden_size=32, vocab_size=96, base_model_name_or_path="smollm2-135m")
    assert ModelCard(model_card(config, 1000)).data.base_model is None
    local = MedusaConfig(hidden_size=32, vocab_size=96, base_model_name_or_path="/home/someone/models/base")
    assert ModelCard(model_card(local, 1000)).data.base_model is None


def test_the_text_holds_the_facts() -> None:
    card = model_card(CONFIG, 12345, base_parameters=1_000_000, facts={"τ": 2.31}, repo="me/heads")
    text = ModelCard(card).text
    assert "3 Medusa heads of 2 residual blocks for `org/base` at revision `abc123`" in " ".join(text.split())
    assert "| parameters | 12,345 (1.23% of the base) |" in text
    assert "| τ | 2.31 |" in text
    assert "| vocabulary projection | the base's |" in text
    assert 'medusa-decode generate --base org/base --heads me/heads "' in text
    assert 'load_heads("me/heads", base=base)' in text


def test_the_projection_is_described() -> None:
    config = MedusaConfig(hidden_size=8, vocab_size=96, draft_vocab_size=40)
    assert "| vocabulary projection | 40 frequent rows of the base's |" in model_card(config, 1)
    own = MedusaConfig(hidden_size=8, vocab_size=96, own_projection=True)
    assert "| vocabulary projection | their own |" in model_card(own, 1)


def test_without_extras_nothing_is_made_up() -> None:
    text = model_card(MedusaConfig(hidden_size=8, vocab_size=96, num_layers=1), 7)
    assert "of the base)" not in text and "at revision" not in text and "None" not in text
    assert "of 1 residual block for" in text


def test_it_says_how_vllm_serves_heads_that_it_can_serve() -> None:
    text = ModelCard(model_card(CONFIG, 7, repo="me/heads")).text
    assert "medusa-decode convert me/heads heads-vllm --to vllm" in text
    assert "vllm serve org/base --speculative-config" in text
    assert '\'{"method": "medusa", "model": "heads-vllm", "num_speculative_tokens": 3}\'' in text
    local = MedusaConfig(hidden_size=8, vocab_size=96, base_model_name_or_path="smollm2-135m")
    assert "vllm serve BASE --spec" in model_card(local, 7), "an embedded name means nothing to vLLM"
    assert "enable_weights_track" not in text
    mapped = model_card(MedusaConfig(hidden_size=8, vocab_size=96, draft_vocab_size=40), 7)
    assert """4}' \\\n    --model-loader-extra-config '{"enable_weights_track": false}'\n```""" in mapped
    own_rows = MedusaConfig(hidden_size=8, vocab_size=96, own_projection=True, draft_vocab_size=9)
    assert "vllm" not in model_card(own_rows, 7).lower()
    assert "vllm" not in model_card(HydraConfig(hidden_size=8, vocab_size=96), 7).lower()
