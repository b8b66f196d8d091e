"""Convert a model's folder to a GGUF file and let llama.cpp answer from it. `python -m launch
export` starts it with the Python of .cache/export_tools."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class
from llama_server import Llama, LlamaCpp, LlamaServer, quantize

TYPES = {
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
_COMMON_RULES = ("gpt-2", "llama-bpe", "qwen2", "smollm", "deepseek-llm", "gpt-4o", "tekken")
LLAMA_CPP = Path("llama_cpp")  # in the place of a program of llama.cpp: llama-cpp-python
WIDTH = 32  # of the model without knowledge that a vocabulary is loaded with
_NO_TOKEN = -1
CONTEXT = 4096


class Refused(Exception):
    """Nothing is converted; the message says why."""


def _model_class(folder: Path) -> type[TextModel]:
    """The converter's class for a folder. Raises Refused for a type that it does not know."""
    architecture = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    try:
        return get_model_class(architecture)
    except NotImplementedError as error:  # so the converter says that it lacks a type
        raise Refused(f"{architecture}: the converter does not know this type of model") from error


def opened(
    folder: Path,
    file: Path,
    file_type: str,
    expected: dict[str, Any],
    rule: str | None,
    chosen: dict[str, Any] | None = None,
) -> TextModel:
    """The converter's model, whose vocabulary splits by `rule` (None: the converter's own), and has
    the end tokens and the chat template of the training and the keys `chosen`."""
    # keys that this version of transformers drops
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {**stored, **ModelBase.load_hparams(folder, False)}
    config.setdefault("n_ctx", config.get("n_positions"))
    model = _model_class(folder)(folder, TYPES[file_type], file, hparams=config)
    if rule is not None:
        model.get_vocab_base_pre = lambda tokenizer: rule
    set_vocabulary = model.set_vocab

    def set_vocab() -> None:
        set_vocabulary()
        values = model.gguf_writer.kv_data[0]
        others = [number for number in expected["ends"] if number != expected["eos_id"]]
        numbers = {"eos": expected["eos_id"], "eot": next(iter(others), None)}
        numbers |= {"bos": expected["bos_id"]}
        for name, number in numbers.items():
            key = f"tokenizer.ggml.{name}_token_id"
            if number is not None and (name != "eot" or key not in values):
                values[key] = gguf.GGUFValue(number, gguf.GGUFValueType.UINT32)
        begins = expected["prompts"][0]["ids"][:1] == [expected["bos_id"]]
        values[gguf.Keys.Tokenizer.ADD_BOS] = gguf.GGUFValue(begins, gguf.GGUFValueType.BOOL)
        template = gguf.GGUFValue(expected["chat_template"], gguf.GGUFValueType.STRING)
        values[gguf.Keys.Tokenizer.CHAT_TEMPLATE] = template
        values.update(chosen or {})

    model.set_vocab = set_vocab
    return model


def vocabulary(folder: Path, expected: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The keys of a folder's tokenizer, and whether the converter knew its splitting rule."""
    try:
        model, is_known = opened(folder, Path("none"), "f16", expected, None), True
        model.set_vocab()
    except NotImplementedError:  # so it says that it does not know a splitting rule
        model, is_known = opened(folder, Path("none"), "f16", expected, "gpt-2"), False
        model.set_vocab()
    return dict(model.gguf_writer.kv_data[0]), is_known


def _write_vocabulary(file: Path, values: dict[str, Any]) -> None:
    """Write a Llama of one layer of zeros with this vocabulary, which llama.cpp loads."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.kv_data[0].update(
        {key: value for key, value in values.items() if key.startswith("tokenizer.")}
    )
    num_tokens = len(values[gguf.Keys.Tokenizer.LIST].value)
    writer.add_vocab_size(num_tokens)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in layer:
        writer.add_tensor(f"blk.0.{name}.weight", numpy.zeros((WIDTH, WIDTH), numpy.float16))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", numpy.zeros(WIDTH, numpy.float32))
    embeddings = numpy.zeros((num_tokens, WIDTH), numpy.float16)
    writer.add_tensor("token_embd.weight", embeddings)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _NoSuchRule(Exception):
    """llama.cpp does not load a vocabulary with this rule."""


def first_difference(
    values: dict[str, Any], expected_file: Path, part: str = "texts"
) -> tuple[int, str] | None:
    """The number of the first text or prompt that llama.cpp splits otherwise by a tokenizer's
    keys, and a line on it. Raises _NoSuchRule."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "vocabulary.gguf"
        _write_vocabulary(file, values)
        argv = [sys.executable, Path(__file__).with_name("first_difference.py"), file]
        done = subprocess.run(
            [*argv, expected_file, part], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise _NoSuchRule
    return json.loads(done.stdout)


def _set_space_prefix(values: dict[str, Any], expected_file: Path) -> None:
    """Let SentencePiece put no blank before a text and behind a special token, if that alone gives
    the ids of the prompts."""
    key = gguf.Keys.Tokenizer.ADD_PREFIX
    without = {**values, key: gguf.GGUFValue(False, gguf.GGUFValueType.BOOL)}
    if first_difference(values, expected_file, "prompts") and not first_difference(
        without, expected_file, "prompts"
    ):
        values[key] = without[key]


def _splitting_rule(folder: Path, expected_file: Path) -> tuple[dict[str, Any], bool, str]:
    """The keys of a tokenizer with the rule that splits all texts as it does, whether it was
    searched, and the first text that a rule which the converter knows splits otherwise. Raises
    Refused without a rule."""
    values, is_known = vocabulary(folder, json.loads(expected_file.read_text(encoding="utf-8")))
    key = gguf.Keys.Tokenizer.PRE
    if is_known:
        rule = values.get(key, values[gguf.Keys.Tokenizer.MODEL]).value
        try:
            if values[gguf.Keys.Tokenizer.MODEL].value == "llama":
                _set_space_prefix(values, expected_file)
            different = first_difference(values, expected_file)
        except _NoSuchRule as error:
            raise Refused(f"llama.cpp does not load its vocabulary (rule {rule})") from error
        return values, False, different[1] if different else ""
    source = inspect.getsource(TextModel.get_vocab_base_pre)
    rules = dict.fromkeys((*_COMMON_RULES, *re.findall(r'res = "([^"]+)"', source)))
    nearest = (-1, "")
    for rule in rules:
        values[key] = gguf.GGUFValue(rule, gguf.GGUFValueType.STRING)
        try:
            different = first_difference(values, expected_file)
        except _NoSuchRule:
            continue
        if different is None:
            return values, True, ""
        nearest = max(nearest, tuple(different))
    raise Refused(
        f"none of the {len(rules)} splitting rules of llama.cpp gives this tokenizer's ids; with"
        f" the nearest, {nearest[1]}"
    )


def answers(file: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The ids of each prompt as the file renders it, and the token that the file chooses in the
    place of each token of the expected answers. Raises Refused."""
    ids, choices = [], []
    try:
        server = Llama(file, CONTEXT)
    except RuntimeError as error:
        raise Refused(f"llama.cpp cannot load what the converter writes ({error})") from error
    for prompt in expected["prompts"]:
        text = prompt["text"]
        if prompt["messages"]:
            text = server.prompt(prompt["messages"], prompt["tools"])
        ids.append(server.ids(text))
        choices.append(chosen(server, ids[-1], prompt["reply"]))
    return {"prompts": ids, "answers": choices}


def chosen(server: LlamaServer | LlamaCpp, prompt: list[int], expected: list[int]) -> list[int]:
    """The greedy tokens behind a prompt. Behind one that differs, the expected answer goes on."""
    tokens = list[int]()
    while missing := len(expected) - len(tokens):
        begin = [*prompt, *expected[: len(tokens)]]
        reply = server.complete(begin, missing)["tokens"]
        pairs = zip(reply, expected[len(tokens) :], strict=False)
        equal = next((i for i, (token, other) in enumerate(pairs) if token != other), len(reply))
        tokens += reply[: equal + 1] or [_NO_TOKEN]
    return tokens


def convert(arguments: argparse.Namespace, expected: dict[str, Any]) -> dict[str, Any]:
    folder, file = arguments.folder, arguments.file
    values, is_searched, other_ids = _splitting_rule(folder, arguments.expected)
    names = gguf.Keys.Tokenizer
    rule = values.get(names.PRE, values[names.MODEL]).value
    print(f"splitting rule {rule}; writing {file.name}", flush=True)
    program = arguments.llama_quantize
    written = file.with_suffix(".f16") if program else file
    file_type = "f16" if program else arguments.type
    chosen = {key: values[key] for key in (names.ADD_PREFIX,) if key in values}
    model = opened(folder, written, file_type, expected, rule if is_searched else None, chosen)
    model.write()
    if program == LLAMA_CPP:
        quantize(written, file, arguments.type)
    elif program:
        subprocess.run([program, written, file, arguments.type.upper()], check=True)
    if program:
        written.unlink()
    print(f"asking llama.cpp {len(expected['prompts'])} prompts", flush=True)
    return {
        "rule": rule,
        "is_searched": is_searched,
        "other_ids": other_ids,
        **answers(file, expected),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "file", "expected", "out", "llama-quantize"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--type")
    arguments = parser.parse_args()
    expected = json.loads(arguments.expected.read_text(encoding="utf-8"))
    try:
        with torch.inference_mode():
            result = convert(arguments, expected)
    except Refused as refusal:
        result = {"refused": str(refusal)}
    # what the converter raises for a folder that it cannot read as it expects
    except (
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        AssertionError,
    ) as error:
        result = {"refused": f"the converter fails: {type(error).__name__}: {error}"}
    arguments.out.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
