#!/usr/bin/env python3
"""Known vulnerabilities of requirements.lock, by pip-audit; a waiver, with its reason, stands in
audit_waivers.txt.

Exit code 1: there is one that is not waived. Where pip-audit or its service cannot be reached, or
knows none of the packages, that is said, and the code is 0: nothing was checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120


def waivers(path: Path) -> dict[str, str]:
    """Vulnerability -> reason, of lines `ID  reason`."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    found = dict(line.split(maxsplit=1) for line in lines)
    assert all(found.values()), f"{path}: a waiver without a reason"
    return found


def main() -> int:
    known = waivers(ROOT / "scripts" / "audit_waivers.txt")
    with tempfile.TemporaryDirectory() as place:
        pins = re.findall(
            r"^[\w.-]+==[^\s;\\]+", (ROOT / "requirements.lock").read_text(), re.MULTILINE
        )
        listed = Path(place) / "pins.txt"
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
        answers = json.loads(done.stdout)["dependencies"]
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"audit: NOT CHECKED: {last[:200]}")
        return 0
    checked = [answer for answer in answers if "skip_reason" not in answer]
    if not checked:
        print(
            f"audit: NOT CHECKED: the advisory service knows none of the {len(answers)} packages (a"
            " mirror, or offline)"
        )
        return 0
    found = {
        (one["id"], answer["name"], answer["version"])
        for answer in checked
        for one in answer["vulns"]
    }
    for number, name, version in sorted(found):
        print(
            f"audit: {name} {version}: {number}"
            + (f" waived: {known[number]}" if number in known else "")
        )
    print(
        f"audit: {len(checked)} of {len(answers)} packages checked, {len(found)} known"
        " vulnerabilities"
    )
    return int(any(number not in known for number, _, _ in found))


if __name__ == "__main__":
    sys.exit(main())
