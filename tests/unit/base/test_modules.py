"""Garbage collection during imports, and after them."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from launch.base import modules

pytestmark = pytest.mark.unit


def test_objects_of_imports_are_visited_by_no_collection_of_all_objects():
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    full = gc.get_stats()[2]["collections"]
    with modules.uncollected():
        objects = [[] for _ in range(2_000_000)]
        assert gc.get_stats()[2]["collections"] == full
    assert gc.get_freeze_count() - frozen >= len(objects)
    assert gc.get_threshold() == thresholds


def test_a_trace_of_4_bit_weights_imports_no_compiler_of_torch():
    code = """
import sys
from training import worker
worker.prepare()
worker.import_trace()
print("bitsandbytes" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]


def test_a_plain_package_has_its_modules_and_nothing_that_its_own_start_makes():
    code = """
from launch.base import modules
modules.as_plain_package("transformers.models")
import transformers.models
from transformers.models.llama import modeling_llama
print(hasattr(transformers.models, "__file__"), modeling_llama.__name__)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "transformers.models.llama.modeling_llama"]
