"""What allow: gives up, in which order, and that nothing is given up without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.base.errors import DoesNotFit
from launch.base.workspace import CODE
from launch.plan import resolve, ways_to_fit
from launch.predict import parameters as predict_parameters
from launch.predict.models import model_config
from launch.probe import described
from launch.schema.machine import Machine
from tests.builders import CACHE, recipe_of

LORA = {"r": 16, "lora_alpha": 32}
# keys of changes that allow: permits
KEYS = {
    "training.optim",
    *("quantization.load_in_4bit", "lora.r", "lora.lora_alpha", "data.max_length"),
}


def shapes_of(recipe):
    return model_config.read(recipe.model, root=CODE, cache=CACHE)[1]


def given_up(**sections):
    recipe = recipe_of(model={"shape": "llama-7b"}, **sections)
    return [
        {change.key: change.effective for change in changes}
        for _, changes in ways_to_fit.relaxations(
            recipe, shapes_of(recipe), predict_parameters.FAMILIES["llama"], True, "auto"
        )
    ]


def test_nothing_is_given_up_without_being_allowed():
    assert given_up(lora=LORA) == []


def test_each_rung_keeps_what_the_one_before_gave_up():
    relaxations = given_up(
        lora=LORA, data={"max_length": 256}, allow=["quantization", "lora.r", "data.max_length"]
    )
    assert relaxations[0] == {"quantization.load_in_4bit": "true"}
    assert relaxations[1] == {**relaxations[0], "lora.r": "8", "lora.lora_alpha": "16"}
    assert relaxations[2] == {**relaxations[0], "lora.r": "4", "lora.lora_alpha": "8"}
    assert [rung["data.max_length"] for rung in relaxations[3:]] == ["192", "128", "96", "64"]


def test_four_bits_need_an_adapter():
    assert given_up(allow=["quantization"]) == []


def test_a_change_names_what_was_asked_for_at_first():
    recipe = recipe_of(data={"max_length": 256}, allow=["data.max_length"])
    *_, (last, changes) = ways_to_fit.relaxations(
        recipe, shapes_of(recipe), predict_parameters.FAMILIES["t5"], True, "auto"
    )
    assert last.data.max_length == 64
    assert [(change.requested, change.effective) for change in changes] == [("256", "64")]


@pytest.fixture
def small_card(tmp_path: Path) -> Machine:
    text = (CODE / "configs" / "machines" / "a5000-16g.yaml").read_text(encoding="utf-8")
    file = tmp_path / "card.yaml"
    file.write_text(text.replace("free_gib: 15.5", "free_gib: 9.5"), encoding="utf-8")
    return described.from_file(file)


ASKED = [
    "--model.shape=llama-7b",
    "--model.dtype=bfloat16",
    "--training.bf16=true",
    "--lora.r=16",
    "--training.streamed_layers=0",
    "--launch.mode=single_gpu",
]


def test_a_plan_gives_up_no_more_than_it_needs(small_card: Path):
    with pytest.raises(DoesNotFit, match=r"quantization\.load_in_4bit=true"):
        resolve.resolve("sft_fast", ASKED, small_card, trace=False)
    allowed = "--allow=[quantization, data.max_length]"
    resolved = resolve.resolve("sft_fast", [*ASKED, allowed], small_card, trace=False)
    assert resolved.recipe.quantization is not None
    assert [change.key for change in resolved.plan.changes if change.key in KEYS] == [
        "quantization.load_in_4bit"
    ]
    with pytest.raises(
        DoesNotFit, match=r"Nor does it fit with all that allow: \[lora\.r\] gives up"
    ):
        resolve.resolve("sft_fast", [*ASKED, "--allow=[lora.r]"], small_card, trace=False)


def test_smaller_optimizer_states_come_before_what_else_is_given_up():
    relaxations = given_up(
        data={"max_length": 256}, allow=["optimizer", "data.max_length"], launch={"mode": "auto"}
    )
    optims = ["adamw_8bit", "paged_adamw_8bit"]
    assert relaxations[:2] == [{"training.optim": optim} for optim in optims]
    assert relaxations[2] == {"data.max_length": "192"}
    assert relaxations[3:5] == [{**relaxations[2], "training.optim": optim} for optim in optims]


@pytest.mark.parametrize(
    ("on_gpu", "mode", "optim"),
    [
        (False, "auto", "adamw_torch"),
        (True, "deepspeed_zero2", "adamw_torch"),
        (True, "auto", "adafactor"),
    ],
)
def test_optimizer_states_stay_where_there_are_no_smaller_ones(on_gpu, mode, optim):
    recipe = recipe_of(model={"shape": "llama-7b"}, training={"optim": optim}, allow=["optimizer"])
    family = predict_parameters.FAMILIES["llama"]
    assert not list(ways_to_fit.relaxations(recipe, shapes_of(recipe), family, on_gpu, mode))


def test_a_plan_with_smaller_states_names_their_bytes():
    machine = described.from_words("RTX 4090", 1, 24)
    asked = ["--model.shape=qwen2.5-1.5b", "--training.bf16=true", "--launch.mode=single_gpu"]
    with pytest.raises(DoesNotFit, match=r"--training\.optim=adamw_8bit \(single_gpu"):
        resolve.resolve("sft_fast", asked, machine, trace=False)
    resolved = resolve.resolve("sft_fast", [*asked, "--allow=[optimizer]"], machine, trace=False)
    assert resolved.recipe.training.optim == "adamw_8bit"
    (change,) = (each for each in resolved.plan.changes if each.key == "training.optim")
    assert change.reason.endswith("; its states: 4.22 GiB instead of 11.50 GiB")
