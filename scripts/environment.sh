# Sourced by the scripts beside it. `make_environment` makes or reuses the virtual environment $VENV (default: .venv of
# the checkout) with this project installed in place; `make_environment dev` adds what tests and checks need.
# PYTHON names the interpreter to make it with.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

make_environment() {
    local extra="${1:-}" stamp mark
    mark="$ROOT $(cksum <"$ROOT/pyproject.toml")"
    stamp="$VENV/.installed${extra:+-$extra}"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$mark" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
        return 0
    fi
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || make_venv || return 1
    "$VENV/bin/python" -c 'import torch' >/dev/null 2>&1 || install_torch || return 1
    echo "installing the project into $VENV"
    "$VENV/bin/python" -m pip install --quiet --editable "$ROOT${extra:+[$extra]}" || return 1
    echo "$mark" >"$VENV/.installed"
    echo "$mark" >"$stamp"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "error: no Python >= 3.10 among ${PYTHON:-python3, python, python3.10 to python3.13}; set PYTHON" >&2
    return 1
}

make_venv() {
    local python
    python="$(find_python)" || return 1
    echo "making $VENV with $python"
    "$python" -m venv --clear "$VENV" >/dev/null 2>&1 && return 0
    # Debian's Python comes without ensurepip; its own pip can put one into an environment.
    if "$python" -m venv --clear --without-pip "$VENV" \
        && "$python" -m pip --python "$VENV/bin/python" install --quiet pip; then
        return 0
    fi
    echo "error: $python cannot make a virtual environment: install its venv module (Debian: python3-venv)" >&2
    return 1
}

# PyPI's torch for Linux brings gigabytes of CUDA libraries. Without an NVIDIA GPU the CPU build is wanted. Where pip's
# own settings (an index, find-links) offer one, it is taken; else PyTorch's public CPU index is asked; else PyPI's.
install_torch() {
    local pip=("$VENV/bin/python" -m pip install --quiet) requirement version
    requirement="$(sed -n 's/^ *"\(torch>=[^"]*\)",$/\1/p' "$ROOT/pyproject.toml")"
    if [ "$(uname -s)" != Linux ] || nvidia-smi >/dev/null 2>&1; then
        echo "installing torch"
        "${pip[@]}" "$requirement"
        return
    fi
    echo "installing torch for the CPU"
    version="$("$VENV/bin/python" -m pip index versions torch 2>/dev/null |
        tr -s ', ' '\n' | grep -E '^[0-9.]+\+cpu$' | sort -rV | head -n 1)"
    if [ -n "$version" ] && "${pip[@]}" "$requirement" "torch==$version"; then
        return
    fi
    "${pip[@]}" --retries 1 --timeout 30 --index-url https://download.pytorch.org/whl/cpu "$requirement" && return
    echo "no CPU build of torch found: taking pip's default, which may be large"
    "${pip[@]}" "$requirement"
}
