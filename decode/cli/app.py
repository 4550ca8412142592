"""The command line's root: commands, and one place where errors become one line on standard error and exit code 2."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from decode.cli.chat import chat
from decode.cli.compare import compare
from decode.cli.convert import convert
from decode.cli.generate import generate
from decode.cli.inspect import inspect
from decode.cli.predict import predict
from decode.cli.tune import tune
from decode.cli.verify import verify
from medusa_heads import __version__
from medusa_heads.errors import UserError

# BadParameter → UsageError → ClickException, whether typer brings its own copy of click or imports it.
CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
ERROR_CODE = 2


class OneLineErrors(TyperGroup):
    """A command group that prints an error as one line and exits with 2; with `--debug` the traceback comes first."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **options: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        options["standalone_mode"] = False
        try:
            code = super().main(arguments, prog_name or "medusa-decode", *rest, **options)
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except Exception as error:
            if "--debug" in arguments:
                traceback.print_exc()
            typer.echo(f"error: {describe(error)}", err=True)
            code = ERROR_CODE
        sys.exit(code if isinstance(code, int) else 0)


def describe(error: Exception) -> str:
    """One line for the user: what is wrong, and for a fault of the program how to see where."""
    if isinstance(error, UserError):
        text = str(error)
    elif isinstance(error, CLICK_ERROR):
        text = error.format_message()  # type: ignore[attr-defined]
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        first = str(error).strip().splitlines()[:1] or ["no message"]
        text = f"{type(error).__name__}: {first[0]} (--debug shows where)"
    return " ".join(text.split())


app = typer.Typer(cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (generate, chat, compare, convert, inspect, predict, tune, verify):
    app.command()(command)


def show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Decode several exact tokens for one forward pass of a language model, with trained heads."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Entry point of the console script."""
    app()
