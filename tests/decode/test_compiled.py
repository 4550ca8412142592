"""A compiled base decodes as it did, from few graphs, whatever the lengths of its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.engine import Decoder
from decode.settings import GenerationSettings
from medusa_heads.attention import FOLDED, register
from medusa_heads.base import Base
from medusa_heads.errors import UnsupportedModelError
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer
from tests.decode.oracle import Oracle

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


class Graphs:
    """A backend of `torch.compile` that runs each graph as it is, and notes it with the sizes of its calls."""

    def __init__(self) -> None:
        self.count = 0
        self.sizes: set[tuple[Any, ...]] = set()
        """Graph and sizes of every call: on a GPU each would be a recording."""

    def __call__(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        number = self.count
        self.count += 1

        def run(*inputs: Any) -> Any:
            sizes = (tuple(x.shape) if isinstance(x, Tensor) else x for x in inputs)
            self.sizes.add((number, *sizes))
            return module(*inputs)

        return run


def packed_base() -> Base:
    """As `Base.load` prepares it."""
    base = tiny_base()
    base.eos_token_ids = ()
    register()
    base.model.set_attn_implementation(FOLDED)
    assert base.prepack() > 0
    return base


@pytest.mark.parametrize("fixed", [False, True])
def test_texts_are_the_same_from_few_graphs(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls, plainly and with drafts of which from one to four tokens are kept: no length repeats for long."""
    monkeypatch.setattr("decode.fixed.SLOTS", 48)
    base = packed_base()
    settings = GenerationSettings(max_new_tokens=46)
    plain = Decoder(base).generate(PROMPT, settings).token_ids
    other = Decoder(base).generate(PROMPT[:5], settings).token_ids
    graphs = Graphs()
    base.compile(fixed_shapes=fixed, backend=graphs)
    drafting = Decoder(base, Oracle([PROMPT + plain, PROMPT[:5] + other]))
    assert Decoder(base).generate(PROMPT, settings).token_ids == plain
    first = drafting.generate(PROMPT, settings)
    made = graphs.count
    assert first.token_ids == plain and first.stats.rounds < 40
    assert drafting.generate(PROMPT[:5], settings).token_ids == other
    assert Decoder(base).generate(PROMPT[:5], settings).token_ids == other
    assert made == graphs.count == 2, "one token, several"
    if fixed:
        assert len(graphs.sizes) == 4, "one node and eight, behind one step of slots and two"
    else:
        assert len(graphs.sizes) > 50, "exact sizes"


def test_a_model_without_one_graph_is_refused() -> None:
    base = tiny_base()
    decoder: Any = base._decoder
    decoder.layers[0].register_forward_hook(lambda *_: print(end=""))
    base.compile(backend=Graphs())
    with pytest.raises(UnsupportedModelError, match="LlamaModel cannot be compiled"):
        Decoder(base).generate(PROMPT)


def test_first_layers_are_not_compiled() -> None:
    base = tiny_base()
    base.compile(fixed_shapes=True)
    part = base.first_layers(1)
    assert base.is_compiled and not part.is_compiled and not part.fixed_shapes


def test_loading_compiles_where_it_is_asked_to(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    load = partial(Base.load, str(tmp_path), dtype="float32", device="cpu")
    assert load(compile=True).is_compiled and not load().is_compiled
    assert not load(compile=True).fixed_shapes, "a CPU gains nothing by padding"
