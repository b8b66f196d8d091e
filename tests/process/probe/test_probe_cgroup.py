"""What a real cgroup, rlimit and OOM kill look like to a child that probes itself; GPUs by fake
vendor libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

REPO = Path(__file__).parents[3]
LIMIT_BYTES = 192 << 20
MEMORY_FILES = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}
Run = Callable[..., str]


def run_python(code: str, *, shell_first: str = "") -> str:
    """Standard output of `python -c code` in the repository, after a line of shell in the same
    process."""
    child = subprocess.run(
        ["/bin/sh", "-c", f'{shell_first}\nexec "$0" -c "$1"', sys.executable, code],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def memory_mounts() -> Iterator[tuple[str, Path]]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        kind, options = after.split()[0], after.split()[-1].split(",")
        if (kind == "cgroup" and "memory" in options) or kind == "cgroup2":
            yield kind, Path(before.split()[4])


def limited(kind: str, folder: Path) -> None:
    """Makes the folder a cgroup with LIMIT_BYTES and no swap. Raises OSError where that is not
    allowed."""
    if kind == "cgroup2":
        (folder.parent / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    (folder / MEMORY_FILES[kind]).write_text(str(LIMIT_BYTES))
    for name, size in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", LIMIT_BYTES)):
        if (folder / name).exists():
            (folder / name).write_text(str(size))


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A new memory cgroup of 192 MiB right below the mount point, so that nothing else can bind."""
    refused = ["no memory cgroup is mounted"]
    for kind, mount in memory_mounts():
        folder = mount / f"lowmem-test-{uuid.uuid4().hex[:8]}"
        try:
            limited(kind, folder)
        except OSError as error:
            refused.append(str(error))
            if folder.exists():
                folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip(f"no cgroup can be made here: {'; '.join(refused[1:] or refused)}")


@pytest.fixture
def run_inside(cgroup: Path) -> Run:
    """Runs Python code in a child that is moved into the cgroup before it starts."""
    return lambda code: run_python(code, shell_first=f"echo $$ > '{cgroup}/cgroup.procs'")


def test_a_child_in_a_cgroup_reports_that_cgroups_limit(run_inside, cgroup):
    code = "from launch.probe.machine import machine; m = machine()"
    code += "; print(m.host_limit_bytes, m.host_limit_reason, sep='|')"
    limit_bytes, reason = run_inside(code).split("|")
    assert int(limit_bytes) == LIMIT_BYTES
    assert reason.startswith(str(cgroup))


def test_memory_a_child_holds_is_not_available_and_page_cache_is(run_inside, tmp_path):
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    code = f"""
from launch.probe import machine as probe
before, _ = probe.host_available()
data = open({str(tmp_path / "file")!r}, "rb")
os = __import__("os"); os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
while data.read(1 << 20): pass
cached, _ = probe.host_available()
held = b"x" * (64 << 20)
after, reason = probe.host_available()
print(before - cached, cached - after, "cannot be reclaimed" in reason)
"""
    cached, held, said = run_inside(code).split()
    assert abs(int(cached)) < 16 << 20
    assert 56 << 20 < int(held) < 80 << 20
    assert said == "True"


def test_a_real_oom_kill_is_counted(run_inside):
    code = """
import subprocess, sys
from launch.probe import machine as probe
before = probe.oom_kills()
eater = subprocess.run([sys.executable, "-c", "held = b'x' * (1 << 30)"])
print(eater.returncode, probe.oom_kills().count - before.count)
"""
    assert run_inside(code) == "-9 1"


def test_an_rlimit_of_the_child_is_a_limit(tmp_path):
    code = "from launch.probe import machine; print(*min(machine.host_limits(env={})), sep='|')"
    address_space_kib = 1 << 20
    said = run_python(code, shell_first=f"ulimit -v {address_space_kib}")
    assert said == f"{1 << 30}|RLIMIT_AS = 1.00 GiB"
    assert "RLIMIT_DATA" in run_python(code, shell_first=f"ulimit -d {address_space_kib}")


def test_the_affinity_of_the_child_bounds_its_cpus():
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from launch.probe import machine as probe
print(*probe.cpus(env={}))
"""
    assert run_python(code) == "1 sched_getaffinity"


def test_importing_probe_imports_few_modules_and_none_of_the_big_libraries():
    code = """
import sys
before = set(sys.modules)
import launch.probe.machine
imported = set(sys.modules) - before
heavy = {"torch", "numpy", "pydantic", "yaml", "pynvml", "psutil"}
print(len(imported), *{name.partition(".")[0] for name in imported} & heavy)
"""
    number, *heavy = run_python(code).split()
    assert int(number) < 100
    assert heavy == []


# ---- fake vendor libraries
# ---------------------------------------------------------------------------

PRINT_GPUS = """
import os
from launch.probe import gpus
found = gpus.find(os.environ)
print(*found.gpus, found.reason, sep="\\n")
"""


def test_the_real_nvml_binding_reads_a_driver_library(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake libnvidia-ml.so.1 with")
    source = REPO / "tests/data/fake_nvml.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", source], check=True
    )
    use_it = f"export LD_LIBRARY_PATH='{tmp_path}'; unset CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER"
    first, last, reason = run_python(PRINT_GPUS, shell_first=use_it).splitlines()
    assert (
        "index=0, name='NVIDIA GeForce RTX 3080', vendor='nvidia', total_bytes=21474836480" in first
    )
    assert (
        "free_bytes=21045339750, architecture='8.6', driver='550.54.15', reason='NVML device 0'"
        in first
    )
    assert "index=2" in last
    assert reason == "NVML lists 2; GPU 1: GPU is lost"
    use_it += "; export CUDA_VISIBLE_DEVICES=GPU-22"
    only, reason = run_python(PRINT_GPUS, shell_first=use_it).splitlines()
    assert "index=2" in only
    assert reason.endswith('CUDA_VISIBLE_DEVICES="GPU-22" leaves 1 of 2')


def test_an_amdsmi_that_cannot_load_its_library_is_a_reason(tmp_path):
    (tmp_path / "amdsmi.py").write_text("raise KeyError('libamd_smi.so')\n")
    use_it = (
        f"export PYTHONPATH='{tmp_path}' PATH=/nowhere LD_LIBRARY_PATH=/nowhere"
        " CUDA_VISIBLE_DEVICES="
    )
    assert "amdsmi: KeyError('libamd_smi.so'); no rocm-smi on PATH" in run_python(
        PRINT_GPUS, shell_first=use_it
    )


def test_amdsmi_is_asked_before_rocm_smi(tmp_path):
    # its functions and units as documented for ROCm 6.4: vram in MiB, target_graphics_version a
    # text
    (tmp_path / "amdsmi.py").write_text("""
class AmdSmiException(Exception): pass
def amdsmi_init(): pass
def amdsmi_shut_down(): pass
def amdsmi_get_processor_handles(): return ["handle"]
def amdsmi_get_gpu_vram_usage(handle): return {"vram_total": 32624, "vram_used": 110}
def amdsmi_get_gpu_driver_info(handle):
    return {"driver_name": "amdgpu", "driver_version": "6.14.14"}
def amdsmi_get_gpu_asic_info(handle):
    name = "AMD Radeon AI PRO R9700"
    return {"market_name": name, "asic_serial": "0xA5", "target_graphics_version": "gfx1201"}
""")
    code = """
from launch.probe import gpus
(uuid, gpu), = gpus._amd({})[0]
sizes = (gpu.total_bytes >> 20, gpu.free_bytes >> 20)
print(uuid, gpu.name, *sizes, gpu.architecture, gpu.driver, sep="|")
"""
    said = run_python(code, shell_first=f"export PYTHONPATH='{tmp_path}'")
    assert said == "GPU-00000000000000a5|AMD Radeon AI PRO R9700|32624|32514|gfx1201|6.14.14"
