"""Run every benchmark, one after another: `python -m benchmarks.run`. Figures go to
benchmarks/results."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.recording import CODE

BENCHMARKS = ("launch_overhead", "host_ram_vs_rows", "offload_optimizer", "start_up", "loader")


def main() -> int:
    failed = []
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=CODE).returncode != 0:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all ran", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
