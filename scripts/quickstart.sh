#!/usr/bin/env bash
# From nothing to a model that answers faster with heads than without, in the same words. Needs Python >= 3.10 and pip.
# The environment and the converted base are made on first use: scripts/quickstart.sh [scripts/quickstart.py arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment
exec "$VENV/bin/python" "$ROOT/scripts/quickstart.py" "$@"
