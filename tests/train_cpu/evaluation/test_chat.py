"""scripts/chat.py on a terminal and from a pipe: conversations, streams, stops, two models."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from launch.commands.model import finished
from launch.schema.model_sections import TokenizerSection
from tests import builders
from tests.process import forked_starts
from training.data import tokenizer as data_tokenizer

CHAT = [sys.executable, str(builders.CODE / "scripts/chat.py")]
ANSWERS = ("one", "two", "three")  # to the question "go", in this order
CONTEXT = 40


def save(folder: Path, steps: int, context: int, seed: int = 0) -> Path:
    """A chat model that has learned the conversation in so many steps."""
    torch.manual_seed(seed)
    texts = ["go", *ANSWERS] * 9
    tokenizer = data_tokenizer.train(texts, TokenizerSection(), 300)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    messages = [
        message
        for answer in ANSWERS
        for message in (
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": answer},
        )
    ]
    ids = torch.tensor([tokenizer.apply_chat_template(messages)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(steps):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("chat") / "counts", steps=40, context=CONTEXT)


@pytest.fixture(scope="module")
def adapter(model) -> Path:
    """An adapter that answers otherwise than its base."""
    torch.manual_seed(1)
    network = LlamaForCausalLM.from_pretrained(model)
    config = LoraConfig(
        r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_alpha=99
    )
    get_peft_model(network, config).save_pretrained(folder := model.parent / "adapter")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes((model / file).read_bytes())
    return folder


def piped(text: str, *words: object) -> subprocess.CompletedProcess[str]:
    env = builders.environment(Path(str(words[0])).parent / "workspace")
    return forked_starts.start(tuple(map(str, words)), env, forked_starts.CHAT, text)


class Terminal:
    """A person before the program."""

    def __init__(self, ours: int, child: subprocess.Popen[bytes]) -> None:
        self.ours, self.child = ours, child

    def write(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def until(self, text: str) -> str:
        """Read the screen until a text appears."""
        content, end = "", time.monotonic() + 90
        while text not in content:
            assert time.monotonic() < end, content
            if select.select([self.ours], [], [], 1)[0]:
                content += os.read(self.ours, 1).decode(errors="replace")
        return content.replace("\r\n", "\n")

    def ask(self, question: str) -> str:
        """Type a question; the lines that appear below it."""
        self.write(f"{question}\n")
        return self.until("\n> ").removeprefix(f"{question}\n").removesuffix("\n> ")

    def end(self) -> int:
        """Press Ctrl-C at the prompt; the exit code. Python loses a signal that comes between its
        prompt and its reading."""
        for _ in range(30):
            self.write("\x03")
            with suppress(subprocess.TimeoutExpired):
                return self.child.wait(2)
        raise AssertionError("the program goes on")


@contextmanager
def terminal(*words: object) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    env = builders.environment(Path(str(words[0])).parent / "workspace", TERM="xterm")
    argv = [*CHAT, *map(str, words)]
    child = subprocess.Popen(
        argv,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it controls the child
    )
    os.close(theirs)
    try:
        yield Terminal(ours, child)
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def test_each_question_sees_the_turns_before_until_a_new_conversation_or_a_full_context(model):
    with terminal(model, "--max-new-tokens", "6") as person:
        person.until("> ")
        assert [person.ask("go") for _ in ANSWERS] == [*ANSWERS]
        assert person.ask("/nw") == "no such command: /nw; /new begins another conversation"
        assert person.ask("/new") == "(a new conversation)"
        assert [person.ask("go") for _ in ANSWERS] == [*ANSWERS]
        shown = [person.ask("go") for _ in range(8)]
        full = [text for text in shown if f"(the context of {CONTEXT} tokens is full: " in text]
        assert full, shown
        assert re.search(r"the first \d of its turns (is|are) forgotten\)\n", full[0])
        long = person.ask("go " * CONTEXT)
        assert re.search(
            rf"error: the question has \d+ tokens, and the model's context {CONTEXT}", long
        )
        assert person.end() == 0


def test_lines_of_a_pipe_are_questions_of_their_own_unless_a_history_is_asked_for(model):
    done = piped(f"go\n{'go ' * CONTEXT}\n\ngo\n", model)
    assert (done.returncode, done.stdout) == (3, "one\n" * 2), done.stderr
    assert "tokens, and the model's context" in done.stderr
    done = piped("go\ngo\n/new\ngo\n", model, "--history")
    assert done.stdout == "one\ntwo\none\n", done.stderr
    (model / "aside").mkdir(exist_ok=True)
    template = model / "chat_template.jinja"
    template.rename(model / "aside/chat_template.jinja")
    try:
        done = piped("go\ngo\n", model, "--history", "--max-new-tokens", "3")
    finally:
        (model / "aside/chat_template.jinja").rename(template)
    said = "counts takes each question alone: its folder has no chat template\n"
    assert (done.returncode, done.stderr.count(said)) == (0, 1), done.stderr
    first, second = done.stdout.splitlines()
    assert first == second


def test_ctrl_c_stops_the_answer_that_is_being_written_and_at_the_prompt_the_program(tmp_path):
    endless = save(tmp_path / "endless", steps=0, context=1 << 20)
    with terminal(endless, "--max-new-tokens", "1000000") as person:
        person.until("> ")
        person.write("go\n")
        person.until("\n")
        began = time.monotonic()
        while time.monotonic() < began + 1:  # the answer is written while it is computed
            assert select.select([person.ours], [], [], 60)[0] and os.read(person.ours, 1 << 16)
        person.write("\x03")
        assert "(stopped)" in person.until("\n> ")
        assert person.child.poll() is None
        assert person.end() == 0


def test_tokens_are_drawn_the_same_for_the_same_seed_and_the_system_message_comes_first(tmp_path):
    untrained = save(tmp_path / "untrained", steps=0, context=512)
    words = (untrained, "--max-new-tokens", 12, "go")
    greedy = piped("", *words).stdout
    draw = (*words, "--temperature", 2, "--top-p", 0.95, "--seed", 1)
    drawn = [piped("", *draw).stdout for _ in range(2)]
    assert drawn[0] == drawn[1] != greedy
    assert piped("", *words, "--system", "three three").stdout != greedy
    wrong = (("--top-p", "1.5"), ("--temperature", "hot"), ("--max-new-tokens", "0"))
    for flag, value in wrong:
        done = piped("", *words, flag, value)
        assert done.returncode == 2 and f"found {value}, expected a " in done.stderr


def test_two_models_answer_each_question(model, adapter):
    alone = piped("go\ngo\n", adapter, "--history").stdout.splitlines()
    assert len(alone) == 2 and alone[0] != "one"
    done = piped("go\ngo\n", adapter, "--history", "--compare", "base")
    assert done.stdout.splitlines() == [
        f"adapter: {alone[0]}",
        "base: one",
        f"adapter: {alone[1]}",
        "base: two",
    ]
    assert done.stderr.startswith("one copy of the weights answers twice, the second time without ")
    done = piped("go\n", model, "--compare", adapter)
    assert done.stdout == f"counts: one\nadapter: {alone[0]}\n"
    assert re.match(
        r"both models are loaded together: their weights take \d+.\d KiB, and ", done.stderr
    )
    refused = piped("go\n", model, "--compare", model)
    assert refused.stderr == f"error: --compare {model}: is the same model; name another one\n"
    refused = piped("go\n", model, "--compare", "base")
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        f"error: --compare base: {model} is no adapter; name the folder"
    )


def test_two_models_that_do_not_fit_together_are_loaded_one_at_a_time(model, adapter, capsys):
    sys.path.insert(0, str(builders.CODE / "scripts"))
    import chat as script

    speakers = [script.Speaker(each.name, finished.find(each)) for each in (model, adapter)]
    both_bytes = sum(finished.weights_bytes(speaker.source) for speaker in speakers)
    machine = builders.machine(host_available_bytes=both_bytes)
    models = script.models_of(speakers, machine)
    assert capsys.readouterr().err.startswith("one model is loaded at a time: their weights take ")
    for speaker in (*speakers, speakers[0]):
        network, _ = models.of(speaker.source)
        assert hasattr(network, "peft_config") == (speaker.name == "adapter")
        assert [*models.loaded] == [speaker.source.folder]
    card = builders.machine(
        cards=(builders.gpu(free_bytes=2 * both_bytes),), host_available_bytes=0
    )
    assert script.models_of(speakers, card).keeps_all


def test_weights_that_cannot_be_loaded_are_named_by_what_is_wrong_with_them(adapter, tmp_path):
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    stored = file.read_bytes()
    cut = {name: tensor[:1].clone() for name, tensor in load_file(file).items()}
    save_file(cut, file, {"format": "pt"})
    try:
        done = piped("go\n", adapter)
    finally:
        file.write_bytes(stored)
    assert done.returncode == 3
    assert f"error: {adapter}: cannot be loaded (size mismatch for base_model." in done.stderr
