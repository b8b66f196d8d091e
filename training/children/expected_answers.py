"""Compute what a converted model must answer: ids of texts, ids of prompts, and greedy answers with
the margins of their logits. `python -m launch export` starts it."""

import random
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from launch.base import files, modules, processes
from launch.base.errors import LaunchError
from launch.base.text import shown
from launch.base.workspace import Workspace
from launch.data import sources, token_cache
from launch.data.conversation import Conversation, Sample, text_of
from launch.data.rows import UNLIMITED
from launch.run_folder.layout import RunDir
from launch.schema.result import ExpectedAnswers, FinishedModel, Prompt

_NUM_PROMPTS, _NEW_TOKENS = 20, 32
NUM_ROWS, _NUM_STRINGS = 10_000, 10_000  # whose ids are compared
MOST_CHARACTERS = 400  # of a row's text, and of a text that is continued
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many days has a week?",
    "Write one sentence on rain.",
    "What is 12 + 30?",
    "Translate to German: good morning.",
    "Who wrote Hamlet?",
    "Give an example of a fruit.",
    "What do bees make?",
    "Sort these numbers: 3, 1, 2.",
    "What is the opposite of cold?",
    "Explain gravity in one sentence.",
    "用一句话介绍月亮。",
    "What does a doctor do?",
    "List two animals that fly.",
    "Is water wet?",
    "Complete: the sky is",
    "What comes after Monday?",
    "Write a short greeting.",
    "How do plants drink?",
)
# Scripts and signs between which splitting rules differ: code points from, to
RANGES = (
    *((0x20, 0x7E), (0xA1, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA)),
    *((0x627, 0x64A), (0x905, 0x939), (0xE01, 0xE2E), (0x3041, 0x3096), (0x30A1, 0x30FA)),
    *((0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x2010, 0x2027), (0x2190, 0x21FF), (0x1F600, 0x1F64F)),
)
_PIECES = (
    *("'s", "'LL", "'re ", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n ", "\u3000"),
    *("2024", "7", "123456", "3.14", "1,000", "½", "the", " The", "HELLO", "camelCase", "don't"),
    *("...", "!?", "--", "_", "#include", "</p>", "http://a.b/c?d=1", "e\u0301", "ﬁ", "👩‍🚀"),
)


def strings(texts: Sequence[str]) -> Iterator[str]:
    """Generated strings, the same for the same texts: signs of many scripts, numbers, blanks and
    parts of the texts, composed as text usually is (NFC)."""
    rng = random.Random(0)
    for _ in range(_NUM_STRINGS):
        parts = []
        for _ in range(rng.randint(1, 8)):
            first, last = rng.choice(RANGES)
            signs = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 4)))
            text = rng.choice(texts)
            start = rng.randrange(len(text) + 1)
            parts.append(rng.choice((signs, rng.choice(_PIECES), text[start : start + 12])))
        yield unicodedata.normalize("NFC", "".join(parts))


def _rows_of_run(folder: Path) -> tuple[list[Sample], list[Sample]]:
    """The first samples of a run's training data and of its held-out data; none where the data is
    gone."""
    run = RunDir(folder)
    recipe, plan = run.read_recipe(), run.read_plan()

    def first(part: sources.Part) -> list[Sample]:
        return list(islice(sources.samples_in(tokens.of_part(part), UNLIMITED), NUM_ROWS))

    try:
        tokens = token_cache.token_cache(
            Workspace.here().cache, recipe, plan.shape, plan.data_format
        )
        return first("train"), first("validation")
    except (LaunchError, OSError) as error:
        print(f"the rows of {shown(str(folder))} cannot be read, so others are asked: {error}")
        return [], []


def _question(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}])


@dataclass(frozen=True)
class _Reference:
    """The model that is converted, with the ids that end its replies."""

    model: Any
    tokenizer: Any
    renderer: Any
    ends: frozenset[int]

    def prompt(self, sample: Sample) -> Prompt:
        """The prompt of a sample without its answer, and the model's greedy reply."""
        if isinstance(sample, str):
            text = sample[: min(len(sample) // 2, MOST_CHARACTERS)] or sample
            ids = self.tokenizer(text)["input_ids"]
            return Prompt((), None, text, tuple(ids), *self._reply(ids))
        text = self.renderer.text_in_use(sample.messages, sample.tools, prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(tuple(sample.messages), sample.tools, text, tuple(ids), *self._reply(ids))

    def _reply(self, ids: list[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The tokens of a greedy reply, and how far apart the two best logits were at each."""
        reply, margins, cache, step = list[int](), list[float](), None, torch.tensor([ids])
        while len(reply) < _NEW_TOKENS and not self.ends & {*reply[-1:]}:
            with torch.no_grad():
                output = self.model(step, past_key_values=cache, use_cache=True)
            best = output.logits[0, -1].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            reply.append(int(best.indices[0]))
            cache, step = output.past_key_values, best.indices[:1].unsqueeze(0)
        return tuple(reply), tuple(margins)


def load(folder: Path) -> _Reference:
    """Load a model in float32. Raises ResourceError."""
    with modules.uncollected():
        from training.data import tokenizer as tokenizers
        from training.data.chat.loss_spans import ConversationRenderer
        from training.model import finished
    tokenizer: Any = tokenizers.load(folder)
    source = FinishedModel(folder, folder, folder, "float32", None)
    model = finished.load(source, tokenizer, torch.device("cpu"))
    renderer = ConversationRenderer(tokenizer)
    listed: Any = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    ends = {tokenizer.eos_token_id, *renderer.end_ids, *listed} - {None}
    return _Reference(model, tokenizer, renderer, frozenset(ends))


def expected(folder: Path, run: Path | None, file: Path | None) -> ExpectedAnswers:
    """Ask the model in `folder` the lines of a file, else held-out rows of its run, rows that it
    was trained on, or built-in questions."""
    reference = load(folder)
    tokenizer = reference.tokenizer
    trained, held_out = _rows_of_run(run) if run else ([], [])
    samples_asked = _prompts_of(held_out or trained, tokenizer)
    origin = "held-out rows" if held_out else "training rows"
    if file is not None:
        samples_asked, origin = [*map(_question, files.lines_of_text(file))], file.name
    if not samples_asked:
        samples_asked, origin = [*map(_question, QUESTIONS)], "built-in questions"
    prompts = tuple(map(reference.prompt, samples_asked))
    of_training = (text_of(sample)[:MOST_CHARACTERS] for sample in trained)
    rows = [*of_training, *(prompt.text for prompt in prompts)]
    texts = [*rows, *strings(rows)]
    all_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ends = sorted(reference.ends)
    return ExpectedAnswers(
        prompts=prompts,
        texts=tuple((text, tuple(ids)) for text, ids in zip(texts, all_ids, strict=True)),
        chat_template=tokenizer.get_chat_template(),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        ends=tuple(ends),
        end_texts=tuple(tokenizer.convert_ids_to_tokens(ends)),
        origin=origin,
    )


def _prompts_of(dataset: Sequence[Sample], tokenizer: Any) -> Sequence[Sample]:
    """The first conversations that can be asked, without their answers, else the first texts."""
    from training.loop import evaluate

    pairs = evaluate.questions(dataset, _NUM_PROMPTS, tokenizer, False)
    texts = [text for text in dataset if isinstance(text, str)]
    return [question for question, _ in pairs] or texts[:_NUM_PROMPTS]


def _write(folder: str, out: str, run: str, prompts: str) -> None:
    answers = expected(Path(folder), Path(run) if run else None, Path(prompts) if prompts else None)
    files.write_json(Path(out), answers)


if __name__ == "__main__":
    modules.leave_out(modules.OPTIONAL)
    sys.exit(processes.child_main(_write, *sys.argv[1:]))
