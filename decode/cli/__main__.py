"""`python -m decode.cli`: the same as `medusa-decode`."""

from __future__ import annotations

from decode.cli.app import main

main()
