"""A number that is not finite ends the run with 8, names where it stands, and reaches no checkpoint
and no model.

The faults are real: a model whose weights are finite, in which one rare character (BAD) overflows
float32 on the way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from launch.schema.model_sections import TokenizerSection
from tests import builders
from training.data import tokenizer
from training.data.sample_order import SampleOrder
from training.loop import nan_guard

BAD = "~"  # in no other row
SEED = 23333
ROWS, BATCH = 60, 4
HUGE = 3e38  # finite; the sum of two is not


def base(folder: Path, kind: str) -> Path:
    """A model folder in which BAD gives a NaN loss, a finite loss with NaN gradients, or one that
    is far too large."""
    texts = [f"{row['prompt']} {row['response']}" for row in builders.rows(ROWS)]
    cut = tokenizer.train(iter(texts), TokenizerSection(), 400)
    cut.save_pretrained(folder)
    bad = cut.convert_tokens_to_ids(BAD)
    torch.manual_seed(0)
    if kind == "gradient":
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        config = LlamaConfig(
            vocab_size=len(cut), num_key_value_heads=2, tie_word_embeddings=False, **sizes
        )
    else:
        config = GPT2Config(
            vocab_size=len(cut), n_embd=32, n_layer=1, n_head=2, tie_word_embeddings=False
        )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if kind == "gradient":
        # a root mean square of infinity: x / inf is 0
        weights["model.embed_tokens.weight"][bad] = HUGE
    elif kind == "loss":
        weights["transformer.wte.weight"][bad] = HUGE  # a mean of infinity
    elif kind == "overflow":
        weights["transformer.wpe.weight"][-1] = -1.2e4  # a position that no row reaches
    else:
        weights["transformer.ln_f.bias"][0] = 10.0  # far from what is normalised
        # BAD is never expected: where it is the target the loss is 1e7
        weights["lm_head.weight"][bad, 0] = -1e6
    assert nan_guard.all_finite(weights.values())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def row_of(step: int, rank: int, ranks: int) -> int:
    return SampleOrder(ROWS, BATCH // ranks, 1, ranks, rank, SEED).rows_of(step, [0])[0]


def launched(
    folder: Path,
    kind: str,
    bad: int | list[int] | None,
    *words: str,
    mode: str = "cpu",
    ranks: int = 1,
    column: str = "prompt",
    **sections,
) -> subprocess.CompletedProcess[str]:
    """A run on rows of which those numbered `bad` hold BAD (None: a held-out one)."""
    training = {
        "per_device_train_batch_size": BATCH // ranks,
        "num_train_epochs": 1,
        "save_steps": 3,
        "optim": "adamw_torch",
    }
    sections["training"] = {
        **training,
        "warmup_steps": 0,
        "learning_rate": 1e-4,
        **sections.get("training", {}),
    }
    recipe = builders.recipe(folder, count=ROWS, launch={"num_processes": ranks}, **sections)
    rows, held_out = builders.rows(ROWS), builders.rows(10, seed=1)
    for guilty in (
        [held_out[6]]
        if bad is None
        else [rows[at] for at in ([bad] if isinstance(bad, int) else bad)]
    ):
        guilty[column] = f"{BAD} {guilty[column]}"
    builders.write_parquet(folder / "train.parquet", rows)
    builders.write_parquet(folder / "valid.parquet", held_out)
    path = base(folder / "base", kind)
    argv = [
        sys.executable,
        "-m",
        "tests.modes.launch_one",
        mode,
        str(recipe),
        f"--model.path={path}",
        *words,
    ]
    environment = builders.environment(folder / "workspace")
    return subprocess.run(
        argv, env=environment, cwd=builders.CODE, capture_output=True, text=True, timeout=300
    )


def checkpoints(folder: Path) -> list[str]:
    """The names of those that there are, once all their tensors are known to be finite."""
    run = builders.only_run(folder / "workspace")
    found = sorted(run.glob("checkpoints/checkpoint-*"))
    for one in found:
        for file in one.rglob("*"):
            if file.suffix == ".safetensors":
                assert nan_guard.all_finite(load_file(file).values())
            elif file.name == "optimizer.pt":
                states = torch.load(file, weights_only=True)["state"]
                assert nan_guard.all_finite(
                    value for state in states.values() for value in state.values()
                )
    return [one.name for one in found]


def is_said(done: subprocess.CompletedProcess[str], folder: Path, *words: str) -> None:
    assert done.returncode == 8, done.stdout + done.stderr
    run = builders.only_run(folder / "workspace")
    outcome = json.loads((run / "attempts/01/supervisor.json").read_text())
    assert (outcome["exit_code"], outcome["failure"]["kind"]) == (8, "NonFinite")
    assert "Traceback" not in done.stdout + done.stderr
    (log,) = (folder / "workspace/logs").glob("*.log")
    for word in words:
        assert word in done.stdout, done.stdout
        assert word in log.read_text()
    assert not (folder / "model").exists()


@pytest.mark.shows(
    "F32", "a row whose loss or gradient overflows, on one rank at step 8; the row is named"
)
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("cpu", 1),
        pytest.param("multi_cpu", 2, marks=pytest.mark.fast_faults),
        ("deepspeed_zero1", 2),
        ("deepspeed_zero2", 2),
        ("deepspeed_zero3", 2),
        ("fsdp2", 2),
    ],
)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_ends_all_before_the_step_and_names_the_rows(
    tmp_path, kind, mode, ranks
):
    guilty = row_of(step=8, rank=ranks - 1, ranks=ranks)
    done = launched(tmp_path, kind, guilty, mode=mode, ranks=ranks)
    what = (
        f"the loss is nan on rank {ranks - 1} (micro-batch 1)"
        if kind == "loss"
        else "every loss is finite"
    )
    is_said(done, tmp_path, "step 8: ", what)
    assert "--training.learning_rate=5e-05 --resume never" in done.stdout
    assert checkpoints(tmp_path) == ["checkpoint-000003", "checkpoint-000006"]
    assert [
        event["step"] for event in builders.events(builders.only_run(tmp_path / "workspace"))
    ] == list(range(1, 8))
    run = builders.only_run(tmp_path / "workspace")
    shown = json.loads((run / "attempts/01/nonfinite.json").read_text())
    assert [BAD in row["text"] for row in shown["rows"] if row["row"] == guilty] == [True]
    assert len(shown["rows"]) == (BATCH // ranks if kind == "loss" else BATCH)


@pytest.mark.shows("F32", "a held-out row whose loss overflows; the step is named")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_held_out_loss_that_is_not_finite_ends_the_run_before_that_step_is_saved(tmp_path, ranks):
    mode = "cpu" if ranks == 1 else "multi_cpu"
    training = {"eval_steps": 6}
    done = launched(tmp_path, "loss", None, mode=mode, ranks=ranks, training=training)
    is_said(done, tmp_path, "step 6: the held-out loss is nan; rows ")
    assert checkpoints(tmp_path) == ["checkpoint-000003"]


@pytest.mark.shows("F32", "a step that makes float16 weights infinite; the weight is named")
def test_weights_that_a_step_made_infinite_are_never_saved(tmp_path):
    """Half-precision weights hold 65,504 at most; SGD's weight decay at rate 10 makes -12,000 nine
    times as much."""
    training = {
        "optim": "sgd",
        "learning_rate": 10,
        "warmup_steps": 1,
        "weight_decay": 1,
        "save_steps": 1,
    }
    words = ["--model.dtype=float16"]
    done = launched(
        tmp_path, "overflow", row_of(12, 0, 1), *words, column="response", training=training
    )
    is_said(
        done, tmp_path, "step 2: not finite, so no checkpoint is written: transformer.wpe.weight"
    )
    assert checkpoints(tmp_path) == ["checkpoint-000001"]


@pytest.mark.shows("F33", "a row with a loss of 1e7; the step is named")
def test_a_spike_is_warned_about_and_trained_on(tmp_path):
    guilty = row_of(step=13, rank=0, ranks=1)
    done = launched(tmp_path, "spike", guilty, column="response")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 13: the gradient norm" in done.stdout
    assert "step 13: the loss" in done.stdout
    assert "numerics.skip_spikes_above would skip such a step" in done.stdout


@pytest.mark.shows(
    "F33", "a row with a loss of 1e7 and numerics.skip_spikes_above; the step is named"
)
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [("cpu", 1), ("multi_cpu", 2), ("deepspeed_zero2", 2), ("deepspeed_zero3", 2), ("fsdp2", 2)],
)
def test_a_spike_is_skipped_where_that_is_asked_for_and_the_weights_stay(tmp_path, mode, ranks):
    guilty = row_of(step=13, rank=0, ranks=ranks)
    training = {"save_steps": 1, "max_steps": 13, "lr_scheduler_type": "constant"}
    words = ["--numerics.skip_spikes_above=50"]
    done = launched(
        tmp_path,
        "spike",
        guilty,
        *words,
        mode=mode,
        ranks=ranks,
        column="response",
        training=training,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 13 is skipped: the gradient norm" in done.stdout
    run = builders.only_run(tmp_path / "workspace")
    if mode in ("cpu", "multi_cpu"):
        before, after = (
            load_file(run / f"checkpoints/checkpoint-{n:06d}/model.safetensors") for n in (12, 13)
        )
        assert all(torch.equal(before[name], after[name]) for name in before)
        states = [
            torch.load(run / f"checkpoints/checkpoint-{n:06d}/optimizer.pt")["state"]
            for n in (12, 13)
        ]
        assert all(
            torch.equal(one["exp_avg"], states[1][key]["exp_avg"]) for key, one in states[0].items()
        )
    else:
        left = load_file(tmp_path / "model/model.safetensors")
        other = launched(
            tmp_path / "b",
            "spike",
            guilty,
            *words,
            mode=mode,
            ranks=ranks,
            column="response",
            training={**training, "max_steps": 12},
        )
        assert other.returncode == 0, other.stdout + other.stderr
        twelve = load_file(tmp_path / "b/model/model.safetensors")
        assert all(torch.equal(left[name], twelve[name]) for name in left)


@pytest.mark.shows("F33", "five such rows in a row; the steps are named")
def test_steps_that_stay_far_too_large_end_the_run(tmp_path):
    guilty = [row_of(step, 0, 1) for step in range(11, 16)]
    done = launched(tmp_path, "spike", guilty, "--numerics.skip_spikes_above=50", column="response")
    is_said(done, tmp_path, "step 14 is skipped", "step 15: the gradient norm", "5 steps in a row")
