"""A named shape that is planned as its folder will be, and folders that a kernel does not map."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.base.errors import ResourceError
from launch.base.workspace import CODE
from launch.plan import context as plan_context
from launch.plan import resolve
from launch.predict import model_config
from launch.predict.facts import PlanContext
from launch.predict.memory.stored_weights import StoredWeights
from launch.schema.machine import GIB
from tests import builders

pytestmark = pytest.mark.unit
SMALL_HOST = builders.machine(gpus=1, host_limit_bytes=16 * GIB, host_available_bytes=15 * GIB)


def context_of(**sections: object) -> PlanContext:
    recipe = builders.recipe_of(**{"model": {"shape": "qwen2.5-7b"}, **sections})
    config, parameters, family = model_config.read(recipe.model, root=CODE, cache=builders.CACHE)
    recipe_facts = (recipe, SMALL_HOST, config, parameters, family, builders.DATA_FORMAT)
    return plan_context.build(*recipe_facts)


def test_a_shape_is_planned_with_the_files_of_its_folder() -> None:
    context = plan_context.as_folder(
        context_of(
            model={"shape": "qwen2.5-7b", "dtype": "bfloat16"},
            lora={"r": 8},
            quantization={"load_in_4bit": True},
        )
    )
    assert context.stored is not None
    assert context.stored.total_bytes == 2 * 7_615_616_512
    assert context.stored.largest_file_bytes == 5_000_000_000
    assert "random weights" in context.data_format.notes[-1]


def test_a_file_that_is_larger_than_ram_and_swap_is_refused_with_the_ways_out() -> None:
    stored = StoredWeights({"bfloat16": 1 << 50}, {"bfloat16": 1}, 1 << 50)
    with pytest.raises(ResourceError, match=r"cannot be mapped.* RAM and swap = .*; add swap, or"):
        resolve._refuse_large_files(Path("/models/huge"), stored)
