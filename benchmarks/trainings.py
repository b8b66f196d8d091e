"""Trainings that benchmarks start: ours by its launcher, a peer (benchmarks/peer_trainer.py) by
accelerate launch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from benchmarks import recording
from launch.run_folder.layout import AttemptDir, RunDir
from training.data import stored_rows

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
OPTIMIZER = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
}
Content = dict[str, Any]  # of a recipe

# ---- ours
# ---------------------------------------------------------------------------


def sft(
    name: str,
    model: Path,
    rows: Path,
    max_length: int,
    data: Mapping[str, Any],
    training: Mapping[str, Any],
    mode: str = "cpu",
) -> Content:
    """A recipe that trains a model folder on a file of rows; it logs and saves at its end, unless
    told otherwise."""
    steps = training.get("max_steps", 1 << 20)
    return {
        "name": name,
        "task": "sft",
        "model": {"path": str(model)},
        "data": {"train_file": str(rows), "max_length": max_length, **data},
        "training": {"logging_steps": steps, "save_steps": steps + 1, **training},
        "launch": {"mode": mode},
    }


def argv(content: Content, folder: Path) -> list[str]:
    """The line that starts it from the beginning; its recipe lies in `folder`, and the model it
    makes in trained/."""
    path = folder / f"{content['name']}.yaml"
    path.write_text(
        yaml.safe_dump({"output_dir": str(folder / "trained"), **content}), encoding="utf-8"
    )
    return [sys.executable, "-m", "launch", "run", str(path), "--resume", "never"]


def run(content: Content, folder: Path, workspace: Path, env: Mapping[str, str] = {}) -> AttemptDir:
    """Start it and wait for its end, which has to be a good one."""
    environment = {**recording.environment(workspace), **env}
    recording.timed(argv(content, folder), environment, folder / "log.txt", wait=False)
    return attempt_of(content["name"], workspace)


def attempt_of(name: str, workspace: Path) -> AttemptDir:
    """The one attempt of the run that was started last."""
    runs = RunDir.all(workspace / "runs", name)  # the newest first
    (attempt,) = next(run for run in runs if run.has_trained()).attempts()
    return attempt


def tokens_of(attempt: AttemptDir) -> Path:
    """The rows it was trained on, as an Arrow file."""
    said = RunDir(attempt.root.parent.parent).read_tokens()
    assert said is not None
    return said.folder / "train.arrow"


# ---- a peer
# ---------------------------------------------------------------------------


def plain(tokens: Path, target: Path) -> Path:
    """The rows of our cache as transformers' collators take them: input_ids and labels."""
    lists = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", lists), ("labels", lists)])
    with (
        pa.memory_map(str(tokens)) as source,
        pa.OSFile(str(target), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for stored in pa.ipc.open_stream(source):
            rows = stored_rows.read(pa.Table.from_batches([stored]))
            columns = [[row[name].tolist() for row in rows] for name in schema.names]
            writer.write_batch(
                pa.RecordBatch.from_pydict(dict(zip(schema.names, columns, strict=True)), schema)
            )
    return target


def peer(
    folder: Path,
    model: Path,
    tokens: Path,
    arguments: Mapping[str, Any],
    order: Sequence[int] | None = None,
    sft: Mapping[str, Any] | None = None,
    on_gpu: bool = False,
) -> list[str]:
    """The line that starts it. It writes steps.jsonl and losses.json into `folder`, and its model
    into trained/.

    `arguments`: TrainingArguments' beside those below. `order`: its rows in turn, instead of an
    order of its own. `sft`: what SFTConfig is given besides; none: transformers.Trainer trains."""
    asked = {
        "model": str(model),
        "tokens": str(plain(tokens, folder / "rows.arrow")),
        "order": order,
        "sft": sft,
        "folder": str(folder),
        "arguments": {
            "output_dir": str(folder / "trained"),
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": not on_gpu,
            "gradient_checkpointing": False,  # SFTConfig's own are True
            "bf16": False,
            **({"train_sampling_strategy": "sequential"} if order is not None else {}),
            **arguments,
        },
    }
    (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    config = recording.CODE / "configs/accelerate" / ("single_gpu.yaml" if on_gpu else "cpu.yaml")
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*line, "-m", "benchmarks.peer_trainer", str(folder / "asked.json")]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """What a peer wrote at the end of each step: step, time, tokens so far."""
    return [
        json.loads(line)
        for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def losses_of(folder: Path) -> list[float]:
    """What a peer logged."""
    return json.loads((folder / "losses.json").read_text(encoding="utf-8"))["losses"]
