"""The GPUs as gpus.py finds them. Fakes are captured outputs, environments and programs on PATH.

tests/data/rocm-smi-*.txt: the RX 7900 XT is as posted in github.com/marimo-team/marimo/issues/9237;
the other two are that tool's JSON spelling of the CSV posted in mudler/LocalAI/pull/7761 and
easybuilders/easybuild-framework/pull/3978, unique ids made up and, for the MI100, the VRAM sizes.

tests/data/amd-smi-*.txt are cut to the sections that are asked for. The RX 6600 is as posted in
notes on a fan control script (an older amd-smi: a plain list, no gfx name), the RX 7800 XT as in
github.com/nathaninline/ajean/issues/39, `metric` of two 32 GB cards as in the tests of a Rust
parser of amd-smi; `static` of those two is that spelling with the R9700's names and gfx1201,
serials made up. tests/data/fake_amdsmi/ answers what AMD's amdsmi prints for an RX 9070 XT in the
guide to its own unit tests.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.probe import gpus
from launch.schema.machine import GIB, Gpu
from tests.builders import machine

pytestmark = pytest.mark.unit

DATA = Path(__file__).parents[2] / "data"
QUOTED_DATA = shlex.quote(str(DATA))
HIP_SECOND = {"HIP_VISIBLE_DEVICES": "1"}


def rocm_smi_program(folder: Path, script: str, name: str = "rocm-smi") -> dict[str, str]:
    """An environment whose only extra program is a rocm-smi (or other) that runs this shell
    script."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def listed(*uuids: str) -> list[tuple[str, Gpu]]:
    return [
        (uuid, Gpu(index, "RTX 3080", "nvidia", 20 * GIB, 19 * GIB, "8.6", "550", "test"))
        for index, uuid in enumerate(uuids)
    ]


def usable(env: dict[str, str]) -> tuple[tuple[Gpu, ...], str]:
    found = gpus.find(env)
    return found.gpus, found.reason


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,0", [1]),
        ("0,7,1", [0]),
        ("0,0", [0]),
        ("GPU-bbbb", [1]),
        ("GPU-c,GPU-aaaa-1", [2, 0]),
        ("GPU-", []),  # abbreviates all three
        ("GPU-dddd", []),
    ],
)
def test_cuda_visible_devices_selects_in_its_own_order_and_ends_at_the_first_stranger(
    value, indices
):
    chosen, said = gpus.visible(listed("GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"), value)
    assert [gpu.index for _, gpu in chosen] == indices
    assert said.startswith(f"leaves {len(indices)} of 3")


@given(st.permutations(range(6)), st.data())
def test_the_variables_of_a_run_name_its_first_cards_whatever_the_others_are(order, data):
    """Lost cards, cards that may not be opened and cards that MPS hides shift CUDA's numbers."""
    pairs = listed(*(f"GPU-{'abcdef'[number]}" for number in range(6)))
    pairs = [(uuid, replace(gpu, uuid=uuid)) for uuid, gpu in pairs]
    count = data.draw(st.integers(1, 6))
    shown = gpus.visible_devices(machine(cards=tuple(pairs[i][1] for i in order)), count)
    there = [pair for pair in pairs if pair[1].index in order[:count] or data.draw(st.booleans())]
    chosen, _ = gpus.visible(there, shown["CUDA_VISIBLE_DEVICES"])
    assert [gpu.index for _, gpu in chosen] == list(order[:count])


def test_an_empty_cuda_visible_devices_hides_every_gpu_and_says_so(tmp_path):
    env = rocm_smi_program(tmp_path, f"cat {QUOTED_DATA}/rocm-smi-6-rx7900xt.txt")
    found, reason = usable(env | {"CUDA_VISIBLE_DEVICES": ""})
    assert found == ()
    assert 'CUDA_VISIBLE_DEVICES="" leaves 0 of ' in reason


def test_rocm_6_spelling_is_parsed():
    ((_, gpu),) = gpus.parse_rocm_smi((DATA / "rocm-smi-6-rx7900xt.txt").read_text())
    free_bytes = 21_458_059_264 - 27_856_896
    assert gpu == Gpu(
        0, "Radeon RX 7900 XT", "amd", 21_458_059_264, free_bytes, "gfx1100", "", "rocm-smi card0"
    )


def test_rocm_5_spelling_is_parsed():
    (_, first), (_, second) = gpus.parse_rocm_smi((DATA / "rocm-smi-5-2xmi100.txt").read_text())
    assert (first.index, second.index) == (0, 1)
    assert first.name == "Arcturus GL-XL [AMD Instinct MI100]"
    assert first.driver == "4.18.0-348.12.2.el8_5.x86_64"
    assert first.architecture == ""  # ROCm 5 does not tell
    assert first.total_bytes - first.free_bytes == 7_028_736


def test_warnings_before_the_list_are_skipped():
    found = gpus.parse_rocm_smi((DATA / "rocm-smi-6-rx6800-and-igpu.txt").read_text())
    assert [gpu.architecture for _, gpu in found] == ["gfx1030", "gfx1036"]


@pytest.mark.parametrize("text", ["", "no GPUs", "[1, 2]", '{"card0": 3}', '{"card0": {', "{"])
def test_what_is_no_list_of_gpus_is_an_error(text):
    with pytest.raises(ValueError, match=r"Expecting|expected"):
        gpus.parse_rocm_smi(text)


def test_the_rocm_smi_on_path_is_asked(tmp_path):
    env = rocm_smi_program(tmp_path, f"cat {QUOTED_DATA}/rocm-smi-5-2xmi100.txt")
    pairs, reason = gpus.rocm_smi(env)
    assert [uuid for uuid, _ in pairs] == ["GPU-6bd1e1ca1bd4d2f5", "GPU-01c27d29e3b0a54e"]
    assert reason == f"{tmp_path}/rocm-smi lists 2"


@pytest.mark.parametrize(
    ("env", "cards"),
    [
        ({}, [(0, "card0"), (1, "card1")]),
        ({"HIP_VISIBLE_DEVICES": "1"}, [(1, "card1")]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [(1, "card1")]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [(0, "card0")]),
        # HIP counts what ROCR left
        ({"ROCR_VISIBLE_DEVICES": "GPU-01c27d29e3b0a54e"}, [(0, "card1")]),
        ({"ROCR_VISIBLE_DEVICES": "1,0"}, [(0, "card1"), (1, "card0")]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}, [(0, "card1")]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
    ],
)
def test_amd_gpus_are_selected_as_rocr_and_then_hip_do_and_numbered_as_hip_does(
    tmp_path, env, cards
):
    found, reason = usable(
        rocm_smi_program(tmp_path, f"cat {QUOTED_DATA}/rocm-smi-5-2xmi100.txt") | env
    )
    if found and found[0].vendor == "nvidia":
        pytest.skip("an NVIDIA GPU is here and goes first")
    assert [(gpu.index, gpu.reason) for gpu in found] == [
        (index, f"rocm-smi {card}") for index, card in cards
    ]
    assert ("_VISIBLE_DEVICES=" in reason) == bool(env)


@pytest.mark.parametrize("hidden", [{}, {"ROCR_VISIBLE_DEVICES": "1,0"}, HIP_SECOND])
@pytest.mark.parametrize("ids", [True, False])
def test_amd_cards_are_named_by_ids_that_survive_another_order(tmp_path, hidden, ids):
    env = rocm_smi_program(tmp_path, f"cat {QUOTED_DATA}/rocm-smi-5-2xmi100.txt") | hidden
    for node, unique in enumerate((0, 0x6BD1E1CA1BD4D2F5, 0x01C27D29E3B0A54E) if ids else ()):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"simd_count 240\nunique_id {unique}\n")
    found = gpus.find(env, tmp_path)
    if found.gpus[0].vendor == "nvidia":
        pytest.skip("an NVIDIA GPU is here and goes first")
    for count in range(1, len(found.gpus) + 1):
        shown = gpus.visible_devices(machine(cards=found.gpus), count)
        assert ("ROCR_VISIBLE_DEVICES" in shown) is ids
        again = gpus.find(env | shown, tmp_path).gpus
        assert [gpu.reason for gpu in again] == [gpu.reason for gpu in found.gpus[:count]]


def test_graphics_built_into_the_processor_is_left_out_and_named(tmp_path):
    found, reason = usable(
        rocm_smi_program(tmp_path, f"cat {QUOTED_DATA}/rocm-smi-6-rx6800-and-igpu.txt")
    )
    if found and found[0].vendor == "nvidia":
        pytest.skip("an NVIDIA GPU is here and goes first")
    assert [gpu.architecture for gpu in found] == ["gfx1030"]
    assert "GPU 1 (Raphael, 64.0 MiB) is too small to train on" in reason


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'ERROR:root:Driver not initialized (amdgpu not found in modules)' >&2; exit 1",
            "Driver not initialized",
        ),
        ("echo 'Segmentation fault'; exit 139", "exited with 139 and printed no list of GPUs"),
        ("exit 0", "printed no list of GPUs"),
        (r"printf '\377\376{'", "printed no list of GPUs"),
        ("""echo '{"card0": "broken"}'""", "expected an object of objects"),
    ],
)
def test_a_rocm_smi_that_prints_garbage_is_a_reason_and_no_exception(tmp_path, script, said):
    pairs, reason = gpus.rocm_smi(rocm_smi_program(tmp_path, script))
    assert pairs == []
    assert said in reason


def test_a_rocm_smi_that_hangs_is_killed_and_is_a_reason(tmp_path):
    env = rocm_smi_program(tmp_path, f"echo $$ > '{tmp_path}/pid'; exec sleep 600")
    start = time.monotonic()
    pairs, reason = gpus.rocm_smi(env, timeout_s=0.5)
    assert time.monotonic() - start < 60
    assert (pairs, reason) == ([], f"{tmp_path}/rocm-smi did not answer within 0.5 s")
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_rocm_smi_that_cannot_be_run_is_a_reason(tmp_path):
    env = rocm_smi_program(tmp_path, "")
    (tmp_path / "rocm-smi").write_text("#!/no/such/interpreter\n")
    assert gpus.rocm_smi(env) == ([], f"{tmp_path}/rocm-smi: No such file or directory")


def test_no_rocm_smi_on_path_is_a_reason(tmp_path):
    assert gpus.rocm_smi({"PATH": str(tmp_path)}) == ([], "no rocm-smi on PATH")


def amd_smi_program(folder: Path, card: str) -> dict[str, str]:
    """An environment with an amd-smi that prints what was captured of this card."""
    script = f"""
        case "$*" in
            "static --asic --driver --json") cat {QUOTED_DATA}/amd-smi-static-{card}.txt ;;
            "metric --mem-usage --json") cat {QUOTED_DATA}/amd-smi-metric-{card}.txt ;;
            *) echo "amd-smi: error: argument" >&2; exit 2 ;;
        esac"""
    return rocm_smi_program(folder, script, "amd-smi")


def test_amd_smi_is_asked_where_there_is_no_rocm_smi(tmp_path):
    found, reason = usable(amd_smi_program(tmp_path, "2xr9700"))
    if found and found[0].vendor == "nvidia":
        pytest.skip("an NVIDIA GPU is here and goes first")
    name, driver = "AMD Radeon AI PRO R9700", "6.14.14"
    assert found == (
        Gpu(0, name, "amd", 30_576 << 20, 10_126 << 20, "gfx1201", driver, "amd-smi GPU 0"),
        Gpu(1, name, "amd", 32_624 << 20, 32_567 << 20, "gfx1201", driver, "amd-smi GPU 1"),
    )
    assert reason.endswith(f"no rocm-smi on PATH; {tmp_path}/amd-smi lists 2")


def test_rocm_smi_goes_before_amd_smi(tmp_path):
    env = amd_smi_program(tmp_path, "2xr9700")
    rocm_smi_program(tmp_path, f"cat {QUOTED_DATA}/rocm-smi-6-rx7900xt.txt")
    found, _ = usable(env)
    if found and found[0].vendor == "nvidia":
        pytest.skip("an NVIDIA GPU is here and goes first")
    assert [gpu.architecture for gpu in found] == ["gfx1100"]


def test_a_plain_list_without_gfx_names_is_parsed(tmp_path):
    ((uuid, gpu),), reason = gpus.amd_smi(amd_smi_program(tmp_path, "rx6600"))
    assert reason == f"{tmp_path}/amd-smi lists 1"
    assert (uuid, gpu.architecture) == ("", "")
    assert (gpu.name, gpu.driver) == ("Navi 23 [Radeon RX 6600/6600 XT", "7.0.0-3-pve")
    assert (gpu.total_bytes, gpu.free_bytes) == (8176 << 20, 7974 << 20)


def amd_smi_that_prints(folder: Path, static: str, metric: str) -> dict[str, str]:
    (folder / "static.txt").write_text(static)
    (folder / "metric.txt").write_text(metric)
    return rocm_smi_program(folder, f"cat '{folder}'/\"$1\".txt", "amd-smi")


def test_warnings_of_amd_smi_are_skipped_and_its_serial_is_the_uuid(tmp_path):
    static = (DATA / "amd-smi-static-rx7800xt.txt").read_text()
    env = amd_smi_that_prints(tmp_path, static, '[{"gpu": 0, "mem_usage": "N/A"}]')
    ((uuid, gpu),), _ = gpus.amd_smi(env)
    assert (uuid, gpu.architecture, gpu.total_bytes) == ("GPU-4162405e51bb99b0", "gfx1101", 0)


@pytest.mark.parametrize(
    "text", ["", "no GPUs", "{}", '{"gpu_data": 3}', '[{"asic": {}}]', "[1]", "[{"]
)
def test_what_amd_smi_does_not_print_is_a_reason(tmp_path, text):
    listed, reason = gpus.amd_smi(amd_smi_that_prints(tmp_path, text, "[]"))
    assert listed == []
    assert "Expecting" in reason or "expected" in reason


def test_an_amd_smi_that_fails_is_a_reason(tmp_path):
    env = rocm_smi_program(
        tmp_path, "echo 'AMDSMI_STATUS_DRIVER_NOT_LOADED' >&2; exit 255", "amd-smi"
    )
    pairs, reason = gpus.amd_smi(env)
    assert pairs == []
    assert "exited with 255 and printed no list of GPUs" in reason
    assert reason.endswith("AMDSMI_STATUS_DRIVER_NOT_LOADED")


def test_the_amdsmi_library_goes_first(tmp_path):
    code = "import os; from launch.probe import gpus; print(gpus._amd(os.environ))"
    env = rocm_smi_program(tmp_path, f"cat {QUOTED_DATA}/rocm-smi-6-rx7900xt.txt")
    env |= {"PYTHONPATH": f"{DATA / 'fake_amdsmi'}{os.pathsep}{DATA.parents[1]}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    serial = "GPU-ce5d239fe548af74"
    gpu = Gpu(
        0,
        "AMD Radeon RX 9070 XT",
        "amd",
        16_304 << 20,
        16_000 << 20,
        "gfx1201",
        "6.14.14",
        "amdsmi 0",
    )
    assert done.stdout.strip() == str(([(serial, gpu)], "amdsmi lists 1"))
