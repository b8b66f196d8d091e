#!/usr/bin/env bash
# The quick start: fine-tunes the small chat model of configs/recipes/sft_fast.yaml, as fast as this machine allows.
# Arguments go to `launch run` unchanged; --help lists them.
set -euo pipefail
ROOT="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=scripts/lib/bootstrap.sh
source "$ROOT/scripts/lib/bootstrap.sh"

# The user stays in their folder: paths they type are relative to it, those of recipes to LOWMEM_ROOT (here, unless set).
export LOWMEM_ROOT="${LOWMEM_ROOT:-$ROOT}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# -P: a launch/ or random.py in that folder is not ours.
exec "$PYTHON" -P -m launch run sft_fast "$@"
