"""Variables of the user's environment that are passed to the training processes: those that are
needed there, and no secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from launch.base.text import SECRET_NAME

# Full names, and beginnings of names. Variables of proxies are not among them, because ranks use no
# network service and a proxy's address may contain a password. Variables of trackers are not
# either: the only tracker is TensorBoard, which writes files.
PASSED = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|TMPDIR|TEMP|TMP|LANG|LANGUAGE|TZ|TERM|COLUMNS|LINES|NO_COLOR"
    r"|VIRTUAL_ENV|CC|CXX|CFLAGS|CXXFLAGS|CPATH|LIBRARY_PATH|MAX_JOBS|GLIBC_TUNABLES|XDG_CACHE_HOME|XDG_STATE_HOME|XDG_RUNTIME_DIR)\Z"
    r"|(LC|PYTHON|LD|CONDA|LOWMEM|SLURM|PMI|PMIX|COV"
    r"|CUDA|NVIDIA|CUDNN|CUBLAS|NCCL|NVTE|ROCR|ROCM|RCCL|HIP|HSA|AMD|GPU|MIOPEN|HCC|ROCBLAS|HIPBLAS|HIPBLASLT|TENSILE|GLOO|UCX|FI|IBV|MLX5"
    r"|OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|MALLOC|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|BNB|BITSANDBYTES|DS|DEEPSPEED"
    r"|HF|TRANSFORMERS|TOKENIZERS|ACCELERATE|FSDP)_"
    r"|(PYTHON|TORCH)[A-Z]"
)


def passed(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The variables that a child process gets. `more` (launch.pass_env) are further names that the
    user wants to pass."""
    return {
        name: value
        for name, value in environ.items()
        if name in more or (PASSED.match(name) and not SECRET_NAME.search(name))
    }
