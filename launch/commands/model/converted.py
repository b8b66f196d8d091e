"""Judges the answers of a converted file, and writes the texts beside it: README.md and Ollama's
Modelfile."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.base.text import shown
from launch.schema.result import ConvertedAnswers, ExpectedAnswers

# Two logits of the model that are nearer may change places when its weights are rounded. bf16 keeps
# 8 bits of a weight, as q8_0 does.
_MARGINS = {"f16": 0.1, "bf16": 0.5, "q8_0": 0.5}
EQUAL = 19 / 20  # of all tokens. SmolLM2-135M-Instruct on 20 questions: f16 532 of 533, q8_0 510
# lines of a model's README.md, of an export's too, that the one of a new export takes over
_FACT = re.compile("- (?!base:|licence:|compared:)")
_OF_FOLDER = re.compile("; (this folder holds|to merge it into) .*")  # ends of such lines
_NUM_CTX = 4096  # context of Ollama, where the model was not made for less


def problems(
    expected: ExpectedAnswers, converted: ConvertedAnswers, file_type: str
) -> Iterator[str]:
    """The ways in which a file is not the model that was converted."""
    for number, (prompt, ids) in enumerate(zip(expected.prompts, converted.prompts, strict=True)):
        if prompt.ids != ids:
            yield f"prompt {number + 1} has the ids {[*ids]}, expected {[*prompt.ids]}"
    margin = _MARGINS[file_type]
    for number, token, logits_apart in _differences(expected, converted):
        if logits_apart >= margin:
            yield (
                f"answer {number + 1} differs at token {token + 1}, where the two best logits are"
                f" {logits_apart:.2f} apart, expected less than {margin}"
            )
    different, total = len(list(_differences(expected, converted))), _num_tokens(expected)
    if different > (1 - EQUAL) * total:
        yield f"{different} of {total} tokens differ, expected at most {1 - EQUAL:.0%}"


def split_otherwise(converted: ConvertedAnswers, width: int) -> str:
    """The text that llama.cpp splits otherwise, with all of its ids, in lines of this width."""
    return textwrap.fill(
        shown(f"llama.cpp splits some texts otherwise: {converted.other_ids}"),
        width,
        subsequent_indent="  ",
    )


def _differences(
    expected: ExpectedAnswers, converted: ConvertedAnswers
) -> Iterator[tuple[int, int, float]]:
    """The prompt, the place and the margin of each token that differs."""
    pairs = zip(expected.prompts, converted.answers, strict=True)
    for number, (prompt, choices) in enumerate(pairs):
        rows = zip(prompt.reply, choices, prompt.margins, strict=True)
        for token, (right, choice, margin) in enumerate(rows):
            if right != choice:
                yield number, token, margin


def _num_tokens(expected: ExpectedAnswers) -> int:
    return sum(len(prompt.reply) for prompt in expected.prompts)


def summary(expected: ExpectedAnswers, converted: ConvertedAnswers) -> str:
    """A sentence on what was compared."""
    different = list(_differences(expected, converted))
    total, num_prompts = _num_tokens(expected), len(expected.prompts)
    num_equal = num_prompts - len({number for number, _, _ in different})
    widest = max((margin for _, _, margin in different), default=0.0)
    apart = f" (their best logits at most {widest:.2f} apart)" if different else ""
    return (
        f"{num_prompts} prompts ({expected.origin}): {num_equal} answers equal,"
        f" {total - len(different)} of {total} tokens{apart}; splitting rule {converted.rule}"
    )


def modelfile(name: str, expected: ExpectedAnswers, config: Mapping[str, Any]) -> str:
    """Ollama's Modelfile. Ollama reads the chat template in the GGUF file."""
    context = min(config.get("max_position_embeddings") or _NUM_CTX, _NUM_CTX)
    stops = [
        f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in expected.end_texts
    ]
    return "\n".join([f"FROM ./{name}", f"PARAMETER num_ctx {context}", *stops, ""])


def readme(name: str, model: Path, base: str, figures: str, ask: str) -> str:
    """The README.md of an export: base, licence, the lines of the model's own README.md, what was
    compared, how to ask it."""
    is_ours = (model / "lowmem.json").is_file()
    facts = [
        _OF_FOLDER.sub("", line)
        for line in _card(model).splitlines()
        if is_ours and _FACT.match(line)
    ]
    licence = (_licence(Path(base)) if base else "") or _licence(model)
    front = ["---", f"license: {licence}", "---"] if licence else []
    return "\n".join(
        [
            *(*front, f"# {name}", ""),
            f"- base: {base or 'none, trained from random weights'}",
            f"- licence: {licence or ('not named by the base' if base else 'not named')}",
            *facts,
            f"- compared: {figures}",
            *("", "Ask it:", "", "```", ask, "```", ""),
        ]
    )


def _licence(folder: Path) -> str:
    """The licence that the front of a folder's README.md names."""
    named = re.match(r"---\n(?:.*\n)*?license: *(\S+)", _card(folder))
    return named[1] if named else ""


def _card(folder: Path) -> str:
    """The README.md of a model's folder."""
    file = folder / "README.md"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
