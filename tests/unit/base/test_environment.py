"""The variables that reach the training processes."""

from __future__ import annotations

import socket

import pytest

from launch.base import environment
from launch.base.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "name",
    [
        *("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "PYTORCH_ALLOC_CONF", "HSA_OVERRIDE_GFX_VERSION"),
        *("ROCBLAS_TENSILE_LIBPATH", "HIPBLASLT_TENSILE_LIBPATH", "MIOPEN_FIND_MODE"),
        *("HF_HOME", "HF_ENDPOINT", "TORCH_LOGS", "TORCH_COMPILE_CACHE_KEY_TAG", "TORCHDYNAMO_X"),
        *("LOWMEM_ROOT", "PYTHONPATH", "SLURM_JOB_ID", "GLOO_SOCKET_IFNAME", "FI_PROVIDER"),
    ],
)
def test_variables_of_the_libraries_reach_the_ranks(name):
    assert environment.passed({name: "1", "HTTPS_PROXY": "http://me:secret@proxy"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HF_AUTH", "HF_KEY", "HF_PAT", "HF_PASSPHRASE", "HF_APITOKEN", "CUDA_KEY"),
        *("LOWMEM_SMTP_PASS", "LOWMEM_PASSWORD", "TORCH_ANYTHING", "TRANSFORMERS_MINE"),
        *("SLURM_JWT", "NCCL_API_KEY", "OMP_SECRET", "PYTHON_CREDENTIALS", "FI_AUTH_KEY"),
        *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_secrets_and_unknown_variables_reach_the_ranks_only_if_the_user_names_them(name):
    assert environment.passed({name: "value"}) == {}
    assert environment.passed({name: "value"}, [name]) == {name: "value"}


@pytest.mark.parametrize("value", ["https://me:hunter2@mirror.example", "Bearer 0123456789abcdef"])
def test_a_known_variable_with_a_secret_in_its_value_stays_here(value):
    assert environment.passed({"HF_ENDPOINT": value}) == {}
    assert environment.passed({"HF_ENDPOINT": "https://mirror.example"})


def test_names_that_are_not_passed_are_told_apart_from_secrets():
    variables = dict.fromkeys(("TORCH_X", "HF_Y", "HF_TOKEN", "CUDA_KEY", "HF_HOME", "MY_VAR"), "1")
    assert environment.unknown(variables) == ["HF_Y", "TORCH_X"]
    assert environment.unknown(variables, ["HF_Y"]) == ["TORCH_X"]


@pytest.mark.parametrize(
    ("variables", "backend", "message"),
    [
        ({"OMP_NUM_THREADS": "all"}, None, "OMP_NUM_THREADS=all: expected a number"),
        ({"OMP_NUM_THREADS": "0"}, "gloo", "OMP_NUM_THREADS=0: expected a number"),
        ({"OMP_NUM_THREADS": "4"}, "gloo", ""),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "gloo", "GLOO_SOCKET_IFNAME=ib0: this machine has no"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "nccl", "has no such interface, it has lo, eth7; unset"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, None, ""),  # one process has no use for it
        ({"GLOO_SOCKET_IFNAME": "ib0,lo"}, "gloo", ""),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "nccl", "NCCL_SOCKET_IFNAME=ib: this machine has no"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "gloo", ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "nccl", ""),
        ({"NCCL_SOCKET_IFNAME": "=eth7"}, "nccl", ""),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "nccl", ""),
    ],
)
def test_variables_of_another_machine_are_named(variables, backend, message, monkeypatch):
    # interfaces of a machine of which each name is known
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    if not message:
        environment.check(variables, backend)
        return
    with pytest.raises(ConfigError, match=message):
        environment.check(variables, backend)


def test_variables_of_another_launcher_are_not_passed():
    variables = {"PMI_SIZE": "2", "PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "HOME": "/h"}
    assert environment.passed(variables) == {"HOME": "/h"}
    assert environment.of_another_launcher(variables) == sorted({*variables} - {"HOME"})
