"""Trainings in memory cgroups of their own: folders of really written weights, a launch below a
limit, and the most anonymous memory that it took. As root; versions 1 and 2."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import recording

SAMPLE_S = 0.02
BLOCK_BYTES = 32 << 20  # of random weights, which repeat
SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
# counters of memory that cannot be dropped
HELD = {1: ("total_rss", "total_shmem"), 2: ("anon", "shmem")}


@dataclass(frozen=True)
class Ended:
    """A process and its descendants, from start to end."""

    exit_code: int
    held_bytes: int  # at most: anonymous and shared memory
    wall_s: float
    said: str


def write_model(folder: Path, config: Mapping[str, Any], dtype: str, shards: int = 1) -> int:
    """Write a model folder tensor by tensor, and return the bytes of its weights. Run by a child,
    because torch's memory would count."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    of_model = AutoConfig.for_model(**config, dtype=dtype)
    of_model.bos_token_id = of_model.eos_token_id = of_model.pad_token_id = 0
    family = AutoModelForSeq2SeqLM if of_model.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        network = family.from_config(of_model, dtype=getattr(torch, dtype))
    of_model.architectures = [type(network).__name__]
    of_model.save_pretrained(folder)
    element_bytes = getattr(torch, dtype).itemsize
    torch.manual_seed(0)
    block = (torch.randn(BLOCK_BYTES // element_bytes) * 0.02).to(getattr(torch, dtype))
    content = block.view(torch.uint8).numpy().tobytes()
    names = {name: list(part.shape) for name, part in network.named_parameters()}
    sizes = {name: network.get_parameter(name).numel() * element_bytes for name in names}
    total, files, filled = sum(sizes.values()), [{} for _ in range(shards)], 0
    for name, size_bytes in sizes.items():
        files[min(filled * shards // total, shards - 1)][name] = size_bytes
        filled += size_bytes
    weight_map = {}
    for number, parts in enumerate(files):
        ending = f"-{number + 1:05d}-of-{shards:05d}" if shards > 1 else ""
        file = folder / f"model{ending}.safetensors"
        header, offset = {}, 0
        for name, size_bytes in parts.items():
            offsets = [offset, offset + size_bytes]
            header[name] = {
                **{"dtype": SAFETENSORS[dtype], "shape": names[name]},
                "data_offsets": offsets,
            }
            offset, weight_map[name] = offsets[1], file.name
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(head)) + head)
            for start in range(0, offset, BLOCK_BYTES):
                stream.write(content[: min(BLOCK_BYTES, offset - start)])
            os.fsync(stream.fileno())  # pages that are not written yet cannot be dropped
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def with_tokenizer(
    folder: Path, config: Mapping[str, Any], dtype: str, shards: int = 1, vocab_size: int = 0
) -> None:
    """A model's folder, and a tokenizer of a few words or of so many, written by a child."""
    argv = [json.dumps(config), dtype, str(shards), str(vocab_size)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.cgroups", *argv],
        **{"cwd": folder, "check": True, "stderr": subprocess.DEVNULL},
        env={**os.environ, "PYTHONPATH": str(recording.CODE)},
    )


def write_recipe(
    folder: Path, mode: str, rows: int, sections: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Rows, all alike, and a recipe for the model and the tokenizer beside them, which may take all
    of a cgroup; the recipe's file. `sections` lie over its own."""
    row = {"prompt": "red blue green", "response": "blue stone red green " * 100}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * rows)
    count = 1 if mode in ("cpu", "single_gpu") else 2
    recipe: dict[str, Any] = {
        **{"name": "case", "task": "sft", "output_dir": str(folder / "out")},
        "model": {"path": str(folder / "model")},
        "tokenizer": {"path": str(folder / "tokenizer"), "loading": "file"},
        "data": {"train_file": str(folder / "rows.jsonl"), "max_length": 64},
        "training": {"per_device_train_batch_size": 1, "max_steps": 2, "learning_rate": 1e-4},
        "launch": {
            **{"mode": mode, "num_processes": count},
            **{"host_reserve_gib": 0, "host_stop_fraction": 0},
        },
    }
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def environment(folder: Path) -> dict[str, str]:
    """The environment of a launch below a folder, with traces of its own campaign, and beside none
    of this machine's runs."""
    own = {"LOWMEM_TRACES": os.environ["LOWMEM_TRACES"], "LOWMEM_LEASES": str(folder / "leases")}
    return recording.environment(folder) | own


@contextmanager
def cgroup() -> Iterator[tuple[int, Path]]:
    """(version, folder) of a cgroup of this process's own, which ends with its processes."""
    root = Path("/sys/fs/cgroup")
    version = 1 if (root / "memory").is_dir() else 2
    folder = (root / "memory" if version == 1 else root) / f"benchmark-{os.getpid()}"
    folder.mkdir()
    try:
        yield version, folder
    finally:
        while (folder / "cgroup.procs").read_text().strip():
            time.sleep(0.1)
        folder.rmdir()


def run(
    argv: Sequence[str], env: Mapping[str, str], limit_bytes: int | None = None, cwd: Path = Path()
) -> Ended:
    """Run a command in a cgroup of this limit, which is sampled each SAMPLE_S."""
    began, held = time.monotonic(), 0
    with cgroup() as (version, folder):
        if limit_bytes is not None:
            (folder / LIMIT[version]).write_text(str(limit_bytes))
        inside = f'echo $$ > "{folder}/cgroup.procs"; exec "$@"'
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                ["bash", "-c", inside, "bash", *argv],
                **{"env": env, "cwd": cwd, "stdin": subprocess.DEVNULL},
                **{"stdout": output, "stderr": subprocess.STDOUT},
            )
            while child.poll() is None:
                lines = (folder / "memory.stat").read_text().splitlines()
                counters = dict(line.split() for line in lines)
                held = max(held, sum(int(counters.get(name, 0)) for name in HELD[version]))
                time.sleep(SAMPLE_S)
            output.seek(0)
            said = output.read().decode(errors="replace")
    return Ended(child.returncode, held, round(time.monotonic() - began, 1), said)


if __name__ == "__main__":
    from benchmarks.random_model import write_tokenizer

    write_model(Path("model"), json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    write_tokenizer(Path("tokenizer"), int(sys.argv[4]))
