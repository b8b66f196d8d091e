"""Use transformers' tokenizers in a process that needs no torch: importing torch takes 2 s of CPU
and 190 MiB."""

import os
import sys


def hide() -> None:
    """Make torch look as if it were not installed, to this process. To be called before torch and
    transformers are imported."""
    assert sys.modules.get("torch") is None
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # no line that torch is missing
