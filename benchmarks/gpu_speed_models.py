"""A model folder of a case of gpu_speed, with random bfloat16 weights that the card makes.

python -m benchmarks.gpu_speed_models CONFIG.json TOKENIZER TARGET
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu_speed_cases import SEED


def main(content: str, tokenizer_folder: Path, target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = AutoConfig.for_model(**json.loads(content))
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for one in (model.config, model.generation_config):
        one.pad_token_id, one.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        one.bos_token_id = tokenizer.bos_token_id
    model.config.architectures = [type(model).__name__]
    aside = target.with_suffix(".part")
    model.save_pretrained(aside)
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, aside / file.name)
    aside.rename(target)  # its readers see a whole folder


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
