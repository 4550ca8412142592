"""Quantised bases, where their library is installed: decoded by trees, they say what their own `generate` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from decode import speculate
from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.medusa import MedusaHeads
from medusa_heads.prepack import PackedLinear, is_plain
from tests.conftest import GROUPED, tiny_tokenizer
from tests.decode.oracle import Oracle

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]
TREE = Tree.from_rank_paths([(0,), (1,), (0, 0)])


def bitsandbytes(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import TorchAoConfig

    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
KINDS: dict[str, Callable[[], Any]] = {
    "bitsandbytes, 4 bits": lambda: bitsandbytes(**NF4),
    "bitsandbytes, 4 bits, the projection too": lambda: bitsandbytes(**NF4, llm_int8_skip_modules=[]),
    "bitsandbytes, 8 bits": lambda: bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "torchao, 8 bits": torchao,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64 numbers, the least that bitsandbytes packs."""
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes: Any = {**GROUPED, "hidden_size": 64, "intermediate_size": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3, attention_bias=True)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(params=sorted(KINDS))
def base(request: pytest.FixtureRequest, directory: Path) -> Base:
    config = KINDS[request.param]()
    base = Base.load(str(directory), dtype="float32", device="cpu", quantization_config=config)
    base.eos_token_ids = ()
    return base


def greedy(base: Base, count: int) -> list[int]:
    """The quantised model's own `generate`."""
    ids = torch.tensor([PROMPT])
    output = base.model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=2)
    return output[0, len(PROMPT) :].tolist()


def quantised_layers(model: Any) -> int:
    return sum(hasattr(m, "weight") and m.weight is not None and m.weight.dim() == 2 and not is_plain(m.weight)
               for m in model.modules() if not isinstance(m, PackedLinear | nn.Embedding))  # fmt: skip


def test_quantised_layers_stay_and_plain_ones_are_packed(base: Base) -> None:
    assert quantised_layers(base.model.get_decoder()) == 2 * 7, "all linear layers of both blocks"
    assert isinstance(base._projection, PackedLinear) == (quantised_layers(base.model) == 2 * 7)


def test_greedy_text_is_the_quantised_models_own(base: Base) -> None:
    text = greedy(base, 40)
    decoder = Decoder(base, Oracle([PROMPT + text], right=0.8))
    result = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=30))
    assert result.token_ids == text[:30]
    assert sum(n * rounds for n, rounds in enumerate(result.stats.acceptance_histogram)) >= 8
    assert Decoder(base).generate(PROMPT, GenerationSettings(max_new_tokens=30)).token_ids == text[:30]


def test_the_projection_is_unpacked_for_heads(base: Base) -> None:
    assert base.vocab_size == 96 and base.dtype == torch.float32 and base.device.type == "cpu"
    states = base.forward(torch.tensor([PROMPT])).last_hidden_state[0]
    logits = base.project(states)
    # bitsandbytes' CPU kernel rounds what it is given to bfloat16
    rounding = 1e-3 if isinstance(base._projection, PackedLinear) else 2.0**-8 * float(logits.abs().max())
    torch.testing.assert_close(states @ base.projection_weight.T, logits, atol=rounding, rtol=0.0)
    ids = torch.tensor([7, 3, 90, 41])
    rows = base.project_rows(states, ids)
    torch.testing.assert_close(rows, logits[:, ids], atol=rounding, rtol=0.0)
    heads = MedusaHeads.for_base(base, 2, 1, draft_ids=ids)
    drafted = MedusaDrafter(heads, base, TREE).fill(states[-1:], torch.tensor([5]))
    best = ids[rows[-1].argsort(descending=True)]
    assert drafted[0].tolist() == [5, best[0], best[0], best[1]]


def test_within_generate(base: Base) -> None:
    """A quantised model as `from_pretrained` gives it, borrowed for a call."""
    heads = MedusaHeads.for_base(base, 2)
    model = base.model
    output = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, custom_generate=speculate(heads, tree=TREE), eos_token_id=None
    )
    assert output[0, len(PROMPT) :].tolist() == greedy(base, 20)
