"""Build the driver without a card for the CUDA build of torch that this interpreter has."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY, DRIVER, NVML = "libfake_cuda.so", "libcuda.so.1", "libnvidia-ml.so.1"
PARTS = ("cards", "queue", "kernels", "runtime", "driver", "blas", "nccl")
# Libraries of the CUDA build that call the driver's, and the names that they call
CALLERS = (
    *("torch/lib/lib*cuda*.so", "torch/lib/libtorch_python.so", "torch/lib/libtorch_cpu.so"),
    *("torch/lib/libcaffe2_nvrtc.so", "bitsandbytes/libbitsandbytes_cuda13*.so"),
)
CALLED = re.compile(r" U ((?:__cuda|cuda|cublas|nccl)\w*)")
DEFINED = re.compile(r" T (\w+)")
# The driver's functions are asked for by name, when they are needed: all of them, in every version
DECLARED = re.compile(r"CUDAAPI (cu[A-Z]\w+)\(|#define cu[A-Z]\w+ +(cu[A-Z]\w+_v\d)")
# Stand-ins for headers that only a CUDA compiler has: nothing of them is needed by C.
STAND_INS = {
    "crt/host_config.h": "",
    "crt/device_functions.h": "",
    "crt/host_defines.h": "\n".join(
        [
            *(f"#define {word}" for word in ("__host__", "__device__", "__global__", "CUDARTAPI")),
            *(
                "#define __device_builtin__",
                "#define __cudart_builtin__",
                "#define CUDARTAPI_CDECL",
            ),
            "#define __builtin_align__(n) __attribute__((aligned(n)))",
            "#define __align__(n) __attribute__((aligned(n)))",
            "#define __device_builtin_texture_type__\n#define __device_builtin_surface_type__",
        ]
    ),
}


def packages() -> Path:
    """The folder that torch is installed in."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(f"{sys.executable} has no torch: make cuda-build")
    return Path(spec.origin).parents[1]


def headers() -> Path:
    for header in packages().glob("nvidia/*/include/cuda_runtime_api.h"):
        return header.parent
    raise SystemExit(f"{packages()} has no CUDA headers: its torch is no CUDA build")


def callers() -> Iterator[Path]:
    for pattern in CALLERS:
        yield from packages().glob(pattern)


def symbols(file: Path, pattern: re.Pattern[str]) -> set[str]:
    listing = subprocess.run(
        ["nm", "-D", "--without-symbol-versions", file], check=True, capture_output=True, text=True
    )
    return set(pattern.findall(listing.stdout))


def compile_library(output: Path, sources: list[Path], includes: list[Path]) -> None:
    flags = ["-shared", "-fPIC", "-O2", "-std=gnu11", "-pthread", "-Wl,--no-as-needed"]
    places = [f"-I{place}" for place in (HERE, *includes)]
    subprocess.run(["gcc", *flags, *places, "-o", output, *sources], check=True)


def build(folder: Path) -> Path:
    """Folder of the libraries, made below folder unless they are there."""
    sources = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.[ch]")))
    key = hashlib.sha256(sources + Path(__file__).read_bytes() + str(packages()).encode())
    place = folder / key.hexdigest()[:16]
    if (place / NVML).exists():
        return place
    place.mkdir(parents=True, exist_ok=True)
    for name, text in STAND_INS.items():
        (place / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "include" / name).write_text(text + "\n")
    parts = [HERE / f"{part}.c" for part in PARTS]
    includes = [place / "include", headers()]
    compile_library(place / LIBRARY, parts, includes)
    # Everything else that is called answers 0, which is success, and does nothing.
    called = set().union(*(symbols(file, CALLED) for file in callers()))
    declared = DECLARED.findall((headers() / "cuda.h").read_text())
    called |= {name or version for name, version in declared}
    rest = sorted(called - symbols(place / LIBRARY, DEFINED))
    stubs = place / "rest.c"
    stubs.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in rest))
    compile_library(place / LIBRARY, [*parts, stubs], includes)
    compile_library(place / DRIVER, [place / LIBRARY], [])  # what is asked of it is found there
    compile_library(place / NVML, [HERE / "nvml.c", HERE / "cards.c"], [])
    return place


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
