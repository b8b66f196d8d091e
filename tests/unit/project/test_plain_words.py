"""Names and docstrings use the field's plain words."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [
    path
    for folder in ("launch", "training", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
WORDS = {
    # a word that says nothing of the domain -> what to write
    "told": "stop_signals",
    "Told": "StopSignals",
    "heard": "a noun of the domain: signal, output, messages",
    "room": "disk_space, free_bytes",
    "rooms": "modules",
    "obey": "stop_callback",
    "Obey": "StopCallback",
    "Watch": "RankWatcher, StopConditions, NanGuard",
    "evidence": "oom_record, oom_history",
    "Exceeded": "OomEvent",
    "RanOut": "OomEvent",
    "concessions": "relaxations",
    "rungs": "relaxations",
    "about": "facts",
    "subject": "facts",
    "given": "wishes, or the noun: values, options",
    "Given": "Wishes",
    "usual": "error_margin",
    "known": "file_facts, or the noun: names, sizes",
    "Known": "FileFacts",
    "wish": "resume, requested_resume",
    "house": "workspace",
    "House": "Workspace",
    "started": "attach, or started_at, start_s",
    "direct": "attach",
    "running": "run",
    "supervise": "attempt",
    "seed_cli": "chatlm_flags",
    "cut": "tokenizer, split, unit",
    "tree": "processes",
    "reasons": "explain",
    "shapes": "model_config",
    "ModelShape": "ModelSize",
    "shape": "model_size, config; only a tensor has a shape",
    "first_rows": "sniff",
    "samples": "sample_audit, dataset, num_samples",
    "imports": "import_memory, modules",
    "keys": "cache_keys, or whose keys they are",
    "answer": "worker, reply",
    "live_bytes": "recorder",
    "depth": "repeat_layers",
    "shared_out": "sharded",
    "side_by_side": "tokenise",
    "by_length": "sample_order",
    "longest": "trial_rows, max_length",
    "finite": "nan_guard",
    "one": "the noun: candidate, path, row, rank",
    "found": "the noun: match, value, devices",
    "words": "the noun: argv, text, message, tokens",
    "held": "the noun",
    "kept": "the noun",
    "left": "remaining_bytes, remaining_s",
    "at": "path, step, offset, index",
    "mine": "own_..., of this rank",
    "whole": "the noun: total, full_text",
}
EXCEPTIONS = {
    # file, binding: why it stays
    ("launch/predict/models/model_config.py", "shape"): "of a tensor in a safetensors header",
    ("launch/predict/optimizers.py", "shape"): "of a parameter's tensor",
    ("launch/predict/parameters.py", "shape"): "of a parameter's tensor",
    ("launch/predict/trained_parameters.py", "shape"): "of a parameter's tensor",
    ("launch/predict/models/weight_files.py", "shape"): "of a tensor in a safetensors header",
    ("launch/schema/plan.py", "by_length"): "a key of plan.json",
    ("launch/schema/plan.py", "samples"): "a key of plan.json",
    ("launch/schema/plan.py", "shape"): "a key of plan.json",
    ("launch/schema/model_sections.py", "shape"): "the recipe key model.shape",
    ("launch/schema/result.py", "samples"): "a key of events.jsonl",
    ("training/data/encode.py", "longest"): "a key of counts.json",
    ("training/data/encode.py", "samples"): "a key of counts.json",
}
HEADLESS = ("How", "What", "When", "Where", "Whether", "Which", "Who", "Why")
# first words of comments whose noun is in the code beside them
LEANING = ("of", "those", "that")


def bindings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that the module binds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def vague_names(path: Path, text: str) -> Iterator[tuple[str, int, str]]:
    """Bindings of one file that stand in WORDS and not in EXCEPTIONS."""
    file = path.relative_to(ROOT).as_posix()
    for line, name in [(1, path.stem), *bindings(ast.parse(text))]:
        if (word := name.strip("_")) in WORDS and (file, word) not in EXCEPTIONS:
            yield file, line, name


def test_no_name_is_a_word_that_says_nothing_of_the_domain():
    vague = [
        f"{file}:{line}: {name} -> {WORDS[name.strip('_')]}"
        for path in SOURCES
        for file, line, name in vague_names(path, path.read_text(encoding="utf-8"))
    ]
    assert not vague, f"{len(vague)} names\n" + "\n".join(vague)


def test_every_exception_is_still_needed():
    used = {
        (path.relative_to(ROOT).as_posix(), name.strip("_"))
        for path in SOURCES
        for _, name in [(1, path.stem), *bindings(ast.parse(path.read_text(encoding="utf-8")))]
    }
    assert not [key for key in EXCEPTIONS if key not in used]
    assert all(EXCEPTIONS.values())


def test_vague_names_are_seen():
    text = "def told(cut):\n    self.found = [one for one in cut]\n"
    names = [name for *_, name in vague_names(ROOT / "launch" / "usual.py", text)]
    assert sorted(names) == ["cut", "found", "one", "told", "usual"]


def test_a_docstring_begins_with_a_verb_or_a_noun():
    headless = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if text.startswith(HEADLESS) and text.split()[0].rstrip(",") in HEADLESS:
                    line = getattr(node, "lineno", 1)
                    headless.append(f"{path.relative_to(ROOT).as_posix()}:{line}: {text[:60]}")
    assert not headless, f"{len(headless)} docstrings\n" + "\n".join(headless)


def comments(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, first word and text of each comment; whole lines in a row are a single comment."""
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, is_line = token.start[0], token.line.lstrip().startswith("#")
            goes_on = is_line and before == line - 1
            if (word := re.match(r"# +(\w+)", token.string)) and not goes_on:
                yield line, word[1].lower(), token.string
            before = line if is_line else 0


def test_nearly_every_comment_stands_alone():
    every = [
        (f"{path.relative_to(ROOT).as_posix()}:{line}: {text}", word)
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] != "scripts"
        for line, word, text in comments(path.read_text(encoding="utf-8"))
    ]
    leaning = [place for place, word in every if word in LEANING]
    share = len(leaning) / len(every)
    assert share <= 0.03, f"{share:.1%} of {len(every)} comments\n" + "\n".join(leaning)


def test_comments_that_lean_on_the_code_are_seen():
    text = "LIMIT = 3  # of a row\n# Those of a card,\n# of two cards\nNAME = '# that'\n# Cards\n"
    assert [word for _, word, _ in comments(text)] == ["of", "those", "cards"]
    assert [word in LEANING for _, word, _ in comments(text)] == [True, True, False]
