"""A named shape that is planned as its folder will be."""

from __future__ import annotations

import pytest

from launch.base.workspace import CODE
from launch.plan import facts as plan_facts
from launch.predict.facts import Facts
from launch.predict.models import model_config
from launch.schema.machine import GIB
from tests import builders

pytestmark = pytest.mark.unit
SMALL_HOST = builders.machine(gpus=1, host_limit_bytes=16 * GIB, host_available_bytes=15 * GIB)


def facts_of(**sections: object) -> Facts:
    recipe = builders.recipe_of(**{"model": {"shape": "qwen2.5-7b"}, **sections})
    config, parameters, family = model_config.read(recipe.model, root=CODE, cache=builders.CACHE)
    recipe_facts = (recipe, SMALL_HOST, config, parameters, family, builders.DATA_FORMAT)
    return plan_facts.build(*recipe_facts)


def test_a_shape_is_planned_with_the_files_of_its_folder() -> None:
    facts = plan_facts.as_folder(
        facts_of(
            model={"shape": "qwen2.5-7b", "dtype": "bfloat16"},
            lora={"r": 8},
            quantization={"load_in_4bit": True},
        )
    )
    assert facts.model.stored is not None
    assert facts.model.stored.total_bytes == 2 * 7_615_616_512
    assert facts.model.stored.largest_file_bytes == 5_000_000_000
    assert "random weights" in facts.rows.format.notes[-1]
