#!/usr/bin/env python3
"""Look up known vulnerabilities of requirements.lock with pip-audit.

audit_waivers.txt holds waivers with their reasons. The exit code is 1 if a vulnerability is not
waived. If pip-audit or its service cannot be reached, or knows none of the packages, the script
says NOT CHECKED and ends with 0."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120


def _waivers(path: Path) -> dict[str, str]:
    """Read lines `ID  reason` as {vulnerability: reason}."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    reason_of = dict(line.split(maxsplit=1) for line in lines)
    assert all(reason_of.values()), f"{path}: a waiver without a reason"
    return reason_of


def main() -> int:
    waived = _waivers(ROOT / "scripts" / "audit_waivers.txt")
    with tempfile.TemporaryDirectory() as folder:
        pins = re.findall(
            r"^[\w.-]+==[^\s;\\]+", (ROOT / "requirements.lock").read_text(), re.MULTILINE
        )
        listed = Path(folder) / "pins.txt"
        listed.write_text("\n".join(pins) + "\n")
        argv = [
            sys.executable,
            "-m",
            "pip_audit",
            "-r",
            str(listed),
            "--no-deps",
            "--disable-pip",
            "--format=json",
        ]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"audit: NOT CHECKED: no answer in {LIMIT_S} s")
            return 0
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"audit: NOT CHECKED: {last[:200]}")
        return 0
    checked = [package for package in packages if "skip_reason" not in package]
    if not checked:
        print(
            f"audit: NOT CHECKED: the advisory service knows none of the {len(packages)} packages"
            " (a mirror, or offline)"
        )
        return 0
    vulnerabilities = {
        (vulnerability["id"], package["name"], package["version"])
        for package in checked
        for vulnerability in package["vulns"]
    }
    for number, name, version in sorted(vulnerabilities):
        print(
            f"audit: {name} {version}: {number}"
            + (f" waived: {waived[number]}" if number in waived else "")
        )
    print(
        f"audit: {len(checked)} of {len(packages)} packages checked, {len(vulnerabilities)}"
        " known vulnerabilities"
    )
    return int(any(number not in waived for number, _, _ in vulnerabilities))


if __name__ == "__main__":
    sys.exit(main())
