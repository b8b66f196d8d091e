"""Which build of torch serves which card, with which driver, and the line that installs it."""

from __future__ import annotations

import platform
import re

import pytest

from launch.probe import torch_build
from launch.probe.torch_build import TorchBuild
from tests import cards
from tests.builders import CODE, gpu

pytestmark = pytest.mark.unit

CU130 = TorchBuild("2.13.0+cu130", cuda="13.0", architectures=tuple(cards.CU130.split()))
ROCM = TorchBuild(
    "2.13.0+rocm7.2", hip="7.2.1", architectures=tuple(torch_build.ROCM_BUILD.split())
)
on_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the builds for aarch64 serve other cards"
)


@pytest.mark.parametrize(
    ("capability", "names", "is_served"),
    [
        ("8.6", "sm_86", True),
        ("8.9", "sm_86", True),  # code of a lower minor version
        ("8.0", "sm_86", False),  # not of a higher one
        ("9.0", "sm_86", False),
        ("7.0", cards.CU130, False),  # V100
        ("6.1", cards.CU130, False),  # GTX 1080
        ("6.1", "sm_50 sm_60 sm_70", True),
        ("5.2", "sm_50 sm_60 sm_70", True),
        ("12.1", cards.CU130, True),  # GB10
        ("10.3", cards.CU130, True),
        ("8.7", cards.CU130, False),  # Orin runs its own code only
        ("8.7", "sm_87", True),
        ("11.0", "sm_101", True),  # one chip, renumbered
        ("9.0", "sm_90a", True),
        ("9.1", "sm_90a", False),
        ("10.3", "sm_100f", True),
        ("12.0", "sm_90 compute_90", True),
        ("8.0", "sm_90 compute_90", False),
        ("", "sm_86", True),  # unknown
    ],
)
def test_code_runs_on_cards_of_its_major_version_that_are_not_older(capability, names, is_served):
    assert torch_build.serves(names.split(), gpu(architecture=capability)) is is_served


def test_ptx_needs_a_driver_as_new_as_the_build():
    newer = gpu(architecture="13.0")
    build = TorchBuild("2.13.0+cu126", cuda="12.6", architectures=("sm_90", "compute_90"))
    assert torch_build.refusal(build, [newer], "12.8", {}) == ""
    assert "it has kernels for sm_90 compute_90" in torch_build.refusal(build, [newer], "12.4", {})


@pytest.mark.parametrize("driver", ["13.0", "13.2", "14.0", ""])
def test_a_driver_of_the_same_major_version_or_a_newer_one_serves_a_build(driver):
    assert torch_build.refusal(CU130, [gpu()], driver, {}) == ""


@on_x86
@pytest.mark.parametrize(
    ("build", "card", "driver", "said", "name"),
    [
        (
            CU130,
            gpu(architecture="8.6"),
            "12.8",
            "serves CUDA up to 12.8, this build needs 13.x (580 or newer)",
            "cu126",
        ),
        (CU130, gpu(architecture="7.0"), "13.0", f"it has kernels for {cards.CU130}", "cu126"),
        (ROCM, gpu(), "13.0", "it is a build for AMD cards", "cu130"),
        (ROCM, gpu(), "12.4", "it is a build for AMD cards", "cu126"),
        (TorchBuild("2.13.0+cpu"), gpu(), "13.0", "it is a build for CPUs", "cu130"),
        (
            CU130,
            gpu(vendor="amd", architecture="gfx1100"),
            "",
            "it is a build for NVIDIA cards",
            "rocm",
        ),
        (
            TorchBuild("2.13.0+cpu"),
            gpu(vendor="amd", architecture="gfx90a:sramecc+:xnack-"),
            "",
            "for CPUs",
            "rocm",
        ),
        (TorchBuild("2.13.0+cpu"), gpu(vendor="amd", architecture=""), "", "for CPUs", "rocm"),
    ],
)
def test_the_build_that_serves_the_card_is_named_with_the_line_that_installs_it(
    build, card, driver, said, name
):
    message = torch_build.refusal(build, [card], driver, {})
    assert message.startswith(f"torch {build.version} cannot use RTX 3080 (GPU 0, ")
    assert said in message
    word = "rocm7.2" if name == "rocm" else name
    in_own = f"pip install torch==2.13.0+{word} --index-url https://download.pytorch.org/whl/{word}"
    in_venv = f"LOWMEM_TORCH={name} {CODE}/scripts/install.sh"
    assert message.endswith(in_venv if torch_build.is_own_venv() else in_own)


@on_x86
@pytest.mark.parametrize(
    ("card", "driver", "said"),
    [
        # no cu126 for it
        (gpu(architecture="12.0"), "12.8", "fix: update the NVIDIA driver to 580 or newer, then "),
        (gpu(architecture="6.1"), "11.4", "fix: update the NVIDIA driver to 525 or newer, then "),
        (
            gpu(architecture="3.7"),
            "11.4",
            "no build of torch 2.13 has kernels for it; train on the CPU",
        ),
    ],
)
def test_where_no_build_goes_with_card_and_driver_what_else_helps_is_said(card, driver, said):
    assert said in torch_build.refusal(CU130, [card], driver, {})


@on_x86
def test_of_cards_that_no_one_build_serves_the_user_is_told_to_leave_some_out():
    message = torch_build.refusal(
        CU130, [gpu(0, architecture="12.0"), gpu(1, architecture="7.0")], "13.0", {}
    )
    assert "(GPU 1, 7.0)" in message
    assert "leave some out with CUDA_VISIBLE_DEVICES" in message
    assert "cu126" in message


def test_a_radeon_without_kernels_of_its_own_is_refused_unless_it_is_run_as_another():
    card = gpu(vendor="amd", architecture="gfx1032")
    message = torch_build.refusal(ROCM, [card], "", {})
    assert "it has kernels for gfx900 " in message
    assert "HSA_OVERRIDE_GFX_VERSION" in message
    assert torch_build.refusal(ROCM, [card], "", {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}) == ""
    assert torch_build.refusal(ROCM, [gpu(vendor="amd", architecture="gfx1201")], "", {}) == ""


def test_nothing_is_refused_without_a_card_or_without_torch():
    assert torch_build.refusal(TorchBuild("2.13.0+cpu"), [], "", {}) == ""
    assert torch_build.refusal(None, [gpu()], "", {}) == ""


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "architectures"),
    [
        ("2.13.0+cu130", "13.0", "", cards.CU130),
        ("2.13.0+rocm7.2", "", "7.2.26015", "gfx900 gfx90a gfx1100"),
        ("2.13.0+cu126", "12.6", "", "sm_90"),
        ("2.13.0a0+nv26.8", "13.2", "", "sm_75 sm_90a compute_120"),  # as a vendor's container has
        ("2.13.0+cpu", "", "", ""),
    ],
)
def test_a_build_is_read_from_its_folder_without_an_import(
    tmp_path, version, cuda, hip, architectures
):
    folder = cards.torch(tmp_path, version, cuda, hip, architectures) / "torch"
    assert torch_build.read(folder) == TorchBuild(version, cuda, hip, tuple(architectures.split()))
    (folder / "lib" / "libtorch_python.so").write_bytes(b"")
    assert torch_build.read(folder) == TorchBuild(version, cuda, hip, ())


@pytest.mark.parametrize("content", [None, "", "__version__ = ", "x = 1\n"])
def test_a_folder_that_is_no_torch_is_no_build(tmp_path, content):
    if content is not None:
        (tmp_path / "version.py").write_text(content)
    assert torch_build.read(tmp_path) is None


def test_the_bootstrap_knows_every_build_that_messages_name():
    text = (CODE / "scripts" / "lib" / "bootstrap.sh").read_text()
    names = re.search(r"^LOWMEM_TORCH_BUILDS=\((.*)\)$", text, re.MULTILINE)
    assert names
    assert {*torch_build.CUDA_BUILDS, "rocm", "cpu", "default"} == set(names[1].split())
    assert f"_LOWMEM_ROCM={torch_build.ROCM_FOLDER} " in text
