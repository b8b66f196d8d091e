"""Linux namespaces of a line's own: mounts, processes, network, as a container has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import builders


def bash(
    line: str, *flags: str, workspace: Path, within_s: float = 120, **extra: str
) -> subprocess.CompletedProcess[str]:
    """`bash -c LINE` as root of new namespaces (flags of unshare), in the environment of a
    launch."""
    unshare = ["unshare", "--user", "--map-root-user", *flags]
    if subprocess.run([*unshare, "true"], capture_output=True, timeout=60).returncode:
        # a kernel without user namespaces; CI has them
        pytest.skip(f"this machine lets nobody make namespaces: {' '.join(unshare)}")
    return subprocess.run(
        [*unshare, "bash", "-c", line],
        env=builders.environment(workspace, **extra),
        capture_output=True,
        text=True,
        timeout=within_s,
    )
