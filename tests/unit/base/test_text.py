"""Texts of errors, as they are shown."""

from __future__ import annotations

import pytest

from launch.base.text import cause

HEADING = "Error(s) in loading state_dict for PeftModelForCausalLM:"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{HEADING}\n\tsize mismatch for lora_A: [2, 8] and [4, 8]\n\tmore", "size mismatch for "),
        ("\nno file named model.safetensors\nin the folder", "no file named model.safetensors"),
        (HEADING, HEADING),
        ("", "ValueError"),
    ],
)
def test_the_cause_of_an_error_is_its_first_line_that_is_no_heading(text, line):
    assert cause(ValueError(text)).startswith(line)
