"""The base's decoder through `torch.compile`, for passes over trees.

One graph for trees of any size behind a text of any length, and one for a single token: sizes are symbols in them, so
that a round's lengths compile nothing anew. On a GPU the graphs are recorded as CUDA graphs besides, one recording for
each combination of sizes that occurs, which is why the decoder pads sizes there (`decode.fixed`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from medusa_heads.errors import UnsupportedModelError
from medusa_heads.prepack import packed_weights

GRAPHS = 64
"""Compilations of one decoder at most: by batch sizes of one and more, one token and more, layers asked for."""


class CompiledDecoder:
    """Calls like the decoder it is made from. Compiles at the first call.

    Raises UnsupportedModelError, at that call, for a model of which torch cannot make one graph, and where there is no
    working compiler.
    """

    def __init__(self, decoder: nn.Module, *, cuda_graphs: bool, backend: Any):
        self.name = type(decoder).__name__
        for weight in packed_weights(decoder):
            # As parameters are. Else a size of theirs is a symbol, and one that equals the tree's is taken to be its.
            torch._dynamo.mark_static(weight)
        options: dict[str, Any] | None = {"triton.cudagraphs": True} if cuda_graphs else None
        self._run = torch.compile(decoder, dynamic=True, fullgraph=True, backend=backend, options=options)

    def __call__(self, **arguments: Any) -> Any:
        import torch._dynamo as dynamo
        from torch._dynamo.exc import TorchDynamoException

        torch.compiler.cudagraph_mark_step_begin()
        try:
            with dynamo.config.patch(recompile_limit=GRAPHS):
                return self._run(**arguments)
        except TorchDynamoException as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = lines[0] if lines else type(error).__name__
            raise UnsupportedModelError(f"{self.name} cannot be compiled, leave it as it is: {reason}") from error
