"""Files of DeepSpeed's are read without running what they hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from training.checkpoints import convert


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


class Held:
    def __init__(self, start: int) -> None:
        self.start = start


@pytest.mark.shows("F21", "a pickle that makes a folder; loaded without our reader it does")
@pytest.mark.parametrize("zipped", [True, False])
def test_an_object_in_a_pickle_gives_its_attributes_and_no_code_of_it_runs(tmp_path, zipped):
    file, marker = tmp_path / "optim_states.pt", tmp_path / "marker"
    parameter = torch.nn.Parameter(torch.arange(6.0))
    content = {"flat": parameter, "step": 3, "at": Held(7), "scaler": Payload(marker)}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    found = convert.read_pickle(file)
    assert torch.equal(found["flat"], parameter)
    assert (found["step"], found["at"].start) == (3, 7)
    assert not marker.exists()
    torch.load(file, weights_only=False)
    assert marker.exists()  # the payload is one
