"""`medusa-decode chat`: a conversation in the terminal, answers as they are made."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decode.cli import common
from medusa_heads.errors import UserError

if TYPE_CHECKING:
    from decode.engine import Decoder
    from decode.prefix import Prefix
    from decode.settings import Chunk, GenerationSettings
    from decode.stats import Stats

COLOURS = (None, "cyan", "green", "yellow", "magenta")
"""Of a round's text, by the number of drafted tokens in it: none, 1, 2, 3, more."""
HELP = """\
/reset        forget the conversation
/save FILE    write the conversation to FILE, a line of JSON as training reads it
/stats        tokens, speed and acceptance length of the conversation
/help         this list
/quit         leave (so do Ctrl-D, and Ctrl-C where no answer runs)
Ctrl-C stops one answer; what was said so far stays in the conversation."""


def chat(
    base: common.BaseOption = None,
    heads: common.HeadsOption = None,
    drafter: common.DrafterOption = None,
    plain: common.PlainOption = False,
    system: Annotated[str | None, typer.Option("--system", help="A system message to start from.")] = None,
    dtype: common.DtypeOption = common.Dtype.auto,
    device: common.DeviceOption = None,
    temperature: common.TemperatureOption = 0.0,
    top_k: common.TopKOption = 0,
    top_p: common.TopPOption = 1.0,
    acceptance: common.AcceptanceOption = common.Acceptance.exact,
    typical_epsilon: common.EpsilonOption = None,
    typical_alpha: common.AlphaOption = None,
    max_new_tokens: common.MaxNewTokensOption = 1024,
    seed: common.SeedOption = None,
    no_guard: common.NoGuardOption = False,
    color: Annotated[
        bool, typer.Option("--color", help="Colour each round's text by how many drafted tokens the base accepted.")
    ] = False,
    debug: common.DebugOption = False,
) -> None:
    """Talk with the model; /help lists what can be typed."""
    settings = common.settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        acceptance=acceptance,
        epsilon=typical_epsilon,
        alpha=typical_alpha,
        plain=plain,
    )
    pair = common.load_pair(base, heads, plain=plain, dtype=dtype, device=device, drafter=drafter)
    decoder = pair.decoder(guarded=not no_guard)
    from decode.prefix import Prefix

    start = [{"role": "system", "content": system}] if system else []
    conversation = Conversation(decoder, settings, start, Prefix(), color=color)
    if sys.stdin.isatty():
        typer.echo(f"{decoder.base.name}; /help lists what can be typed.", err=True)
    while (line := read_line()) is not None:
        if not line.strip():
            continue
        if line.strip() in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                typer.echo(conversation.command(line))
            else:
                conversation.ask(line)
        except UserError as error:  # a conversation goes on after a mistyped command or a full context
            typer.echo(f"error: {error}", err=True)


def read_line() -> str | None:
    """The next line that the user types, or None where there is none."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 (editing and history of input())
    try:
        return input("> " if interactive else "")
    except (EOFError, KeyboardInterrupt):
        if interactive:
            typer.echo()
        return None


@dataclass
class Conversation:
    """The messages so far, and what they cost."""

    decoder: Decoder
    settings: GenerationSettings
    start: list[dict[str, Any]]
    prefix: Prefix
    """Keeps what the base has read, so that a turn costs its own tokens and not those of all turns before."""
    color: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    new_tokens: int = 0
    base_forwards: int = 0
    seconds: float = 0.0

    def ask(self, text: str) -> None:
        """Answer a user turn on standard output. Ctrl-C ends the answer and keeps what was said."""
        question = {"role": "user", "content": text}
        prompt_ids = common.render(self.decoder.base, [*self.start, *self.messages, question])
        # each answer has its own seed, and the same conversation gives the same answers again
        seed = None if self.settings.seed is None else self.settings.seed + self.answers
        said: list[str] = []
        try:
            for chunk in self.decoder.stream(prompt_ids, replace(self.settings, seed=seed), prefix=self.prefix):
                said.append(chunk.text)
                self.show(chunk)
                if chunk.result is not None:
                    self.count(chunk.result.stats)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False, err=True)
        typer.echo()
        self.answers += 1
        self.messages += [question, {"role": "assistant", "content": "".join(said)}]

    def show(self, chunk: Chunk) -> None:
        colour = COLOURS[min(chunk.accepted, len(COLOURS) - 1)] if self.color else None
        sys.stdout.write(chunk.text if colour is None else typer.style(chunk.text, fg=colour))
        sys.stdout.flush()

    def count(self, stats: Stats) -> None:
        self.new_tokens += stats.new_tokens
        self.base_forwards += stats.base_forwards
        self.seconds += stats.seconds

    def command(self, line: str) -> str:
        """Do what a line that starts with a slash says; returns what to show."""
        name, _, argument = line.strip().partition(" ")
        if name == "/help":
            return HELP
        if name == "/reset":
            self.messages.clear()
            return "forgotten"
        if name == "/stats":
            return self.figures()
        if name == "/save":
            return self.save(argument.strip())
        raise UserError(f"there is no command {name}; /help lists them")

    def figures(self) -> str:
        if not self.base_forwards:
            return "no answer yet"
        speed = self.new_tokens / self.seconds
        tau = self.new_tokens / self.base_forwards
        return (
            f"{self.answers} answers, {self.new_tokens} tokens in {self.seconds:.1f} s: "
            f"{speed:.1f} tokens/s, acceptance length {tau:.2f}{common.rule_of(self.settings.acceptance)}"
        )

    def save(self, name: str) -> str:
        """Write the conversation as one line, `{"id": …, "messages": [...]}`, of the kind that the trainer reads."""
        if not name:
            raise UserError("/save needs a file name")
        path = Path(name).expanduser()
        text = json.dumps({"id": path.stem, "messages": [*self.start, *self.messages]}, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        return f"saved {len(self.messages)} messages to {path}"
