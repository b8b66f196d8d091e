#!/usr/bin/env bash
# Makes or renews .cache/oldest: the oldest torch and transformers that launch/probe/packages.py accepts, and the rest of
# requirements-dev.txt, for make test-oldest.
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
readonly VENV=.cache/oldest
: "${PYTHON:=.venv/bin/python}"

oldest="$("$PYTHON" -c 'from launch.probe.packages import OLDEST
print(*(f"{name}=={major}.{minor}.*" for name, (major, minor) in OLDEST.items()), sep="\n")')"
# what they need themselves, in versions that suit them: pip chooses
packages="$(sed -E '/^(-r|torch|transformers|tokenizers|huggingface_hub|hf-xet|triton|sympy|setuptools)\b/d' requirements.txt requirements-dev.txt)"
wanted="$(printf '%s\n%s\n' "$oldest" "$packages")"
if [[ ! -r "$VENV/.requirements" || "$(<"$VENV/.requirements")" != "$wanted" ]]; then
    printf 'oldest: installing into %s: 2.5 GB to fetch, 5.5 GB on disk\n' "$VENV" >&2
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    printf '%s\n' "$wanted" >"$VENV/requirements.txt"
    "$VENV/bin/python" -m pip install --quiet --requirement "$VENV/requirements.txt"
    printf '%s\n' "$wanted" >"$VENV/.requirements"
fi
"$VENV/bin/python" -c 'import torch, transformers
print("oldest: torch", torch.__version__, "transformers", transformers.__version__)'
