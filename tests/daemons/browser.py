"""Pages in headless Chromium: what its console says, and how wide a page becomes.

Chromium (Debian: chromium) must be there where CI is set; elsewhere tests that need it are skipped
without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CONSOLE = re.compile(r"CONSOLE(?:\(\d+\)|:\d+)\] (.*)")
# Chromium has no window of 360 px, so a page is shown in a frame of this width. Each curve gets the
# pointer, as a reader would move it.
FRAME = """<!doctype html><body><iframe src="{url}" style="width:{width}px;height:900px;border:0">
</iframe><pre id="seen"></pre><script>
const frame = document.querySelector('iframe');
frame.addEventListener('load', () => {{
  const page = frame.contentDocument, seen = {{tips: []}};
  const root = page.documentElement;
  for (const part of page.querySelectorAll('details')) part.open = true;
  Object.assign(seen, {{scroll_width: root.scrollWidth, width: frame.contentWindow.innerWidth}});
  for (const plot of page.querySelectorAll('.plot')) {{
    const box = plot.getBoundingClientRect();
    const init = {{clientX: box.left + box.width / 2, clientY: box.top + 5}};
    plot.dispatchEvent(new frame.contentWindow.PointerEvent('pointermove', init));
    seen.tips.push(plot.querySelector('.tip').innerText);
    seen.scroll_width = Math.max(seen.scroll_width, root.scrollWidth);
  }}
  const text = JSON.stringify(seen).replaceAll('&', '').replaceAll('<', '');
  document.querySelector('#seen').textContent = 'SEEN' + text + 'END';
}});
</script>"""


@dataclass(frozen=True)
class Seen:
    """A page as a browser shows it."""

    console: list[str]
    width: int
    scroll_width: int  # the highest; more than `width`: it scrolls sideways
    tips: list[str]  # of each curve, with the pointer in its middle


def chromium() -> str:
    """The program. Skips the test without it, and fails it under CI."""
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("there is no chromium; install it (Debian: chromium)")
        pytest.skip("there is no chromium (Debian: chromium)")
    return path


def show(page: Path, width: int, folder: Path) -> Seen:
    """Load a page with so many pixels; `folder` takes the frame and the profile."""
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.format(url=page.as_uri(), width=width), encoding="utf-8")
    done = subprocess.run(
        [
            chromium(),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *("--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={max(width, 500) + 100},1000", "--virtual-time-budget=10000"),
            *("--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    match = re.search("SEEN({.*})END", done.stdout, re.DOTALL)
    assert match, f"the page was not loaded: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return Seen(console=CONSOLE.findall(done.stderr), **json.loads(match[1]))
