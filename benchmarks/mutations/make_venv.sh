#!/usr/bin/env bash
# Makes or renews .cache/mutants: requirements.txt of this folder beside the packages of .venv, for benchmarks/mutants.py.
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
readonly VENV=.cache/mutants REQUIREMENTS=benchmarks/mutations/requirements.txt
: "${PYTHON:=.venv/bin/python}"

packages="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
wanted="$packages $("$PYTHON" --version) $(sha256sum <"$REQUIREMENTS")"
if [[ ! -r "$VENV/.requirements" || "$(<"$VENV/.requirements")" != "$wanted" ]]; then
    printf 'mutants: installing into %s: 100 MB on disk\n' "$VENV" >&2
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --no-deps --requirement "$REQUIREMENTS"
    own="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf '%s\n' "$packages" >"$own/lowmem.pth" # after its own packages in the search
    printf '%s\n' "$wanted" >"$VENV/.requirements"
fi
