#!/usr/bin/env bash
# Makes or renews .cache/cuda_build: the CUDA build of torch, and the rest of requirements-dev.txt. Python 3.12, which
# CUDA_BUILD_PYTHON can name: a build for CPUs that pip finds for another Python is then not taken.
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
readonly VENV=.cache/cuda_build
say() { printf 'cuda-build: %s\n' "$*" >&2; }

python="${CUDA_BUILD_PYTHON:-}"
if [[ -z "$python" ]]; then
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python; do
        if python="$(type -P "$candidate")" && "$python" -c '' 2>/dev/null; then break; fi
        python=''
    done
fi
[[ -n "$python" ]] || { say "needs Python 3.12, which is not here; CUDA_BUILD_PYTHON=/path/to/python names one"; exit 3; }

wanted="$(cat requirements.txt requirements-dev.txt | sha256sum)"
if [[ ! -r "$VENV/.requirements" || "$(<"$VENV/.requirements")" != "$wanted" ]]; then
    say "installing into $VENV: 2.5 GB to fetch, 5.5 GB on disk"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --requirement requirements-dev.txt
    printf '%s\n' "$wanted" >"$VENV/.requirements"
fi
cuda="$("$VENV/bin/python" -c 'import torch; print(torch.__version__, "for CUDA", torch.version.cuda)')"
[[ "$cuda" != *None ]] || { say "pip gave torch $cuda: expected a CUDA build; see its index settings"; exit 3; }
site="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
printf '%s\n' "$PWD/tests/fake_cuda/site" >"$site/fake_cuda.pth"
"$VENV/bin/python" -m tests.fake_cuda.build "$PWD/.cache/fake_cuda" >/dev/null
say "torch $cuda in $VENV"
