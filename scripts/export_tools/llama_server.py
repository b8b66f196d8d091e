"""llama.cpp's server in this process, from the wheel of xllamacpp, asked over its local port."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


class LlamaServer:
    """A GGUF file that answers one request at a time, on the CPU."""

    def __init__(self, file: Path, context: int) -> None:
        """Raises RuntimeError for a file that llama.cpp cannot load."""
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
        params.use_jinja, params.warmup, params.verbosity = True, False, -1
        params.cpuparams.n_threads = len(os.sched_getaffinity(0))
        self._server = xllamacpp.Server(params)

    def post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._server.listening_address}{path}",
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def prompt(self, messages: list[dict[str, Any]], tools: Any = None) -> str:
        """The messages as the file's own chat template renders them."""
        content = {"messages": messages, **({"tools": tools} if tools else {})}
        return self.post("/apply-template", content)["prompt"]

    def ids(self, text: str, add_special: bool) -> list[int]:
        content = {"content": text, "add_special": add_special, "parse_special": True}
        return self.post("/tokenize", content)["tokens"]

    def complete(self, prompt: str | list[int], new_tokens: int) -> dict[str, Any]:
        """The greedy answer to a text or to ids: its keys `tokens` and `content`."""
        greedy = {"temperature": 0, "cache_prompt": False, "return_tokens": True}
        return self.post("/completion", {"prompt": prompt, "n_predict": new_tokens, **greedy})
