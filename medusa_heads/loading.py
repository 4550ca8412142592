"""Finding and loading a base: an embedded name, a local directory, a Hub id or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError

from medusa_heads.attention import FOLDED, register
from medusa_heads.base import Base
from medusa_heads.embedded import EMBEDDED, resolve_embedded
from medusa_heads.errors import BaseLoadError, ConfigError, UnsupportedModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> str | torch.dtype:
    """`auto` is the checkpoint's own dtype, but float32 on a CPU that has no bfloat16 arithmetic."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        slow = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.float32 if slow else "auto"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[dtype]


def load(
    name: str = "smollm2-135m",
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    prepack: bool = True,
    compile: bool = False,
) -> Base:
    """Loads a base and its tokenizer.

    Args:
        name: an embedded name (`smollm2-135m`), a local directory, a Hub id, or the path of a `.gguf` file.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: where to put it; default the GPU if there is one. Not together with `device_map`.
        quantization_config: passed to transformers (bitsandbytes, torchao, …; see docs/generate.md).
        prepack: pack the linear layers for the CPU at load, which about halves each decoding step there. Quantised
            layers stay as they are.
        compile: run passes of decoding through `torch.compile` (`Base.compile`), which costs minutes before the first
            answer and pays in long runs alone; see docs/speed.md.

    Raises:
        BaseLoadError: not found, unreadable.
        UnsupportedModelError: not a causal LM, or one whose layers cannot take a tree.
    """
    if device is not None and device_map is not None:
        raise ConfigError(f"device={device!r} and device_map={device_map!r} exclude each other")
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    where: dict[str, Any] = {"revision": revision, "token": token, "local_files_only": local_files_only}
    source = name
    options: dict[str, Any] = {"dtype": resolve_dtype(dtype, target), "trust_remote_code": trust_remote_code}
    if name in EMBEDDED:
        source, where = str(resolve_embedded(name)), {"local_files_only": True}
    elif name.endswith(".gguf"):
        path = Path(name)
        if not path.is_file():
            raise BaseLoadError(f"there is no file {name}")
        source = str(path.parent)
        where["gguf_file"] = path.name
        options |= _dequantised(path.name)
        if options["dtype"] == "auto":
            options["dtype"] = torch.bfloat16
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
        device_map = {"": target} if device_map is None else device_map
    if device_map is not None:
        options["device_map"] = device_map
    model, tokenizer = _from_pretrained(name, source, where, options)
    if device_map is None and model.device.type != target.type:  # a quantised checkpoint is where it was put
        model = model.to(target)
    from_hub = "gguf_file" not in where and not Path(source).is_dir()
    base = Base(model, tokenizer, name, _commit(source, revision) if from_hub else revision)
    _choose_attention(base)
    if prepack:
        base.prepack()
    _check_causal(base)
    if compile:
        base.compile()
    return base


def _commit(name: str, revision: str | None) -> str | None:
    """The commit that a Hub id was just loaded at, read from the name of its directory in the cache."""
    config = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    return Path(config).parent.name if isinstance(config, str) else revision


def _check_causal(base: Base) -> None:
    """Refuses a model in which a token sees the ones behind it: transformers loads encoders as causal LMs too."""
    ids = torch.tensor([[0, 1, 2], [0, 1, 3]], device=base.device) % base.vocab_size
    try:
        states = base.forward(ids).last_hidden_state.float()
    except TypeError as error:
        raise UnsupportedModelError(f"the base {base.name!r} cannot be run: {_first_line(error)}") from error
    if not (states[0, :2] - states[1, :2]).abs().max() < 0.02 * states.abs().max():
        raise UnsupportedModelError(
            f"{base.name!r} is not a causal language model: the states of its tokens depend on the tokens behind them"
        )


def _dequantised(gguf_file: str) -> dict[str, Any]:
    """transformers keeps GGUF weights packed unless told to unpack them."""
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(gguf_file=gguf_file, dequantize=True)}


def _from_pretrained(name: str, source: str, where: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **where, **options
        )
        model, report = loaded
        _check_complete(name, report)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=options["trust_remote_code"], **where)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise BaseLoadError(f"cannot load the base {name!r}: {_first_line(error)}") from error
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise UnsupportedModelError(f"{name!r} is not a causal language model of transformers") from error
        raise BaseLoadError(f"cannot load the base {name!r}: {_first_line(error)}") from error
    return model, tokenizer


def _check_complete(name: str, report: dict[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers and a warning; here that is an error."""
    missing = sorted(report["missing_keys"])
    misshapen = sorted(report["mismatched_keys"])
    if misshapen:
        key, stored, wanted = misshapen[0]
        raise BaseLoadError(
            f"cannot load the base {name!r}: {key} has shape {tuple(stored)} in the checkpoint; its config asks "
            f"{tuple(wanted)}" + (f" ({len(misshapen)} such tensors)" if len(misshapen) > 1 else "")
        )
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BaseLoadError(
            f"cannot load the base {name!r}: its checkpoint lacks {', '.join(missing[:3])}{more}, which the model needs"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _choose_attention(base: Base) -> None:
    """Grouped queries go through the folded attention; a family whose attention caps its scores needs `eager`."""
    if getattr(base.config, "attn_logit_softcapping", None) is not None:
        base.model.set_attn_implementation("eager")
        return
    groups = base.config.num_attention_heads // (
        getattr(base.config, "num_key_value_heads", None) or base.config.num_attention_heads
    )
    if groups > 1 and base.config._attn_implementation == "sdpa" and base.model._supports_attention_backend:
        register()
        base.model.set_attn_implementation(FOLDED)
