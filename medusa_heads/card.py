"""The model card of a heads' repository: what they are, for which base, how good, how to use them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from medusa_heads.config import EagleConfig, HeadsConfig, HydraConfig, MedusaConfig
from medusa_heads.formats.vllm_medusa import LOADER_OPTION

if TYPE_CHECKING:
    from medusa_heads.draft_model import Drafting, DraftModel

TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ what }} for `{{ base }}`
{%- if revision %} at revision `{{ revision }}`{% endif %}, trained with medusa-heads on text that the base wrote
itself. They propose tokens; the base decides. Decoded with medusa-heads, the text has the law of the base alone.

| | |
|---|---|
| parameters | {{ parameters }}{{ share }} |
| vocabulary projection | {{ projection }} |
{%- for name, value in facts.items() %}
| {{ name }} | {{ value }} |
{%- endfor %}

## Use

```
pip install medusa-heads
medusa-decode generate --base {{ base }} --heads {{ repo or "PATH" }} "Why is the sky blue?"
```

```python
from medusa_heads import Base, load_heads

base = Base.load("{{ base }}")
heads = load_heads("{{ repo or "PATH" }}", base=base)
```
{%- if method %}

In vLLM, which drafts chains of tokens:

```
medusa-decode convert {{ repo or "PATH" }} heads-vllm --to vllm
vllm serve {{ served }} --speculative-config \
    '{"method": "{{ method }}", "model": "heads-vllm", "num_speculative_tokens": {{ tokens }}}'{{ loader }}
```
{%- endif %}
"""


def model_card(
    config: HeadsConfig,
    num_parameters: int,
    *,
    base_parameters: int | None = None,
    facts: Mapping[str, Any] | None = None,
    repo: str | None = None,
) -> str:
    """The card as Markdown. `facts` are further rows of its table: data, τ, tree, evaluation."""
    base = config.base_model_name_or_path or "unknown base"
    rows = f"{config.draft_vocab_size} frequent rows of" if config.draft_vocab_size else ""
    projection = f"{rows} the base's".strip() if not config.own_projection else "their own"
    share = f" ({num_parameters / base_parameters:.2%} of the base)" if base_parameters else ""
    data = ModelCardData(
        library_name="medusa-heads",
        base_model=base if _is_repository(base) else None,
        tags=["medusa-heads", config.family, "speculative-decoding"],
        pipeline_tag="text-generation",
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        title=f"{_family(config)} heads for {base}",
        base=base,
        revision=config.base_revision,
        what=describe(config),
        parameters=f"{num_parameters:,}",
        share=share,
        projection=projection,
        facts=dict(facts or {}),
        repo=repo,
        served=base if _is_repository(base) else "BASE",
        method=_vllm_method(config),
        loader=_loader_option(config),
        tokens=config.num_heads if isinstance(config, MedusaConfig) else 3,
    )
    return str(card)


DRAFT_TEMPLATE = """---
{{ card_data }}
---

# Draft model for {{ base }}

{{ layers }} of `{{ base }}`
{%- if revision %} at revision `{{ revision }}`{% endif %}, trained further with medusa-heads to say what the base
says, on text that the base wrote itself; embeddings and vocabulary projection are the base's. It proposes tokens, the
base decides: decoded with medusa-heads, the text has the law of the base alone. On its own it is a poor language model.

| | |
|---|---|
| parameters of its own | {{ parameters }} ({{ share }} of the base) |
| drafts from | {{ vocabulary }} |
{%- for name, value in facts.items() %}
| {{ name }} | {{ value }} |
{%- endfor %}

## Use

```
pip install medusa-heads
medusa-decode generate --base {{ base }} --drafter model:PATH "Why is the sky blue?"
```

It is an ordinary causal LM of transformers, with the base's tokenizer:

```python
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{{ served }}")
base.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("PATH"))
```
"""


def draft_card(
    draft: DraftModel, drafting: Drafting, *, base_parameters: int, facts: Mapping[str, Any] | None = None
) -> str:
    """The card of a draft model, as `model_card` writes it for heads."""
    base, ids = drafting.base_model_name_or_path, drafting.draft_ids
    linked = base if _is_repository(base) else None
    card = ModelCard.from_template(
        ModelCardData(
            library_name="transformers",
            base_model=linked,
            tags=["medusa-heads", "draft-model", "speculative-decoding"],
            pipeline_tag="text-generation",
        ),
        template_str=DRAFT_TEMPLATE,
        base=base,
        revision=drafting.base_revision,
        layers=f"Layer{_plural(len(draft.layers))} {', '.join(map(str, draft.layers))} and the final norm",
        parameters=f"{draft.num_parameters:,}",
        share=f"{draft.num_parameters / base_parameters:.2%}",
        vocabulary="the whole vocabulary" if ids is None else f"the {len(ids):,} most frequent tokens of its data",
        facts=dict(facts or {}),
        served=linked or "BASE",
    )
    return str(card)


def _family(config: HeadsConfig) -> str:
    if isinstance(config, EagleConfig):
        return "EAGLE-3" if config.version == 3 else "EAGLE"
    return config.family.capitalize()


def _vllm_method(config: HeadsConfig) -> str | None:
    """What vLLM calls heads of this family; None for those that it does not serve."""
    if isinstance(config, MedusaConfig):
        return "medusa" if config.draft_vocab_size is None or not config.own_projection else None
    if isinstance(config, EagleConfig):
        return "eagle3" if config.version == 3 else "eagle" if config.draft_vocab_size is None else None
    return None


def _loader_option(config: HeadsConfig) -> str:
    """vLLM's option for heads with a draft vocabulary (see `medusa_heads.formats.vllm_medusa`)."""
    if not isinstance(config, MedusaConfig) or config.draft_vocab_size is None:
        return ""
    return f" \\\n    --model-loader-extra-config '{json.dumps(LOADER_OPTION)}'"


def describe(config: HeadsConfig) -> str:
    """What heads are, in a few words."""
    name = _family(config)
    if isinstance(config, MedusaConfig):
        return f"{config.num_heads} {name} heads of {config.num_layers} residual block{_plural(config.num_layers)}"
    if isinstance(config, HydraConfig):
        attention = ", with prefix attention," if config.prefix_attention else ""
        return f"{config.num_heads} {name} heads of {config.num_layers} layer{_plural(config.num_layers)}{attention}"
    fused = ""
    if isinstance(config, EagleConfig) and config.layers:
        fused = f" over the states that enter layers {', '.join(map(str, config.layers))}"
    return f"One {name} draft layer{fused}"


def _plural(count: int) -> str:
    return "" if count == 1 else "s"


def _is_repository(name: str) -> bool:
    """Whether a base's name can be linked on the Hub: `owner/name`, not a path on somebody's disk."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name
