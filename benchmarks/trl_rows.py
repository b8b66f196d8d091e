"""Ids and labels of the same conversations in TRL's SFTTrainer and in lowmem. On CPUs.

TRL is not a package of this project: `pip install --target FOLDER --no-deps trl`, then
`PYTHONPATH=FOLDER python -m benchmarks.trl_rows`. The templates are TRL's own with generation
marks, used with assistant_only_loss. The conversations are those of benchmarks/template_matrix.py,
without weights, which TRL does not read. A model of one layer is built, and nothing is trained.

The mask that TRL takes from transformers ends with the first token of a marked part's last
character. If that character has several tokens (here the bytes of a Chinese full stop), the others
have no loss in TRL.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import trl  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import recording
from benchmarks.template_matrix import KINDS, tokenizer_of
from launch.base.errors import DataError
from launch.data.conversation import Conversation
from launch.data.rows import IGNORED
from training.data.chat.rendering import has_marks
from training.data.encode import Encoder, EncoderSettings


def trl_row(
    made: Any, messages: list[Any], tools: Any, folder: Path
) -> tuple[list[int], list[int]]:
    """The ids and labels that SFTTrainer trains."""
    row = {"messages": messages, **({"tools": json.dumps(tools)} if tools else {})}
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    trainer = trl.SFTTrainer(
        model=LlamaForCausalLM(config),
        args=trl.SFTConfig(
            output_dir=str(folder),
            assistant_only_loss=True,
            max_length=None,
            use_cpu=True,
            bf16=False,
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_list([row]),
        processing_class=made,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    return batch["input_ids"][0].tolist(), batch["labels"][0].tolist()


def difference(made: Any, ours: dict[str, list[int]], ids: list[int], labels: list[int]) -> str:
    """The difference of two rows in a few words; "equal" if there is none."""
    if ours["input_ids"] == ids and ours["labels"] == labels:
        return "equal"
    if ours["input_ids"] != ids:
        return "other ids"
    pairs = zip(ids, ours["labels"], labels, strict=True)
    differing = [(token, own != IGNORED) for token, own, other in pairs if own != other]
    more = made.decode([token for token, is_ours in differing if is_ours])
    less = made.decode([token for token, is_ours in differing if not is_ours])
    return f"loss only here on {more!r}, only in TRL on {less!r}"


def cell(template: str, kind: str, folder: Path) -> str:
    messages, tools = KINDS[kind]
    made = tokenizer_of(template)
    made.pad_token = made.eos_token
    try:
        (rows,) = Encoder(made, EncoderSettings(False, "sft", 1 << 20)).encode(
            [Conversation(messages, tools)]
        )
    except DataError:
        return "refused"
    return difference(made, rows[0], *trl_row(made, messages, tools, folder))


def main() -> None:
    datasets.disable_progress_bars()
    templates = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    }
    kinds = [kind for kind in KINDS if kind != "weights"]
    with tempfile.TemporaryDirectory() as folder:
        cells = {
            name: {kind: cell(template, kind, Path(folder)) for kind in kinds}
            for name, template in templates.items()
            if has_marks(template)
        }
    counts = Counter(result for row in cells.values() for result in row.values())
    text = (
        f"{sum(counts.values())} cells ({len(cells)} templates of TRL {trl.__version__} with"
        f" generation marks x {len(kinds)} kinds of conversation): {counts['equal']} equal in ids"
        f" and labels, {counts['refused']} refused here.\n\n"
        + recording.table(["result", "cells"], [[r, str(n)] for r, n in counts.most_common()])
        + "\n"
        + recording.table(
            ["template", *kinds], [[name, *row.values()] for name, row in cells.items()]
        )
    )
    recording.write("trl_rows", {"counts": dict(counts), "cells": cells}, text)


if __name__ == "__main__":
    main()
