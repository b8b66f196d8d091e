#!/usr/bin/env python3
"""Talk to a trained model.

chat.py FOLDER is a conversation on a terminal: /new begins another one, Ctrl-C stops an answer and,
at the prompt, the program. From a pipe each line is a question of its own. chat.py FOLDER
"question" answers once."""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# E402: the modules below are in the folder above. `interpreter` needs only the standard library;
# the other modules may need packages that this Python lacks, so another Python may have to go on
# first.
from launch.base import interpreter

interpreter.go_on_with_packages()

from launch.base import compile_caches, modules  # noqa: E402
from launch.base.errors import ConfigError, LaunchError, ResourceError  # noqa: E402
from launch.base.text import size, visible  # noqa: E402
from launch.commands.model import export, finished  # noqa: E402
from launch.data import chat_templates  # noqa: E402
from launch.data.conversation import Conversation, Message  # noqa: E402
from launch.probe import machine as probe_machine  # noqa: E402
from launch.run_folder.layout import RunDir  # noqa: E402
from launch.schema.machine import Machine  # noqa: E402
from launch.schema.result import FinishedModel  # noqa: E402

BASE = "base"  # a value of --compare


@dataclass
class Speaker:
    """A model that answers, and its conversation."""

    name: str
    source: FinishedModel
    is_base: bool = False  # of an adapter, which is switched off
    messages: list[Message] = field(default_factory=list)
    keeps_history: bool | None = None  # None: not known before it is loaded


@dataclass
class Models:
    """The loaded models: all, or the last that answered."""

    keeps_all: bool
    loaded: dict[Path, tuple[Any, Any]] = field(default_factory=dict)

    def of(self, source: FinishedModel) -> tuple[Any, Any]:
        """(model, tokenizer). Raises LaunchError."""
        if source.folder not in self.loaded:
            if not self.keeps_all:
                self.loaded.clear()
                gc.collect()
            self.loaded[source.folder] = _load_finished(source)
        return self.loaded[source.folder]


def load(folder: Path) -> tuple[Any, Any]:
    """Load (model, tokenizer) from a folder that a run wrote. The base of an adapter is loaded as
    it was in training, also in 4 bits."""
    return _load_finished(finished.find(folder))


def _load_finished(source: FinishedModel) -> tuple[Any, Any]:
    with modules.uncollected():
        import torch

        from training.data import tokenizer
        from training.model import build
        from training.model import finished as finished_model

    build.folder_config(source.base)  # of a type that transformers has
    loaded_tokenizer = tokenizer.load(source.tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return finished_model.load(source, loaded_tokenizer, device), loaded_tokenizer


# ---- what is typed
# ---------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="the model's folder, or a run's")
    parser.add_argument(
        "question",
        nargs="*",
        help="the question; without it, questions are read from standard input, line by line",
    )
    parser.add_argument("--max-new-tokens", type=_count, default=128, help="of an answer (128)")
    parser.add_argument("--system", metavar="TEXT", help="a system message before all questions")
    parser.add_argument("--temperature", type=_temperature, help="draw tokens; 0: the most likely")
    parser.add_argument("--top-p", type=_share, help="draw among the likeliest, of this share")
    parser.add_argument("--seed", type=int, help="for the same draws again")
    parser.add_argument(
        "--history", action="store_true", help="lines of a pipe are one conversation"
    )
    parser.add_argument(
        "--compare", metavar="OTHER", help="a second folder that answers too; base: of the adapter"
    )
    return parser.parse_intermixed_args()


def _number(text: str, is_right: Callable[[float], bool], expected: str) -> float:
    """A number that argparse takes."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"found {text}, expected {expected}")
    return value


def _temperature(text: str) -> float:
    return _number(text, lambda value: 0 <= value <= 100, "a number from 0, such as 0.7")


def _share(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, "a share above 0 and up to 1")


def _count(text: str) -> int:
    expected = "a whole number from 1"
    return int(_number(text, lambda value: value >= 1 and value.is_integer(), expected))


def generation(arguments: argparse.Namespace) -> dict[str, Any]:
    """The choice of tokens, as generate() takes it; {}: the most likely one."""
    temperature, top_p = arguments.temperature, arguments.top_p
    if not temperature and (temperature == 0 or top_p is None):
        return {}
    # top_k: of a folder's generation_config.json, else 50
    return {
        "do_sample": True,
        "temperature": temperature or 1.0,
        "top_p": top_p or 1.0,
        "top_k": 0,
    }


def say(line: str) -> None:
    """A line beside the answers."""
    print(visible(line), file=sys.stderr, flush=True)


def _speakers_of(arguments: argparse.Namespace) -> list[Speaker]:
    """Raises ConfigError and ResourceError."""
    first = finished.find(arguments.folder)
    speakers = [Speaker(first.folder.name, first)]
    if arguments.compare == BASE and first.is_adapter:
        return [*speakers, Speaker(BASE, first, is_base=True)]
    if arguments.compare == BASE:
        raise ConfigError(
            f"--compare {BASE}: {first.folder} is no adapter; name the folder of another model"
        )
    if arguments.compare:
        other = finished.find(Path(arguments.compare))
        if other.folder.resolve() == first.folder.resolve():
            raise ConfigError(f"--compare {arguments.compare}: is the same model; name another one")
        same_name = other.folder.name == first.folder.name
        speakers.append(Speaker(str(other.folder) if same_name else other.folder.name, other))
    return speakers


def models_of(speakers: Sequence[Speaker], machine: Machine | None) -> Models:
    """Models that are loaded together if both fit in the free memory of the machine's device; it is
    asked where there are two."""
    sources = {speaker.source.folder: speaker.source for speaker in speakers}
    if machine is None:
        return Models(keeps_all=True)
    if len(sources) == 1:
        say("one copy of the weights answers twice, the second time without the adapter")
        return Models(keeps_all=True)
    free = machine.gpus[0].free_bytes if machine.gpus else machine.host_available_bytes
    needed = sum(map(finished.weights_bytes, sources.values()))
    how = "both models are loaded together" if needed < free else "one model is loaded at a time"
    say(f"{how}: their weights take {size(needed)}, and {size(free)} are free")
    return Models(keeps_all=needed < free)


# ---- answers
# ---------------------------------------------------------------------------


class Writer:
    """A streamer of generate(), which writes an answer as its tokens come."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] | None = None  # None: the prompt comes first
        self.text = ""  # that is written

    def put(self, ids: Any) -> None:
        if self._ids is None:
            self._ids = []
            return
        self._ids += ids.flatten().tolist()
        self._write(ends=False)

    def end(self) -> None:
        self._write(ends=True)
        print(flush=True)

    def _write(self, ends: bool) -> None:
        text = self._tokenizer.decode(self._ids or [], skip_special_tokens=True)
        if ends or not text.endswith("\ufffd"):  # a character of which bytes are missing
            print(visible(text[len(self.text) :]), end="", flush=True)
            self.text = text


def _no_history(speaker: Speaker, model: Any) -> str:
    """The reason why a model takes each question alone; "" if it takes conversations."""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder, which was trained on single questions"
    if chat_templates.in_folder(speaker.source.tokenizer) is None:
        return "its folder has no chat template"
    run = export.run_of(speaker.source.folder, speaker.source.folder)
    if run and RunDir(run).read_recipe().task == "pretrain":
        return "it was pretrained on texts"
    return ""


def fitted(messages: list[Message], model: Any, tokenizer: Any, new_tokens: int) -> int:
    """Remove the first turns that leave no room in the model's context for an answer; the number of
    its tokens. Raises ResourceError for a question that leaves none."""
    from training.loop.evaluate import prompts

    is_pair = model.config.is_encoder_decoder
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None or is_pair:
        return new_tokens
    begin, num_removed = int(messages[0]["role"] == "system"), 0
    while True:
        num_tokens = len(prompts(tokenizer, [Conversation(messages)], is_pair)[0])
        if num_tokens + min(new_tokens, context // 4) <= context or len(messages) - begin < 2:
            break
        del messages[begin : begin + 2]  # a question and its answer
        num_removed += 1
    if num_removed:
        say(
            f"(the context of {context:,} tokens is full: the first {num_removed} of its turns"
            f" {'is' if num_removed == 1 else 'are'} forgotten)"
        )
    if num_tokens >= context:
        raise ResourceError(
            f"the question has {num_tokens:,} tokens, and the model's context {context:,}; ask a"
            " shorter one"
        )
    return min(new_tokens, context - num_tokens)


def reply(
    speaker: Speaker,
    question: str,
    loaded: tuple[Any, Any],
    arguments: argparse.Namespace,
    is_shown: bool,
) -> str:
    """The answer, which is part of the conversation then; `is_shown`: written as it comes, until
    Ctrl-C."""
    from training.loop.evaluate import greedy_answers

    model, tokenizer = loaded
    system = {"role": "system", "content": arguments.system}
    messages = speaker.messages or ([system] if arguments.system else [])
    messages = [*messages, {"role": "user", "content": question}]
    new_tokens = fitted(messages, model, tokenizer, arguments.max_new_tokens)
    options, writer = generation(arguments), Writer(tokenizer)
    if is_shown:
        options["streamer"] = writer
    try:
        with model.disable_adapter() if speaker.is_base else nullcontext():
            conversation = Conversation(messages)
            (text,) = greedy_answers(model, tokenizer, [conversation], new_tokens, **options)
    except KeyboardInterrupt:
        if not is_shown:
            raise
        writer.end()
        say("(stopped)")
        text = writer.text
    speaker.messages = [*messages, {"role": "assistant", "content": text}]
    return text


def _write_answers(
    speakers: Sequence[Speaker],
    question: str,
    models: Models,
    arguments: argparse.Namespace,
    remembers: bool,
    is_shown: bool,
) -> None:
    """Write the answer of each model."""
    for speaker in speakers:
        loaded = models.of(speaker.source)
        if speaker.keeps_history is None:
            why = _no_history(speaker, loaded[0]) if remembers else ""
            speaker.keeps_history = remembers and not why
            if why:
                say(f"{speaker.name} takes each question alone: {why}")
        if len(speakers) > 1:
            print(f"{visible(speaker.name)}: ", end="", flush=True)
        text = reply(speaker, question, loaded, arguments, is_shown)
        if not speaker.keeps_history:
            speaker.messages = []
        if not is_shown:
            print(visible(text), flush=True)


def questions(is_terminal: bool) -> Iterator[str]:
    """The lines of standard input, until its end or Ctrl-C at the prompt."""
    sys.stdin.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    while True:
        try:
            question = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if question:
            yield question


def _converse(speakers: Sequence[Speaker], models: Models, arguments: argparse.Namespace) -> int:
    """Answer each line; the exit code of the first line of a pipe that has no answer."""
    is_terminal, exit_code = sys.stdin.isatty(), 0
    remembers = is_terminal or arguments.history
    for question in questions(is_terminal):
        if remembers and question == "/new":
            for speaker in speakers:
                speaker.messages = []
            say("(a new conversation)")
            continue
        if is_terminal and re.fullmatch(r"/\w*", question):
            say(f"no such command: {question}; /new begins another conversation")
            continue
        try:
            _write_answers(speakers, question, models, arguments, remembers, is_terminal)
        except LaunchError as error:
            say(f"error: {error}")
            exit_code = exit_code or (0 if is_terminal else error.exit_code)
    return exit_code


def main() -> int:
    arguments = parsed()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded
    try:
        compile_caches.settle()
        speakers = _speakers_of(arguments)
        finished.leave_out_unused(*(speaker.source for speaker in speakers))
        models = models_of(speakers, probe_machine.machine() if arguments.compare else None)
        models.of(speakers[0].source)
        if arguments.seed is not None:
            import torch

            torch.manual_seed(arguments.seed)
        if arguments.question:
            question = " ".join(arguments.question)
            _write_answers(speakers, question, models, arguments, remembers=False, is_shown=False)
        else:
            return _converse(speakers, models, arguments)
    except LaunchError as error:
        say(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
