#!/usr/bin/env bash
# Makes or renews .venv, as every wrapper does before it trains, and trains nothing. LOWMEM_TORCH=rocm|cu126|cu130|cpu
# puts another build of torch into it, default the package index's; later starts remember it. Without it a new .venv gets
# the build for the CPU where no card is (docs/cards.md).
set -euo pipefail
ROOT="$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")"
# shellcheck source=scripts/lib/bootstrap.sh
source "$ROOT/scripts/lib/bootstrap.sh"

exec "$PYTHON" -P -c 'import sys
from importlib.metadata import version
print("torch", version("torch"), "in", sys.prefix)'
