"""Write a GGUF file as a Hugging Face folder with whole weights: dequantise.py GGUF FOLDER. Needs
gguf."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
model.hf_quantizer = None
model.config.quantization_config = None
del model.config.quantization_config
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
(folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# SmolLM2-135M-Instruct\n")
