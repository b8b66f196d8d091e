#!/usr/bin/env bash
# The quick start with a batch size of your own: ./train_sft_custom.sh [BATCH_SIZE] [options of `launch run`].
# Launch reads and checks the number; without one the recipe's, 16, holds.
set -euo pipefail
ROOT="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=scripts/lib/bootstrap.sh
source "$ROOT/scripts/lib/bootstrap.sh"

# The user stays in their folder: paths they type are relative to it, those of recipes to LOWMEM_ROOT (here, unless set).
export LOWMEM_ROOT="${LOWMEM_ROOT:-$ROOT}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# -P: a launch/ or random.py in that folder is not ours.
exec "$PYTHON" -P -m launch run sft_fast "$@"
