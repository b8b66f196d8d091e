#!/usr/bin/env python3
"""Write docs/fit.md: what fits on common cards, and docs/compared.svg: the candidates of a plan.
Traces that are not stored take minutes a card.

`python scripts/render_fit.py CARD ...` writes the sections of these cards and keeps the others."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

CODE = Path(__file__).resolve().parent.parent
# run as a script: launch/ is beside scripts/, so it is imported after this line
sys.path.insert(0, str(CODE))

from launch.base.workspace import Workspace  # noqa: E402
from launch.plan import facts as plan_facts  # noqa: E402
from launch.plan import fit, planner  # noqa: E402
from launch.plan.fit import Fit, Method  # noqa: E402
from launch.predict.models import model_config  # noqa: E402
from launch.predict.traces import Traces  # noqa: E402
from launch.probe import described  # noqa: E402
from launch.probe.import_memory import ASSUMED_CUDA  # noqa: E402
from launch.report import fit_table, peaks_svg  # noqa: E402

FILE = CODE / "docs" / "fit.md"
PICTURE = CODE / "docs" / "compared.svg"
# a card, and the RAM in GiB of its machine
CARDS = {
    "T4": 64,
    "RTX 3060": 64,
    "RTX 4060 Ti 16GB": 64,
    "RTX 3090": 64,
    "RTX 4090": 64,
    "L4": 64,
    "RTX A5000": 64,
    "L40S": 128,
    "RTX A6000": 128,
    "RTX 5090": 64,
    "A100 80GB": 256,
    "H100 SXM": 256,
}
# fewer than the verb has: each takes up to 20 traces for each kind of card
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama3.1-70b")
HEADING = """# What fits on common cards

Predicted, not measured on a card. `python -m launch fit --gpu "RTX 4090" --ram 64` prints such a
table for another card, RAM or number of cards, and `--model` and `--length` for other models and
lengths; `--lines` prints the command that trains each row, `--json` is for scripts. The first table
for a kind of card takes minutes, the next seconds: traces are kept. This page is generated:
`python scripts/render_fit.py`.

Every figure is the choice of the planner that `plan` uses. Steps are traced with rows of 512
tokens; 2,048 and 8,192 tokens are computed from them. In a test this differs from a trace of the
length itself by at most 1 % in memory and 2 % in time ([prediction.md](prediction.md) explains
traces).

"""


def answers(
    gpu: str,
    models: Sequence[str] = MODELS,
    methods: Sequence[Method] = fit.METHODS,
) -> list[Fit]:
    """The trainings of a card; without its section's other models."""
    machine = described.from_words(gpu, 1, CARDS[gpu])
    traces = Workspace.here().traces
    return list(fit.fits(machine, ASSUMED_CUDA, traces, models, methods, say=print))


def picture(traces: Path) -> str:
    """The candidates of LoRA of a 7B at 2,048 tokens on 24 GB; `traces`: where they are stored."""
    recipe = fit.recipe_of("qwen2.5-7b", "lora", 2048, half=False)
    config, parameters, family = model_config.read(recipe.model, root=CODE, cache=traces.parent)
    machine = described.from_words("RTX 3090", 1, 64)
    facts = plan_facts.build(recipe, machine, config, parameters, family, fit.ANY_FORMAT)
    rows = plan_facts.of_length(facts.rows, recipe.data, 2048)
    installed = replace(facts.installed, import_memory=ASSUMED_CUDA)
    facts = replace(facts, rows=rows, installed=installed)
    steps = Traces(recipe, facts.model.size, facts.model.lora_targets, traces, print)
    return peaks_svg.picture(planner.choose(replace(facts, traces=steps)).plan.compared)


def page(sections: dict[str, str]) -> str:
    """The whole text, with the sections of these cards."""
    parts = [HEADING, *(f"- {line}\n" for line in fit_table.legend(1))]
    for gpu, ram_gib in CARDS.items():
        if gpu in sections:
            parts.append(f"\n## {gpu}, {ram_gib} GiB of RAM\n\n{sections[gpu]}")
    return "".join(parts)


def sections_of(text: str) -> dict[str, str]:
    """The table of each card in a page."""
    parts = re.split(r"^## (.+), \d+ GiB of RAM\n\n", text, flags=re.MULTILINE)[1:]
    return {gpu: f"{table.rstrip()}\n" for gpu, table in zip(parts[::2], parts[1::2], strict=True)}


def main(asked: Sequence[str]) -> None:
    sections = sections_of(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for gpu in asked or CARDS:
        sections[gpu] = fit_table.markdown(answers(gpu))
        FILE.write_text(page(sections), encoding="utf-8")
        print(f"docs/fit.md: {gpu}", flush=True)
    PICTURE.write_text(picture(Workspace.here().traces), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
