"""A GGUF file that answers on the CPU: from llama.cpp's server in this process (xllamacpp), asked
over its local port, or, where that is not installed, from llama-cpp-python."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_TEXTS_A_REQUEST = 200
_BETWEEN = -1  # an id that no tokenizer gives, between two texts


class LlamaServer:
    """The file in xllamacpp; it answers one request at a time."""

    def __init__(self, file: Path, context: int) -> None:
        """Raises RuntimeError for a file that llama.cpp cannot load."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
        params.use_jinja, params.warmup, params.verbosity = True, False, -1
        params.cpuparams.n_threads = len(os.sched_getaffinity(0))
        self._server = xllamacpp.Server(params)

    def _post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
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
        return self._post("/apply-template", content)["prompt"]

    def ids(self, text: str) -> list[int]:
        """The ids of a prompt."""
        content = {"content": text, "add_special": True, "parse_special": True}
        return self._post("/tokenize", content)["tokens"]

    def split(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The ids of each text alone, many in one request."""
        for start in range(0, len(texts), _TEXTS_A_REQUEST):
            part = texts[start : start + _TEXTS_A_REQUEST]
            content = [piece for text in part for piece in (text, _BETWEEN)]
            ids = self._post("/tokenize", {"content": content, "parse_special": True})["tokens"]
            of_text = list[int]()
            for number in ids:
                if number == _BETWEEN:
                    yield of_text
                    of_text = []
                else:
                    of_text.append(number)

    def complete(self, prompt: str | list[int], new_tokens: int) -> dict[str, Any]:
        """The greedy answer to a text or to ids: its keys `tokens` and `content`."""
        greedy = {"temperature": 0, "cache_prompt": False, "return_tokens": True}
        return self._post("/completion", {"prompt": prompt, "n_predict": new_tokens, **greedy})


class LlamaCpp:
    """The file in llama-cpp-python."""

    def __init__(self, file: Path, context: int) -> None:
        """Raises RuntimeError for a file that llama.cpp cannot load."""
        import llama_cpp

        self._library, num_threads = llama_cpp, len(os.sched_getaffinity(0))
        try:
            self._model = llama_cpp.Llama(
                str(file), n_ctx=context, n_threads=num_threads, verbose=False
            )
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    def _text(self, token: int) -> str:
        return self._model.detokenize([token], special=True).decode(errors="replace")

    def prompt(self, messages: list[dict[str, Any]], tools: Any = None) -> str:
        """The messages as the file's own chat template renders them; without the first token that
        ids() adds."""
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        begin, end = self._model.token_bos(), self._model.token_eos()
        begin_text = self._text(begin) if begin >= 0 else ""
        template = self._model.metadata["tokenizer.chat_template"]
        render = Jinja2ChatFormatter(template, self._text(end) if end >= 0 else "", begin_text)
        text = render(messages=messages, tools=tools).prompt
        return text.removeprefix(begin_text) if self.ids("") else text

    def ids(self, text: str) -> list[int]:
        """The ids of a prompt."""
        return self._model.tokenize(text.encode(), add_bos=True, special=True)

    def split(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The ids of each text alone."""
        for text in texts:
            yield self._model.tokenize(text.encode(), add_bos=False, special=True)

    def complete(self, prompt: str | list[int], new_tokens: int) -> dict[str, Any]:
        """The greedy answer to a text or to ids: its keys `tokens` and `content`."""
        ids = self.ids(prompt) if isinstance(prompt, str) else prompt
        vocabulary = self._library.llama_model_get_vocab(self._model.model)
        self._model.reset()  # else ids that are the same as before are not computed again
        tokens = list[int]()
        for token in self._model.generate(ids, temp=0):
            tokens.append(token)
            has_ended = self._library.llama_vocab_is_eog(vocabulary, token)
            if has_ended or len(tokens) == new_tokens:
                break
        content = self._model.detokenize(tokens[:-1] if has_ended else tokens, ids)
        return {"tokens": tokens, "content": content.decode(errors="replace")}


Llama = LlamaCpp if find_spec("llama_cpp") and not find_spec("xllamacpp") else LlamaServer


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Write a file of f16 as one of another type, by llama-cpp-python. Raises RuntimeError."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type.upper()}")
    params.nthread = len(os.sched_getaffinity(0))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise RuntimeError(f"llama.cpp cannot write {source.name} as {file_type}")
