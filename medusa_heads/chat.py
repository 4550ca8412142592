"""A conversation as token ids, through the base's own chat template: the one path for data, training and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, str]


def render_chat(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
    """Token ids of `messages`; with `add_generation_prompt` up to where the assistant is to speak.

    Raises what the template raises where it refuses the conversation (jinja2.TemplateError).
    """
    encoded = tokenizer.apply_chat_template(
        [dict(m) for m in messages], add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])
