"""Everything that gpu_speed needs on a machine without a network, in one folder.

    LOWMEM_REAL_DATA=DATA python -m benchmarks.gpu_speed_bundle FOLDER [--wheels FOLDER]

The project as it is committed, rows and their tokens, a tokenizer, the packages that such a machine
lacks (for Python 3.12 on x86-64 Linux, beside PyTorch, Transformers, Accelerate, PEFT and what
these need), and run.sh, which starts it: FOLDER/run.sh OUT SECONDS [options of gpu_speed].
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import padding, recording, trainings
from benchmarks.gpu_speed_cases import MODEL_VOCABULARY, NARROW, VOCABULARY

PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17")
PLATFORMS += ("manylinux2014", "manylinux1")
SITES = {
    # ours, plain Trainer, TRL
    "base": (
        *("pydantic==2.14.3", "pydantic_core==2.50.4", "annotated_types==0.8.0"),
        *("typing_inspection==0.4.5", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19"),
        *("bitsandbytes==0.50.2", "liger-kernel==0.8.5", "trl==1.16.0"),
    ),
    # what Unsloth needs instead, or besides
    "unsloth": (
        *("unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "trl==1.15.0", "datasets==4.8.5"),
        *("tyro", "cut_cross_entropy", "torchao==0.17.0", "msgspec", "hf_transfer", "typeguard"),
        *("docstring_parser", "nest_asyncio"),
    ),
}
# of a wheel: bitsandbytes' libraries for other devices, Unsloth's programs beside the library
LEFT_OUT = ("bitsandbytes/libbitsandbytes_", "studio/", "unsloth_cli/", "torchao/_C")
KEPT = ("bitsandbytes/libbitsandbytes_cuda130", "bitsandbytes/libbitsandbytes_cpu")
NUM_ROWS = 3000
LONG_TOKENS, NUM_LONG = 2048, 240
BLOCK = 1024
RUN = """#!/usr/bin/env bash
# run.sh OUT SECONDS [options of benchmarks/gpu_speed.py]: unpack this folder and measure
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")"
BUNDLE="$PWD"; OUT="$(realpath -- "$1")"; LIMIT="$2"; shift 2
mkdir -p "$OUT"
{
    BEGAN=$SECONDS
    WORK="${GPU_SPEED_WORK:-/tmp/gpu_speed}"
    if [[ -z "${GPU_SPEED_WORK:-}" && -w /dev/shm ]] &&
        (( $(df -k --output=avail /dev/shm | tail -n 1) > 25000000 )); then
        WORK=/dev/shm/gpu_speed
    fi
    mkdir -p "$WORK/repo" "$WORK/data"
    echo "work in $WORK: $(df -h "$WORK" | tail -n 1)"
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,power.limit \\
        --format=csv || true
    nproc; free -g
    if [[ -n "$(type -P nvidia-smi)" ]]; then
        nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu \\
            --format=csv -l 1 >"$OUT/clocks.csv" 2>/dev/null &
        trap 'kill "$CLOCKS"' EXIT; CLOCKS=$!
    fi
    tar -xzf "$BUNDLE/repo.tar.gz" -C "$WORK/repo"
    tar -xzf "$BUNDLE/data.tar.gz" -C "$WORK/data"
    python3 "$WORK/repo/benchmarks/gpu_speed_venv.py" "$WORK/ours" "$BUNDLE/site_base.tar.gz"
    BASE="$("$WORK/ours/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    python3 "$WORK/repo/benchmarks/gpu_speed_venv.py" \\
        "$WORK/unsloth" "$BUNDLE/site_unsloth.tar.gz" "$BASE"
    cd "$WORK/repo"
    PYTHONPATH="$WORK/repo" timeout "$LIMIT" "$WORK/ours/bin/python" -P -m benchmarks.gpu_speed \\
        --work "$WORK" --out "$OUT" --unsloth-python "$WORK/unsloth/bin/python" \\
        --seconds "$((LIMIT - (SECONDS - BEGAN) - 15))" "$@"
} 2>&1 | tee -a "$OUT/log.txt"
"""


# ---- packages
# ---------------------------------------------------------------------------


def download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """The wheels, without their needs; those that lie there already are not fetched again."""
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    argv += ["--python-version", "3.12", "--implementation", "cp", *platforms]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*argv, "--dest", str(folder), *requirements], check=True)
    return sorted(folder.glob("*.whl"))


def is_kept(name: str) -> bool:
    return name.startswith(KEPT) or not name.startswith(LEFT_OUT)


def pack_site(wheels: Sequence[Path], target: Path) -> None:
    """One archive of the files of wheels, as they lie in site-packages."""
    with tempfile.TemporaryDirectory() as made:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(made, [name for name in packed.namelist() if is_kept(name)])
        for data in Path(made).glob("*.data"):  # what a wheel puts elsewhere
            for site in (*data.glob("purelib"), *data.glob("platlib")):
                shutil.copytree(site, made, dirs_exist_ok=True)
            shutil.rmtree(data)
        pack(Path(made), target)


def pack(folder: Path, target: Path) -> None:
    with tarfile.open(target, "w:gz", compresslevel=9) as packed:
        for path in sorted(folder.iterdir()):
            packed.add(path, path.name)


# ---- data
# ---------------------------------------------------------------------------


def pairs(data: Path) -> list[dict[str, str]]:
    """Questions and answers as prompt and response."""
    lines = (data / padding.CASES[0].file).read_text(encoding="utf-8").splitlines()
    found = map(json.loads, lines)
    return [{"prompt": row["question"], "response": row["answer"]} for row in found]


def long_pairs(rows: Sequence[dict[str, str]], tokenizer: Any) -> Iterator[dict[str, str]]:
    """Rows that fill LONG_TOKENS: a question, and behind its answer others with theirs."""
    waiting = iter(rows)
    for _ in range(NUM_LONG):
        first = next(waiting)
        text, length = first["response"], len(tokenizer(first["response"])["input_ids"])
        while length < LONG_TOKENS:
            row = next(waiting)
            more = f"\n{row['prompt']}\n{row['response']}"
            text, length = text + more, length + len(tokenizer(more)["input_ids"])
        yield {"prompt": first["prompt"], "response": text}


def tokens(rows: Path, model: Path, max_length: int, place: Path) -> Path:
    """The rows as our trainer tokenises them, input_ids and labels in an Arrow file."""
    place.mkdir()
    training = {"max_steps": 1, "per_device_train_batch_size": 1}
    content = trainings.sft("rows", model, rows, max_length, {}, training)
    attempt = trainings.run(content, place, place / "workspace")
    return trainings.plain(trainings.tokens_of(attempt), place / "rows.arrow")


def blocks(rows: Sequence[dict[str, str]], tokenizer: Any, target: Path) -> None:
    """Texts one after another, each with its end, cut into blocks of BLOCK tokens."""
    flat: list[int] = []
    for row in rows:
        flat += [*tokenizer(text_of(row))["input_ids"], tokenizer.eos_token_id]
    cut = [flat[begin : begin + BLOCK] for begin in range(0, len(flat) - BLOCK + 1, BLOCK)]
    lists = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", lists), ("labels", lists)])
    table = pa.table({"input_ids": cut, "labels": cut}, schema=schema)
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)


def text_of(row: dict[str, str]) -> str:
    return f"{row['prompt']}\n{row['response']}"


def make_data(data: Path, folder: Path, place: Path) -> None:
    """Rows, tokenizer and tokens of all cases."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from launch.schema.model_sections import TokenizerSection
    from training.data import tokenizer as tokenizers

    rows = pairs(data)
    tokenizer = tokenizers.train(map(text_of, rows), TokenizerSection(), VOCABULARY)
    tokenizer.save_pretrained(folder / "tokenizer")
    pq.write_table(pa.Table.from_pylist(rows[:NUM_ROWS]), folder / "gsm.parquet")
    long_rows = list(long_pairs(rows, tokenizer))
    pq.write_table(pa.Table.from_pylist(long_rows), folder / "long.parquet")
    texts = [{"text": text_of(row)} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), folder / "text.parquet")
    config = {"model_type": "llama", "vocab_size": MODEL_VOCABULARY, **NARROW}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for one in (model.config, model.generation_config):
        one.pad_token_id = one.bos_token_id = one.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    for name, max_length in (("gsm", 512), ("long", LONG_TOKENS)):
        made = tokens(folder / f"{name}.parquet", place / "model", max_length, place / name)
        shutil.copy(made, folder / f"{name}.arrow")
    blocks(rows, tokenizer, folder / "text.arrow")


def make(target: Path, data: Path, wheels: Path) -> None:
    """The whole bundle."""
    target.mkdir(parents=True, exist_ok=True)
    archive = ["git", "-C", str(recording.CODE), "archive", "--format=tar.gz", "HEAD"]
    subprocess.run([*archive, "--output", str(target / "repo.tar.gz")], check=True)
    for name, requirements in SITES.items():
        pack_site(download(requirements, wheels / name), target / f"site_{name}.tar.gz")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data"
        folder.mkdir()
        make_data(data, folder, Path(place))
        pack(folder, target / "data.tar.gz")
    (target / "run.sh").write_text(RUN, encoding="utf-8")
    (target / "run.sh").chmod(0o755)
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    print({**sizes, "all": sum(sizes.values())})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="keeps the wheels for another time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        make(arguments.folder, padding.real_data(), arguments.wheels or Path(place))


if __name__ == "__main__":
    main()
