"""Folders of the code and its files, and of a workspace: data, runs, logs, models and caches."""

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launch.base.errors import ConfigError
from launch.base.text import HIDDEN

CODE = Path(__file__).resolve().parents[2]  # launch/, training/ and train_low_mem.py
CHECKOUT = (CODE / "configs" / "recipes").is_dir()
# configs/, config/ and scripts/; pyproject.toml installs them into launch/
FILES = CODE if CHECKOUT else CODE / "launch" / "_files"


@cache
def code_digest(*places: str) -> str:
    """A hash of the code in these folders and files, by which what other code has made is told."""
    modules: list[Path] = []
    for path in (CODE / place for place in places):
        modules += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in modules)).hexdigest()[:16]


@dataclass(frozen=True)
class Workspace:
    """The folder of data/, runs/, logs/, model_save/ and the caches: LOWMEM_ROOT, or the checkout,
    or for an installed package the folder where it is started."""

    root: Path

    @classmethod
    def here(cls) -> "Workspace":
        named = os.environ.get("LOWMEM_ROOT") or str(CODE if CHECKOUT else Path.cwd())
        if HIDDEN.search(named) or "\n" in named or "\t" in named:
            raise ConfigError(
                f"LOWMEM_ROOT {named!r}: holds a control character; name another folder"
            )
        return cls(Path(named).resolve())

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def cache(self) -> Path:
        return self.root / ".cache"

    @property
    def traces(self) -> Path:
        """The folder of traced steps. They depend on no workspace, so several workspaces may share
        it."""
        return Path(os.environ.get("LOWMEM_TRACES") or self.cache / "traces").resolve()

    @property
    def ledger_file(self) -> Path:
        return self.cache / "ledger.jsonl"
