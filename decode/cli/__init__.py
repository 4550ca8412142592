"""`medusa-decode`: its commands, and the root that they hang on.

Each command is a thin typed wrapper in a file of its own; what takes long to import (torch, transformers) is imported
inside the functions that need it, so that `--help` and errors in options come at once.
"""

from __future__ import annotations

from decode.cli.app import app, main

__all__ = ["app", "main"]
