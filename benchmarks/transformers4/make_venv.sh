#!/usr/bin/env bash
# Makes or renews .cache/transformers4: transformers 4 and what it needs, with the Python of .venv, for benchmarks/exports.py.
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
readonly VENV=.cache/transformers4 REQUIREMENTS=benchmarks/transformers4/requirements.txt
: "${PYTHON:=.venv/bin/python}"
say() { printf 'transformers4: %s\n' "$*" >&2; }

wanted="$("$PYTHON" --version; sha256sum <"$REQUIREMENTS")"
if [[ ! -r "$VENV/.requirements" || "$(<"$VENV/.requirements")" != "$wanted" ]]; then
    say "installing into $VENV: 1.2 GB on disk, and what CUDA needs where the package index gives that build of torch"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --requirement "$REQUIREMENTS"
    printf '%s\n' "$wanted" >"$VENV/.requirements"
fi
say "$("$VENV/bin/python" -c 'import peft, torch, transformers
print("transformers", transformers.__version__, "peft", peft.__version__, "torch", torch.__version__)') in $VENV"
