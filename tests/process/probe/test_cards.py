"""Cards that are here and cannot be used: the real command and NVML binding, a driver and folders
made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.probe import torch_build
from tests import builders, cards
from tests.process import forked_starts

pytestmark = pytest.mark.process

PRINT = """
import json, os
from launch.probe import gpu_signs, gpus
found = gpus.find(os.environ, gpu_signs.system_root(os.environ))
indices = [gpu.index for gpu in found.gpus]
print(json.dumps([indices, found.obstacle, found.reason, found.cuda_driver]))
"""
PRINT_SHOWN = """
import json, os
from launch.probe import gpus, machine
here = machine.machine()
shown = gpus.visible_devices(here, COUNT)
print(json.dumps({"indices": [gpu.index for gpu in here.gpus], "variables": shown}))
"""
ON_CPU = "or train on the CPU on purpose: --launch.mode=cpu"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(cards.nvml(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "rows.jsonl").write_text(
        '{"prompt": "a b", "response": "c d"}\n' * 50
    )
    return tmp_path / "workspace"


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    """Nothing of this machine's cards and variables; PATH without vendors' programs."""
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    hiding = (
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "LD_LIBRARY_PATH",
    )
    clean = {
        key: value
        for key, value in builders.environment(tmp_path / "workspace").items()
        if key not in hiding
    }
    return {**clean, "PATH": "/usr/bin:/bin", "LOWMEM_SYSTEM_ROOT": str(root), **extra}


def printed(tmp_path: Path, code: str, **extra: str) -> str:
    done = forked_starts.start((code,), environment(tmp_path, **extra), "code")
    assert done.returncode == 0, done.stderr
    return done.stdout


def probed(tmp_path: Path, **extra: str) -> tuple[list[int], str, str, str]:
    return tuple(json.loads(printed(tmp_path, PRINT, **extra)))


def plan(tmp_path: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    rows = f"--data.train_file={tmp_path}/workspace/rows.jsonl"
    words = ("plan", "sft_fast", rows, "--data.validation_file=null", *words)
    return forked_starts.start(words, environment(tmp_path, **extra))


def is_refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


# ---- a card that cannot be asked
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("18", "restart the machine: the driver was updated"),
        ("999", "start the container anew"),
        ("4", "--gres=gpu:1"),
        ("3", "nvidia-smi"),
        ("9", "modprobe nvidia"),
        ("15", "see the card's power and seat"),
        ("23", "nvidia-smi"),
    ],
)
def test_an_nvml_that_fails_is_an_obstacle_with_its_cause_and_its_fix(tmp_path, driver, code, fix):
    gpus, obstacle, _, _ = probed(tmp_path, LD_LIBRARY_PATH=driver, FAKE_NVML_INIT=code)
    assert gpus == []
    assert f"(NVML error {code})" in obstacle
    cause, fixed, rest = obstacle.partition("; fix: ")
    assert cause and fixed and fix in rest


def test_a_card_that_cannot_be_asked_refuses_the_start_instead_of_training_the_small_model(
    tmp_path, workspace, driver
):
    said = is_refused(plan(tmp_path, LD_LIBRARY_PATH=driver, FAKE_NVML_INIT="18"))
    assert "NVML cannot be asked: " in said
    assert "mismatch" in said
    assert said.rstrip().endswith(ON_CPU)


def test_the_cpu_that_was_asked_for_is_taken_all_the_same(tmp_path, workspace, driver):
    done = plan(tmp_path, "--launch.mode=cpu", LD_LIBRARY_PATH=driver, FAKE_NVML_INIT="18")
    assert done.returncode == 0, done.stderr
    assert "mode       cpu" in done.stdout


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"FAKE_NVML_HANDLE": "4"},
            "GPU 0: Insufficient Permissions (NVML error 4); fix: you may not open /dev/nvidia*",
        ),
        ({"FAKE_NVML_HANDLE": "15"}, "GPU 0: GPU is lost (NVML error 15)"),
        (
            {"FAKE_NVML_MEMORY": "3", "FAKE_NVML_NAME": "NVIDIA GB10", "FAKE_NVML_COUNT": "1"},
            "GPU 0 (NVIDIA GB10): ",
        ),
        (
            {"FAKE_NVML_MEMORY": "3", "FAKE_NVML_COUNT": "1"},
            "unified memory, as GB10 and Jetson have",
        ),
        ({"FAKE_NVML_COUNT_ERROR": "999"}, "NVML cannot be asked: Unknown Error (NVML error 999)"),
        (
            {"FAKE_NVML_CUDA_ERROR": "12"},
            "libcuda.so.1, the driver's part that computes, is not here",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "MIG-7f1d2c3e"},
            "CUDA_VISIBLE_DEVICES=MIG-7f1d2c3e names a part of a card (MIG)",
        ),
        (
            {"FAKE_NVML_MIG": "1", "FAKE_NVML_NAME": "NVIDIA A100-SXM4-80GB"},
            "GPU 0 (NVIDIA A100-SXM4-80GB) is divided (MIG), which lowmem cannot plan for yet",
        ),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES=7 leaves none of the 2 GPU(s)"),
    ],
)
def test_cards_that_are_listed_and_none_of_which_can_be_used_are_an_obstacle(
    tmp_path, driver, variables, said
):
    gpus, obstacle, _, _ = probed(tmp_path, LD_LIBRARY_PATH=driver, **variables)
    assert gpus == []
    assert said in obstacle
    assert "; fix: " in obstacle


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "none"])
def test_cards_that_a_variable_hides_are_no_obstacle(tmp_path, driver, value):
    gpus, obstacle, reason, _ = probed(tmp_path, LD_LIBRARY_PATH=driver, CUDA_VISIBLE_DEVICES=value)
    assert (gpus, obstacle) == ([], "")
    assert f'CUDA_VISIBLE_DEVICES="{value}" leaves 0 of 2' in reason
    hidden = {"FAKE_NVML_INIT": "18", "CUDA_VISIBLE_DEVICES": value}
    assert probed(tmp_path, LD_LIBRARY_PATH=driver, **hidden)[:2] == ([], "")


def test_one_card_that_works_is_enough(tmp_path, driver):
    gpus, obstacle, reason, cuda_driver = probed(
        tmp_path, LD_LIBRARY_PATH=driver, FAKE_NVML_CUDA="12040"
    )
    assert (gpus, obstacle, cuda_driver) == ([0, 2], "", "12.4")
    assert "GPU 1: GPU is lost" in reason


@pytest.mark.parametrize("visible", [None, "0,1", "1,0", "GPU-22", "GPU-2222,GPU-0"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_shown_to_the_ranks_are_the_first_cards_of_the_machine(
    tmp_path, driver, visible, count
):
    extra = {"LD_LIBRARY_PATH": driver} | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    before = json.loads(printed(tmp_path, PRINT_SHOWN.replace("COUNT", str(count)), **extra))
    seen, _, _, _ = probed(tmp_path, **{**extra, **before["variables"]})
    assert seen == before["indices"][:count]


@pytest.mark.parametrize(
    "place",
    [
        lambda root: cards.device(root, cards.NVIDIA, "0x030000", "nouveau"),
        lambda root: cards.device(root, cards.NVIDIA, "0x030200"),  # without outputs
        lambda root: cards.file(root, "dev/nvidia0"),
        lambda root: cards.file(root, "dev/nvidiactl"),
    ],
    ids=["nouveau", "no driver", "nvidia0", "nvidiactl"],
)
def test_an_nvidia_card_without_a_library_is_an_obstacle_that_names_where_it_was_seen(
    tmp_path, place
):
    root = place(tmp_path / "root")
    gpus, obstacle, _, _ = probed(tmp_path)
    assert gpus == []
    assert obstacle.startswith("an NVIDIA card is here (")
    assert "--gpus all" in obstacle
    where = next((f"/dev/{path.name}" for path in root.glob("dev/*")), "PCI 0000:00:00.0")
    assert where in obstacle
    assert probed(tmp_path, CUDA_VISIBLE_DEVICES="")[1] == ""


@pytest.mark.parametrize(
    ("vendor", "kind", "driver_name"),
    [
        (cards.INTEL, "0x030000", "i915"),
        (cards.NVIDIA, "0x040300", ""),
        (cards.NVIDIA, "0x030000", "vfio-pci"),
    ],
    ids=["another vendor", "the audio device of a card", "a virtual machine has it"],
)
def test_what_is_no_card_of_this_machine_is_no_obstacle(tmp_path, vendor, kind, driver_name):
    cards.device(tmp_path / "root", vendor, kind, driver_name)
    assert probed(tmp_path)[:2] == ([], "")


def test_a_machine_without_any_sign_of_a_card_trains_on_the_cpu(tmp_path, workspace):
    done = plan(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no GPU here: the small default model" in " ".join(done.stdout.split())


# ---- AMD
# ---------------------------------------------------------------------------


def test_a_radeon_that_no_tool_lists_is_an_obstacle(tmp_path):
    root = cards.device(tmp_path / "root", cards.AMD, "0x030000", "amdgpu", vram_gib=19.98)
    cards.file(root, "dev/kfd")
    gpus, obstacle, _, _ = probed(tmp_path)
    assert gpus == []
    assert "an AMD card is here (PCI 0000:00:00.0, driver amdgpu, 19.98 GiB)" in obstacle
    assert "install rocm-smi or amd-smi" in obstacle
    (root / "dev/kfd").unlink()
    assert "--device /dev/kfd --device /dev/dri" in probed(tmp_path)[1]
    assert probed(tmp_path, HIP_VISIBLE_DEVICES="")[1] == ""


def test_an_mi300_is_no_display_and_counts(tmp_path):
    cards.device(tmp_path / "root", cards.AMD, "0x120000", "amdgpu", vram_gib=192)
    assert "192.00 GiB" in probed(tmp_path)[1]


@pytest.mark.parametrize(
    ("vram_gib", "said"),
    [(0.5, "0.50 GiB of memory of its own"), (4, "4.00 GiB"), (None, "not known")],
)
def test_the_graphics_of_a_laptops_processor_refuse_nothing_and_are_named(tmp_path, vram_gib, said):
    root = cards.device(tmp_path / "root", cards.AMD, "0x030000", "amdgpu", vram_gib)
    cards.file(root, "dev/kfd")  # amdgpu makes it there as well
    gpus, obstacle, reason, _ = probed(tmp_path)
    assert (gpus, obstacle) == ([], "")
    assert said in reason


def test_a_radeon_whose_memory_rocm_smi_does_not_know_is_an_obstacle(tmp_path):
    program = tmp_path / "bin" / "rocm-smi"
    program.parent.mkdir()
    card = {
        "Card Series": "Radeon RX 7900 XT",
        "VRAM Total Memory (B)": "N/A",
        "VRAM Total Used Memory (B)": "N/A",
    }
    program.write_text(f"#!/bin/sh\necho '{json.dumps({'card0': card})}'\n")
    program.chmod(0o755)
    gpus, obstacle, _, _ = probed(tmp_path, PATH=f"{program.parent}:/usr/bin:/bin")
    assert gpus == []
    assert (
        "GPU 0 (Radeon RX 7900 XT): rocm-smi card0 does not say how much memory it has; fix: "
        in obstacle
    )


# ---- a card that this torch cannot use
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "variables", "said", "name"),
    [
        (
            ("2.13.0+cu130", "13.0", cards.CU130),
            {"CUDA": "12040"},
            "driver 550.54.15 serves CUDA up to 12.4",
            "cu126",
        ),
        (
            ("2.13.0+cu130", "13.0", cards.CU130),
            {"CAPABILITY": "7.0"},
            f"it has kernels for {cards.CU130}",
            "cu126",
        ),
        (("2.13.0+cu130", "13.0", cards.CU130), {"CAPABILITY": "6.1"}, "6.1", "cu126"),
        (("2.13.0+cpu", "", ""), {}, "it is a build for CPUs", "cu130"),
    ],
    ids=["old driver", "V100", "GTX 1080", "CPU build"],
)
def test_a_card_that_this_torch_cannot_use_is_refused_before_anything_is_made(
    tmp_path, workspace, driver, build, variables, said, name
):
    version, cuda, architectures = build
    site = cards.torch(tmp_path / "site", version, cuda, architectures=architectures)
    settings = {f"FAKE_NVML_{key}": value for key, value in variables.items()}
    python_path = f"{site}{os.pathsep}{builders.CODE}"
    done = plan(tmp_path, LD_LIBRARY_PATH=driver, PYTHONPATH=python_path, **settings)
    message = is_refused(done)
    assert f"torch {version} cannot use NVIDIA GeForce RTX 3080 (GPU 0" in message
    assert said in message
    word = f"LOWMEM_TORCH={name} " if torch_build.is_own_venv() else f"torch==2.13.0+{name} "
    assert word in message
    assert not (workspace / ".cache").exists()  # nothing was read, tokenised or traced


def test_a_link_test_that_fails_for_the_driver_ends_the_start_instead_of_going_on_with_one_card(
    tmp_path, workspace, driver
):
    # the plan sees a CUDA build; the children of the link test import the build that is really
    # installed
    site = cards.torch(tmp_path / "site", "2.13.0+cu130", "13.0", architectures=cards.CU130)
    if torch_build.installed() and "+cpu" not in str(torch_build.installed()):
        pytest.skip("needs an installed torch that cannot use a GPU")
    env = environment(
        tmp_path, LD_LIBRARY_PATH=driver, PYTHONPATH=f"{site}{os.pathsep}{builders.CODE}"
    )
    words = ("run", "sft_fast", "--dry-run", f"--data.train_file={workspace}/rows.jsonl")
    done = forked_starts.start((*words, "--data.validation_file=null"), env)
    said = is_refused(done)
    assert "link test: torch cannot use the GPUs with this driver: " in said
    assert "Torch not compiled with CUDA enabled" in said
    assert not (workspace / "runs").exists()


def test_doctor_stops_at_a_card_that_this_torch_cannot_use_and_names_the_build_that_can(
    tmp_path, workspace, driver
):
    site = cards.torch(tmp_path / "site", "2.13.0+cu130", "13.0", architectures=cards.CU130)
    variables = {"FAKE_NVML_CAPABILITY": "7.0", "FAKE_NVML_CUDA": "12040", "FAKE_NVML_COUNT": "1"}
    python_path = f"{site}{os.pathsep}{builders.CODE}"
    env = environment(tmp_path, LD_LIBRARY_PATH=driver, PYTHONPATH=python_path, **variables)
    done = forked_starts.start(("doctor",), env)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the driver serves CUDA up to 12.4" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem: torch")]
    assert "cu126" in line
    assert "make clean" not in done.stdout


def test_the_installed_build_is_read_as_torch_itself_says_it():
    code = """
import json, torch
from torch import cuda, version
releases = {
    name: {on: sorted(codes) for on, codes in by.items()}
    for name, by in cuda.PYTORCH_RELEASES_CODE_CC.items()
}
build = [torch.__version__, version.cuda or "", version.hip or "", cuda.get_arch_list()]
print(json.dumps([*build, releases]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, cuda, hip, architectures, releases = json.loads(done.stdout.splitlines()[-1])
    assert torch_build.installed() == torch_build.TorchBuild(
        version, cuda, hip, tuple(architectures)
    )
    for name, by_machine in torch_build.CUDA_BUILDS.items():  # its own table of published builds
        codes = releases[f"{name[2:4]}.{name[4:]}"]
        assert {on: [f"sm_{code}" for code in listed] for on, listed in codes.items()} == {
            on: names.split() for on, names in by_machine.items()
        }
