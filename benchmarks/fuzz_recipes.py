"""Hostile values of a recipe: each is taken or refused (exit code 2), none ends in a traceback.

Keys are those of the schema, sections, sections of other types, and keys that do not exist; values
are numbers at the limits, texts that are commands, paths or control characters, and deep lists. One
value is typed as an override, or one to four are written into the file.
"""

from __future__ import annotations

import json
import random
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from launch.base.errors import LaunchError
from launch.recipe import load
from launch.schema.recipe_keys import SECTIONS, all_keys

NUMBERS = (0, -1, 1, 0.5, 1e-300, 1e308, -1e308, 2**31, 2**63, 10**30, True, False, None)
TEXTS = (
    *("", " ", "-", "--x", "null", "true", "1e-4", "0x10", "1_000", "1.0.0", "12:30:00", ".nan"),
    *(".inf", "-.inf", "1e999", "9" * 400, "x" * 10_000, "a\nb", "a\tb", "a\x00b", "\x1b[2J"),
    *("\u202eabc", "日本", "\U0001f600", "é" * 300, "$(id)", "`id`", "; id", "it's", '"', "%s%n"),
    *("{0}", "../../etc/passwd", "/dev/zero", "/dev/null", "/proc/self/mem", "~", "~root", "."),
    *("file:///etc/passwd", "https://me:pw@host/x", "!!python/name:os.system", "&a [*a]", "{a: b"),
)
DEEP = 60
NO_KEYS = ("training.tokn", "x", "data.x.y", "model", "training", "", ".", "a.b.c.d", "training.")


def value(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.35:
        return draw.choice(NUMBERS)
    if kind < 0.75:
        return draw.choice(TEXTS)
    if kind < 0.85:
        return [value(draw) for _ in range(draw.randrange(4))]
    if kind < 0.95:
        return {draw.choice(TEXTS): value(draw) for _ in range(draw.randrange(4))}
    nested: Any = draw.choice(NUMBERS)
    for _ in range(DEEP):
        nested = [nested] if draw.random() < 0.5 else {"a": nested}
    return nested


def key(draw: random.Random) -> str:
    kind = draw.random()
    return draw.choice(all_keys()) if kind < 0.9 else draw.choice((*NO_KEYS, *SECTIONS))


def override(draw: random.Random) -> str:
    """--key=value, as somebody may type it."""
    typed = value(draw)
    text = typed if isinstance(typed, str) else json.dumps(typed)
    return f"--{key(draw)}={text}"


def written(base: dict[str, Any], draw: random.Random) -> str:
    """The text of a recipe with one to four hostile values."""
    content = json.loads(json.dumps(base))
    for _ in range(draw.randrange(1, 5)):
        section, _, name = key(draw).partition(".")
        if name and isinstance(content.setdefault(section, {}), dict):
            content[section][name] = value(draw)
        else:
            content[section] = value(draw)
    return yaml.safe_dump(content, allow_unicode=draw.random() < 0.5)


def campaign(
    recipe: Path, folder: Path, seed: int, number: int, seconds: float = float("inf")
) -> dict[str, Any]:
    """Read so many recipes, or as many as there is time for; how many were taken and refused, and
    the faults."""
    draw, verdicts, faults = random.Random(seed), Counter[str](), []
    base = yaml.safe_load(recipe.read_text("utf-8"))
    until_s = time.monotonic() + seconds
    for case in range(number):
        if time.monotonic() > until_s:
            break
        file, words = recipe, [override(draw)]
        if draw.random() < 0.5:
            file, words = folder / "hostile.yaml", []
            file.write_text(written(base, draw), encoding="utf-8", errors="surrogatepass")
        try:
            load.load(str(file), words)
            verdicts["taken"] += 1
        except LaunchError as error:
            verdicts[f"refused with exit code {error.exit_code}"] += 1
        except Exception as error:  # noqa: BLE001  no input may raise another error: it is counted as a fault
            verdicts["traceback"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            text = words[0] if words else file.read_text("utf-8", "replace")
            faults.append([case, "value", text[:300], where, repr(error)[:200]])
            print(*faults[-1], flush=True)
    return {"values": verdicts.total(), "verdicts": dict(verdicts.most_common()), "faults": faults}
