"""An answerer without a model, for tests of the run over the prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train.answerers import Answer, Request
from train.distill import DistillSettings, Tally, distill
from train.prompts import Prompt


class SpellingTokenizer:
    """Renders a conversation as the characters of its contents."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return {"input_ids": [ord(c) for c in "|".join(f"{m['role'][0]}:{m['content']}" for m in messages)]}


class ScriptedAnswerer:
    """Answers with `reply(text of the conversation)`: an answer, or an exception to raise."""

    def __init__(self, reply: Callable[[str], Answer | Exception] | None = None):
        self.tokenizer = SpellingTokenizer()
        self.reply = reply or (lambda text: Answer(text.upper(), 3, True))
        self.requests: list[Request] = []
        self.running = 0
        self.most = 0

    @property
    def asked(self) -> list[str]:
        return ["".join(map(chr, request.prompt_ids)) for request in self.requests]

    async def complete(self, request: Request) -> Answer:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        answer = self.reply("".join(map(chr, request.prompt_ids)))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None: ...


SETTINGS = DistillSettings("base", (0.0, 0.0, 0.7), max_new_tokens=9, seed=1)


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (f"question {i}",), source="test") for i in range(count)]


def run(
    prompts: Sequence[Prompt],
    answerer: ScriptedAnswerer,
    directory: Path,
    settings: DistillSettings = SETTINGS,
    **options: Any,
) -> Tally:
    return asyncio.run(distill(prompts, answerer, settings, directory, **{"concurrency": 4, **options}))
