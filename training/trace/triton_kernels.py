"""Triton's kernels of Liger while a step is recorded. Liger's functions run as they are, on fake
tensors, so that their results, what they save and what they allocate are recorded like any
other; a kernel is counted where it would be launched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from training.compat import liger_private
from training.compat.levers_private import replaced
from training.trace.cuda_semantics import Target
from training.trace.cuda_workspace import MULTIPROCESSORS
from training.trace.recorder import Recorder

# places of the arguments that a kernel reads and writes; of all others it does one of the two
_WRITTEN_IN_PLACE = {
    "_triton_rope": (0, 2),  # query and key, or their gradients
    "_swiglu_backward_kernel": (1, 2),  # gate and up, which become their gradients
    "_swiglu_backward_kernel_tiled": (1, 2),
    "_geglu_tanh_backward_kernel": (1, 2),
}
_MOST_MULTIPROCESSORS = 304  # an MI300X's, for cards that MULTIPROCESSORS lacks


@contextmanager
def counted(recorder: Recorder, target: Target | None) -> Iterator[None]:
    """Let Liger's functions launch into a recorder, for this card."""
    programs = (
        MULTIPROCESSORS.get(target.capability or (0, 0), _MOST_MULTIPROCESSORS) if target else 1
    )
    kernels = [
        (module, name, _Kernel(recorder, name, programs))
        for module, name in liger_private.kernels()
    ]
    with replaced(kernels):
        yield


class _Kernel:
    """Stands in for a kernel of Triton's, of which `programs` run where each takes many rows."""

    def __init__(self, recorder: Recorder, name: str, programs: int) -> None:
        self._recorder, self._name, self._programs = recorder, name, programs

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """The launch of a grid. A grid of one program is that of a CPU, which counts as one
        multiprocessor: on a card a program on each has a row of float32 sums."""

        def launch(*args: Any, **options: Any) -> None:
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            sums = [each for each in tensors if grid == (1,) and each.shape[:-1] == (1,)]
            again = [args[place] for place in _WRITTEN_IN_PLACE.get(self._name, ())]
            more_rows = self._programs - 1
            workspace = [more_rows * each.nbytes for each in sums]
            self._recorder.kernel(f"triton::{self._name}", [*tensors, *again], workspace)

        return launch
