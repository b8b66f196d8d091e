"""train_low_mem.py with Accelerate's FSDP2 engaged on a CPU, for tests only.

Accelerate leaves FSDP out on CPUs and trains plain DDP. Calling the CPU process group a MULTI_GPU
one makes it take its real FSDP2 path: sharding, checkpoints, gathering are Accelerate's and torch's
own."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from launch.base.processes import die_with_launcher


def engage_fsdp() -> None:
    import accelerate.state
    from accelerate.utils import DistributedType

    initialize = accelerate.state.PartialState.__init__

    def initialize_and_rename(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        first = not accelerate.state.PartialState._shared_state
        initialize(self, cpu=cpu or first, **kwargs)
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    accelerate.state.PartialState.__init__ = initialize_and_rename


if __name__ == "__main__":
    assert os.environ.get("ACCELERATE_USE_FSDP") == "true", "start it with distributed_type: FSDP"
    die_with_launcher(signal.SIGKILL)  # before these imports, as train_low_mem.py does
    engage_fsdp()
    from train_low_mem import run_and_leave

    run_and_leave(sys.argv[1:])
