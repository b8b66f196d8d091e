#!/usr/bin/env python3
"""Talk to a trained model.

chat.py FOLDER answers each line of the input; chat.py FOLDER "question" answers once."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# E402: the modules below are in the folder above. `interpreter` needs only the standard library;
# the other modules may need packages that this Python lacks, so another Python may have to go on
# first.
from launch.base import interpreter

interpreter.go_on_with_packages()

from launch.base import compile_caches, files, modules  # noqa: E402
from launch.base.errors import LaunchError, ResourceError  # noqa: E402
from launch.base.text import visible  # noqa: E402
from launch.commands.model import merge  # noqa: E402
from launch.predict import model_config, weight_files  # noqa: E402
from launch.run_folder.layout import left_in  # noqa: E402
from launch.schema.model_sections import QuantizationSection  # noqa: E402
from launch.schema.result import ExportedModel  # noqa: E402


def _with_model(folder: Path) -> Path:
    if not any((folder / name).is_file() for name in ("config.json", merge.ADAPTER)):
        raise ResourceError(
            f"{folder}: no model here; give the folder that the run printed, or a run folder"
        )
    return folder


def _quantization(folder: Path) -> Mapping[str, Any] | None:
    """The section of the recipe if the base of an adapter was quantised in training."""
    exported = files.read(folder / "lowmem.json", ExportedModel)
    return exported.quantization if exported and (folder / merge.ADAPTER).is_file() else None


def _leave_out_unused(folder: Path) -> None:
    """Make optional packages look as if they were not installed: transformers would import them,
    which takes half of the time to the first answer."""
    used = {
        "peft": (folder / merge.ADAPTER).is_file(),
        "bitsandbytes": _quantization(folder) or weight_files.packing(folder),
    }
    modules.leave_out(package for package in modules.OPTIONAL if not used.get(package))


def load(folder: Path):  # noqa: ANN201  torch is imported late, so its types cannot be named here
    """Load (model, tokenizer) from a folder that a run wrote. The base of an adapter is loaded as
    it was in training, also in 4 bits."""
    is_adapter = (folder / merge.ADAPTER).is_file()
    base = merge.base_of(folder) if is_adapter else folder
    if is_adapter:
        model_config.check_adapter(folder)
    model_config.check_folder(base)
    quantization = _quantization(folder)
    with modules.uncollected():
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
        from transformers.utils import logging as transformers_logging

        from training.data import tokenizer
        from training.model import four_bit
        from training.model.build import folder_config, grow_vocabulary, take_generation

    transformers_logging.disable_progress_bar()
    # bitsandbytes warns of an optional package for 4-bit weights on CPUs
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    in_4_bits = {}
    if quantization:
        config = four_bit.config(QuantizationSection.model_validate(quantization))
        in_4_bits = {"quantization_config": config, "device_map": {"": device}}
    config = folder_config(base)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    loaded_tokenizer = tokenizer.load(folder)
    try:
        model = family.from_pretrained(
            base, local_files_only=True, trust_remote_code=False, use_safetensors=True, **in_4_bits
        )
        if is_adapter:
            from peft import PeftModel

            grow_vocabulary(model, len(loaded_tokenizer))  # rows that the adapter trained
            take_generation(model, loaded_tokenizer, folder)
            model = PeftModel.from_pretrained(model, folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ResourceError(
            f"{folder}: cannot be loaded ({str(error).strip().splitlines()[0]})"
        ) from error
    return model.to(device).eval(), loaded_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the model's folder, or a run's")
    parser.add_argument(
        "question",
        nargs="*",
        help="the question; without it, questions are read from standard input, line by line",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded
    try:
        compile_caches.settle()
        folder = _with_model(left_in(arguments.folder))
        _leave_out_unused(folder)
        model, tokenizer = load(folder)
    except LaunchError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return error.exit_code
    from launch.data.conversation import Conversation
    from training.loop.evaluate import greedy_answers

    def reply(question: str) -> str:
        return greedy_answers(
            model,
            tokenizer,
            [Conversation([{"role": "user", "content": question}])],
            arguments.max_new_tokens,
        )[0]

    if arguments.question:
        print(visible(reply(" ".join(arguments.question))))
        return 0
    interactive = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            question = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if question:
            try:
                print(visible(reply(question)), flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141


if __name__ == "__main__":
    sys.exit(main())
