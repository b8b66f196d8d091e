"""The variables that reach the training processes."""

from __future__ import annotations

import pytest

from launch.base import environment

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "name",
    [
        *("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "PYTORCH_ALLOC_CONF", "HSA_OVERRIDE_GFX_VERSION"),
        *("ROCBLAS_TENSILE_LIBPATH", "HIPBLASLT_TENSILE_LIBPATH", "MIOPEN_FIND_MODE"),
    ],
)
def test_variables_of_the_cards_libraries_reach_the_ranks(name):
    assert environment.passed({name: "1", "HTTPS_PROXY": "http://me:secret@proxy"}) == {name: "1"}
