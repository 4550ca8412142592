"""What tests of the training side share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from accelerate.state import AcceleratorState
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.train.loopback import LoopbackServer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Builds a tokenizer of single bytes (ids 0-255) and `marks` (256 and on); ChatML unless told otherwise."""

    def build(
        template: str = CHATML, marks: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"), eos: str = "<|im_end|>"
    ) -> PreTrainedTokenizerFast:
        vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
        return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, chat_template=template)

    return build


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    server = LoopbackServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    """accelerate keeps its state in a class: no run may see that of the one before."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
