"""On text that people wrote: Chinese chat as in the T5 guide, grade-school maths in English."""

from __future__ import annotations

import pytest

from tests import builders

pytestmark = [pytest.mark.real_data, pytest.mark.modes]


def falls(steps: list[dict]) -> float:
    """Mean loss of the last five steps over that of the first five."""
    losses = [event["loss"] for event in steps]
    return sum(losses[-5:]) / sum(losses[:5])


def test_two_gloo_ranks_lower_the_loss_of_a_t5_on_the_chinese_parquet(tmp_path, real_data):
    done = builders.accelerate(
        tmp_path / "h",
        *("--multi_gpu", "--num_processes", "2", str(builders.CODE / "train_low_mem.py"), "train"),
        *(
            "--is_finetune=True",
            "--use_fast_config=True",
            "--batch_size_per_gpu=8",
            "--max_seq_len=128",
        ),
        f"--train_file={real_data / 'chatlm_sft_train_3k.parquet'}",
        f"--validation_file={real_data / 'chatlm_sft_valid_1k.parquet'}",
        *("--model.shape=t5-tiny", "--model.freeze=[shared, encoder]", "--training.max_steps=40"),
        *(
            "--training.learning_rate=5e-3",
            "--training.warmup_steps=5",
            "--data.max_validation_samples=100",
        ),
        ACCELERATE_USE_GLOO="1",
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 on" in done.stdout
    assert "backend gloo (torch.distributed)" in done.stdout
    steps = builders.events(builders.only_run(tmp_path / "h", "sft_fast"))
    assert len(steps) == 40
    assert falls(steps) < 0.97


def test_a_small_decoder_with_lora_lowers_its_loss_on_gsm8k_with_the_columns_the_user_names(
    tmp_path, real_data
):
    """The decoder first reads the questions (pretraining), then LoRA learns to answer on top of
    it."""
    file = {
        "train_file": str(real_data / "gsm8k_train.jsonl"),
        "validation_file": None,
        "max_length": 128,
    }
    limit = {"max_train_samples": 300}
    base = builders.recipe(
        tmp_path / "base",
        task="pretrain",
        data={**file, **limit, "text_column": "question"},
        training={"max_steps": 40, "learning_rate": 5e-3, "save_steps": 1000},
    )
    assert builders.launch(tmp_path / "h", "run", str(base)).returncode == 0
    recipe = builders.recipe(
        tmp_path / "lora",
        data={**file, **limit, "prompt_column": "question", "response_column": "answer"},
        model={"shape": None, "path": str(tmp_path / "base/model")},
        lora={"r": 8, "lora_alpha": 16},
        training={"max_steps": 80, "learning_rate": 5e-3, "save_steps": 1000},
        name="answers",
    )
    done = builders.launch(tmp_path / "h", "run", str(recipe))
    assert done.returncode == 0, done.stderr
    steps = builders.events(builders.only_run(tmp_path / "h", "answers"))
    assert falls(steps) < 0.97
    assert (tmp_path / "lora/model/adapter_model.safetensors").exists()


def test_without_the_columns_the_error_names_them_and_the_flags_before_any_model_is_built(
    tmp_path, real_data
):
    text = (real_data / "gsm8k_train.jsonl").read_text(encoding="utf-8")
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(text.replace('"question":', '"task":').replace('"answer":', '"steps":'))
    files = {"train_file": str(renamed), "validation_file": None}
    done = builders.launch(tmp_path / "h", "run", str(builders.recipe(tmp_path, data=files)))
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    for words in (
        "task, steps",
        "--data.prompt_column=task",
        "--data.response_column=steps",
    ):
        assert words in done.stderr
