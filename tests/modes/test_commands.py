"""The guides' commands, and every file of configs/accelerate by hand: one training, and each rank
says what it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.schema.modes import LAUNCH_MODES
from tests import builders

FLAGS = [
    "--model.shape=llama-tiny",
    "--training.max_steps=3",
    "--training.logging_steps=1",
    "--training.bf16=false",
    "--training.gradient_accumulation_steps=1",
    "--data.max_length=64",
    "--data.validation_file=null",
    "--evaluation.exact_match_rows=0",
]
GUIDES = ["train", "--is_finetune=True", "--use_fast_config=True", "--data.max_train_samples=48"]
GLOO = re.compile(r"rank (\d) of 2 on \S+: cpu, backend gloo \(torch.distributed\)")


def run(argv: list[str], workspace: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """A command to its end, from the checkout."""
    env = builders.environment(workspace, PYTHON=sys.executable, **extra)
    return subprocess.run(
        argv, env=env, cwd=builders.CODE, capture_output=True, text=True, timeout=120
    )


def accelerate(*words: str) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", *words, "train_low_mem.py", *GUIDES]


def losses(workspace: Path) -> list[float]:
    return [event["loss"] for event in builders.events(builders.only_run(workspace, "sft_fast"))]


def test_the_four_commands_of_the_guide_are_one_training_over_gloo(tmp_path):
    train = builders.write_parquet(tmp_path / "train.parquet", builders.rows(48))
    ours = [f"--data.train_file={train}", "--launch.num_processes=2", *FLAGS]
    theirs = [*accelerate("--multi_gpu", "--num_processes", "2"), f"--train_file={train}", *FLAGS]
    commands = {
        "quick": (
            ["./quick_start_sft_fast.sh", *ours, "--training.per_device_train_batch_size=8"],
            {},
        ),
        "custom": (["./train_sft_custom.sh", "8", *ours], {}),
        "accelerate": ([*theirs, "--batch_size_per_gpu=8"], {}),
        "gloo": ([*theirs, "--batch_size_per_gpu=8"], {"ACCELERATE_USE_GLOO": "1"}),
    }
    found = {}
    for name, (argv, extra) in commands.items():
        workspace = tmp_path / name
        done = run(argv, workspace, **extra)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        log = builders.only_run(workspace, "sft_fast") / "attempts/01/log.txt"
        said = done.stdout + (log.read_text() if log.exists() else "")
        assert set(GLOO.findall(said)) == {"0", "1"}, f"{name}: {said}"
        found[name] = losses(workspace)
    assert len(found["quick"]) == 3
    assert all(values == found["quick"] for values in found.values()), found


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, list[float]]:
    """The rows, and the losses of one process on them at an effective batch of 8."""
    folder = tmp_path_factory.mktemp("plain")
    recipe = builders.recipe(
        folder, count=48, training={"max_steps": 3, "warmup_steps": 100, "learning_rate": 5e-5}
    )
    done = builders.launch(folder / "h", "run", str(recipe), "--data.validation_file=null")
    assert done.returncode == 0, done.stdout + done.stderr
    events = builders.events(builders.only_run(folder / "h"))
    return folder / "train.parquet", [event["loss"] for event in events]


# the others are another stage of the same engine, or another card's ranks on the same backend
OFTEN = ("cpu", "dual_gpu_gloo", "deepspeed_zero2", "deepspeed_zero3_offload")


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=() if mode in OFTEN else pytest.mark.campaign)
        for mode in LAUNCH_MODES
        if mode != "fsdp2"
    ],
)
def test_each_file_of_configs_trains_without_our_launcher(tmp_path, plain, mode):
    """Without a GPU the ranks of the GPU files run on the CPU, and say so."""
    train, expected = plain
    ranks = 1 if mode in ("cpu", "single_gpu") else 2
    argv = accelerate("--config_file", f"configs/accelerate/{mode}.yaml")
    done = run(
        [*argv, f"--train_file={train}", f"--batch_size_per_gpu={8 // ranks}", *FLAGS],
        tmp_path / "h",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if ranks == 2:
        assert set(GLOO.findall(done.stdout)) == {"0", "1"}, done.stdout
    assert "= 8 effective" in done.stdout
    assert losses(tmp_path / "h") == pytest.approx(expected, rel=1e-5)


def test_torchrun_takes_the_mode_of_the_recipe(tmp_path, plain):
    train, expected = plain
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "train_low_mem.py",
        *GUIDES,
        *FLAGS,
    ]
    mode = ["--launch.mode=deepspeed_zero2", "--batch_size_per_gpu=4", f"--train_file={train}"]
    done = run([sys.executable, *words, *mode], tmp_path / "h")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deepspeed_zero2, backend gloo" in done.stdout
    assert losses(tmp_path / "h") == pytest.approx(expected, rel=1e-5)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]


@pytest.mark.parametrize(
    ("starter", "mode"),
    [
        ([], "deepspeed_zero2"),
        (TORCHRUN, "auto"),
        pytest.param([], "auto", marks=pytest.mark.campaign),
        pytest.param(TORCHRUN, "deepspeed_zero2", marks=pytest.mark.campaign),
    ],
)
def test_one_rank_trains_however_it_is_started(tmp_path, plain, starter, mode):
    train, expected = plain
    words = [
        *starter,
        "train_low_mem.py",
        *GUIDES,
        *FLAGS,
        f"--launch.mode={mode}",
        "--batch_size_per_gpu=8",
    ]
    done = run([sys.executable, *words, f"--train_file={train}"], tmp_path / "h")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "h") == pytest.approx(expected, rel=1e-5)


def test_a_wrong_key_in_a_deepspeed_file_is_one_line(tmp_path, plain):
    file = tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 2, "nonsense": 3}}')
    argv = accelerate(
        "--use_deepspeed", "--deepspeed_config_file", str(file), "--num_processes", "1"
    )
    done = run([*argv, f"--train_file={plain[0]}", *FLAGS], tmp_path / "h")
    assert done.returncode != 0
    assert (
        "error: the DeepSpeed file's zero_optimization: nonsense: Extra inputs are not permitted"
        in done.stderr
    )


def test_the_file_of_fsdp2_is_refused_without_gpus_with_the_reason(tmp_path):
    train = builders.write_parquet(tmp_path / "train.parquet", builders.rows(48))
    argv = accelerate("--config_file", "configs/accelerate/fsdp2.yaml")
    done = run([*argv, f"--train_file={train}", *FLAGS], tmp_path / "h")
    assert done.returncode != 0
    assert "on CPUs Accelerate leaves FSDP out" in done.stderr


@pytest.mark.parametrize("slow", [0, 1])
def test_what_every_rank_finds_is_said_once_whichever_ends_first(tmp_path, slow):
    train = [
        "train_low_mem.py",
        "train",
        "--is_finetune=True",
        f"--train_file={tmp_path}/none.parquet",
        *FLAGS,
    ]
    late = f'[ "$RANK" != {slow} ] || sleep 4; exec "$@"'
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    done = run([*torchrun, "bash", "-c", late, "bash", sys.executable, *train], tmp_path / "h")
    assert done.returncode != 0
    assert (
        re.findall("(?m)^error: .*none.parquet", done.stderr) and done.stderr.count("error: ") == 1
    ), done.stderr
    assert "to continue" not in done.stderr, done.stderr


def test_a_hostile_default_configuration_of_accelerate_changes_nothing_and_is_not_written(
    tmp_path, plain
):
    """accelerate merges it into a launch without --config_file, which the guide's line is."""
    train, expected = plain
    default = tmp_path / "hf/accelerate/default_config.yaml"
    default.parent.mkdir(parents=True)
    hostile = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision:"
        " bf16\nnum_processes: 7\ndynamo_config: {dynamo_backend: INDUCTOR}\nfsdp_config:"
        " {fsdp_version: 1}\nuse_cpu: false\n"
    )
    default.write_text(hostile)
    theirs = [*accelerate("--multi_gpu", "--num_processes", "2"), f"--train_file={train}", *FLAGS]
    ours = [
        "./train_sft_custom.sh",
        "4",
        f"--data.train_file={train}",
        "--launch.num_processes=2",
        *FLAGS,
    ]
    hostile_home = {"HF_HOME": str(tmp_path / "hf"), "ACCELERATE_USE_CPU": "true"}
    for name, argv in (("theirs", [*theirs, "--batch_size_per_gpu=4"]), ("ours", ours)):
        done = run(argv, tmp_path / name, **hostile_home)
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5)
    assert default.read_text() == hostile
    assert [path.name for path in default.parent.iterdir()] == [default.name]
