#!/usr/bin/env bash
# All tests, in an environment made on first use: scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment dev
cd "$ROOT"
exec "$VENV/bin/python" -m pytest --numprocesses auto --dist worksteal "$@"
