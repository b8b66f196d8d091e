"""Seconds that verifying a token cache takes when it is opened: `python -m benchmarks.token_cache
[GIB]`."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from launch.base import files
from launch.data import token_cache

FILE_BYTES = 64 << 20  # about what a unit of 16 MiB of text becomes
TIMES = 3


def fill(folder: Path, total_bytes: int) -> None:
    """Files as a corpus's cache has them, of random bytes."""
    content = os.urandom(FILE_BYTES)
    for number in range(total_bytes // FILE_BYTES):
        (folder / f"train-{number:05d}.arrow").write_bytes(content)
    files.write_json(folder / token_cache.TOKENS_READY, {})
    files.sync_all(folder)


def evict(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main(gib: float) -> None:
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        fill(folder, int(gib * (1 << 30)))
        for what in ("write the hashes", "verify, from the disk", "verify, from memory"):
            seconds, cpu_seconds = [], []
            for _ in range(TIMES):
                if "disk" in what:
                    evict(folder)
                began, cpu_began = time.perf_counter(), time.process_time()
                if "write" in what:
                    token_cache.write_hashes(folder)
                else:
                    assert token_cache.fault(folder) is None
                seconds.append(time.perf_counter() - began)
                cpu_seconds.append(time.process_time() - cpu_began)
            print(
                f"{what}: {min(seconds) / gib:.2f} s a GiB, {min(cpu_seconds) / gib:.2f} s of CPU,"
                f" the best of {TIMES} (load {os.getloadavg()[0]:.1f})"
            )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
