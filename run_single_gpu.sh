#!/usr/bin/env bash
# GPT-2 on one card, the "before" of the guide: recipe single_gpu. Arguments go to `launch run` unchanged.
# The environment may set MODEL_SIZE=tiny|small|medium, BATCH_SIZE, ...; so may lines of yours below `export`.
set -euo pipefail
ROOT="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=scripts/lib/bootstrap.sh
source "$ROOT/scripts/lib/bootstrap.sh"

export MODEL_SIZE BATCH_SIZE GRADIENT_ACCUM ENABLE_FP16 ENABLE_GRAD_CKPT NUM_WORKERS MAX_LENGTH EPOCHS OUTPUT_DIR

# The user stays in their folder: paths they type are relative to it, those of recipes to LOWMEM_ROOT (here, unless set).
export LOWMEM_ROOT="${LOWMEM_ROOT:-$ROOT}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# -P: a launch/ or random.py in that folder is not ours.
exec "$PYTHON" -P -m launch run single_gpu --from-environment "$@"
