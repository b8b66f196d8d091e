"""Exported folders as plain transformers and peft load them: a line of versions on standard output,
then an answer for each line of standard input, all in JSON.

It imports nothing of ours, and runs with each version of transformers that exports.py compares."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
)

MAX_NEW_TOKENS = 96


@dataclass(frozen=True)
class Request:
    """An export, and what it is asked."""

    export: str  # a folder
    base: str  # the folder under an adapter
    is_encoder_decoder: bool
    is_adapter: bool
    attention: str | None
    pairs: Sequence[tuple[str, str]]  # prompts and answers in words
    inputs: Sequence[list[int]]  # rows whose logits are written to logits_file
    labels: Sequence[list[int]]
    logits_file: str
    prompts: Sequence[list[int]]  # they are answered


def token_ids(request: Request) -> dict[str, Any]:
    """The ids of the rows and of their prompts, as a user makes them; of an encoder-decoder its
    inputs and labels."""
    tokenizer: Any = AutoTokenizer.from_pretrained(request.export)
    if request.is_encoder_decoder:
        return {
            "prompts": [tokenizer(prompt)["input_ids"] for prompt, _ in request.pairs],
            "rows": [tokenizer(text_target=answer)["input_ids"] for _, answer in request.pairs],
        }
    prompts, rows = [], []
    for prompt, answer in request.pairs:
        turns = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        prompts.append(ids)
        turns.append({"role": "assistant", "content": answer})
        rows.append(tokenizer.apply_chat_template(turns, return_dict=False))
    return {"prompts": prompts, "rows": rows}


def loaded(request: Request, dtype: str) -> tuple[Any, dict[str, list[str]]]:
    """The model, and what transformers has to say of its loading."""
    family = AutoModelForSeq2SeqLM if request.is_encoder_decoder else AutoModelForCausalLM
    folder = request.base if request.is_adapter else request.export
    settings = {"dtype": dtype, "attn_implementation": request.attention}
    loading: Any = family.from_pretrained(folder, output_loading_info=True, **settings)
    model, said = loading
    if request.is_adapter:
        model: Any = PeftModel.from_pretrained(model, request.export)
        if (Path(request.export) / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(request.export)
    return model.eval(), {key: sorted(map(str, value)) for key, value in said.items() if value}


def write_logits(model: Any, request: Request) -> None:
    """Write the logits that the weights give in float32: in 16 bits two right models differ by 1 %
    of the largest."""
    logits = []
    for inputs, labels in zip(request.inputs, request.labels, strict=True):
        given = {"labels": torch.tensor([labels])} if request.is_encoder_decoder else {}
        logits.append(model(input_ids=torch.tensor([inputs]), **given).logits[0])
    torch.save(logits, request.logits_file)


def answer(model: Any, request: Request, prompt: list[int]) -> list[int]:
    """The tokens that the model generates, the likeliest each time."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
    )
    return made[0].tolist()[1 if request.is_encoder_decoder else len(prompt) :]


@torch.no_grad()
def found(request: Request) -> dict[str, Any]:
    """What could be found, and the `failures` that kept the rest from being found."""
    said: dict[str, Any] = {"failures": []}
    try:
        said["tokens"] = token_ids(request)
    except Exception as error:  # noqa: BLE001  a failure is an answer
        said["failures"].append(f"tokenizer: {brief(error)}")
    try:
        model, said["loading"] = loaded(request, "auto")
        said["dtype"] = str(model.dtype).removeprefix("torch.")
        said["use_cache"] = getattr(model.config, "use_cache", None)
        said["ends"] = model.generation_config.eos_token_id
        said["answers"] = [answer(model, request, prompt) for prompt in request.prompts]
        write_logits(loaded(request, "float32")[0], request)
    except Exception as error:  # noqa: BLE001  a failure is an answer
        said["failures"].append(f"model: {brief(error)}")
    said["ours"] = sorted({name.partition(".")[0] for name in sys.modules} & OURS)
    return said


OURS = {"launch", "training", "benchmarks", "tests"}


def brief(error: Exception) -> str:
    """Its first line; the whole goes to standard error."""
    traceback.print_exc()
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


if __name__ == "__main__":
    packages = (transformers, peft, torch)
    print(json.dumps({package.__name__: package.__version__ for package in packages}), flush=True)
    for line in sys.stdin:
        print(json.dumps(found(Request(**json.loads(line)))), flush=True)
