"""Whatever text a user, a file or a model gives: nothing of it is executed, it stands in files as
text, and no terminal obeys it."""

from __future__ import annotations

import html.parser
import io
import json
import os
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from launch.base.text import HIDDEN, visible
from launch.base.workspace import Workspace
from launch.recipe import strict_yaml
from launch.render import run_files
from launch.report.run_end import html as report_page
from launch.run_folder import layout
from launch.schema.plan import Rendezvous
from launch.schema.result import Failure, RunResult
from launch.supervise.screen import Screen
from tests import builders
from tests.process.commands.test_bad_inputs import started

# what would run if a shell, cron, sbatch or a template took it for its own; {m} is the marker file
RUNS = (
    "$(touch {m})",
    "`touch {m}`",
    "; touch {m}",
    "&& touch {m}",
    "| touch {m}",
    "|| touch {m}",
    "& touch {m} &",
    "\n touch {m}\n",
    "\r\ntouch {m}",
    "' ; touch {m} ; '",
    '" ; touch {m} ; "',
    "'; touch {m} #",
    '"; touch {m} #',
    "$(touch {m}",
    "${IFS}touch${IFS}{m}",
    "$((`touch {m}`))",
    "<(touch {m})",
    ">(touch {m})",
    "> {m}",
    ">> {m}",
    "2>{m}",
    "x %touch {m}",
    "x % touch {m}",
    "%\ntouch {m}",
    "\n#SBATCH --wrap='touch {m}'",
    "#SBATCH --output={m}",
    "\n* * * * * touch {m}",
    "$'\\ntouch {m}'",
    "!touch {m}",
    "!!python/object/apply:os.system ['touch {m}']",
    "{{ cycler.__init__.__globals__.os.popen('touch {m}').read() }}",
    "{% import os %}{{os.system('touch {m}')}}",
    "__import__('os').system('touch {m}')",
    "%(touch {m})s",
    "{0.__class__}",
    "${{ touch {m} }}",
    "-o ProxyCommand=touch {m}",
    "--rdzv_conf=touch {m}",
    "--config_file={m}",
    "-c 'touch {m}'",
    "-m timeit",
    "=cmd|' /C touch {m}'!A0",
    "\\$(touch {m})",
    "\\`touch {m}\\`",
    "'$(touch {m})'",
    '"$(touch {m})"',
    "a'b\"c`touch {m}`d",
    "*; touch {m}",
    "~; touch {m}",
    "(touch {m})",
    "{touch,{m}}",
    "@(touch {m})",
    "\ttouch {m}",
    "EOF\ntouch {m}\nEOF",
    "*/ touch {m} /*",
    "--; touch {m}",
)
SHOWS = (  # what a terminal, a browser or a reader would be misled by
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x07link\x1b]8;;\x07",
    "\x1b[31mred",
    "\x9b31m",
    "\x1bc",
    "\x1bP+q\x1b\\",
    "a\bb",
    "a\rb",
    "a\x0bb",
    "a\x0cb",
    "a\x7fb",
    "\x00",
    "a\x00b",
    "\x85",
    "\u2028",
    "\u2029",
    "\u202egpj.exe",
    "\u2066x\u2069",
    "\ufeffx",
    "\ud800",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'onmouseover='x",
    "</pre></title><h1>x",
    "&lt;script&gt;",
    "javascript:alert(1)",
    "]]>",
    "<!--",
    "-->",
    "[link](javascript:x)",
    "[red]rich[/red]",
    "[bold]",
    "[/]",
    ":smile:",
    "| a | b |",
    "---",
    "...",
    "- a: b",
    "a: b: c",
    "? x",
    "&anchor",
    "*alias",
    "!tag",
    "|",
    ">",
    "%TAG",
    "null",
    "~",
    "true",
    "no",
    "1e5",
    "0x1F",
    "12:30:00",
    "",
    " ",
    "  lead and trail  ",
    "é",
    "日本語",
    "𝕏",
    "e\u0301",
    "🙂",
    "ﬁ",
    "a" * 255,
    "日" * 85,
    "x" * 10_000,
    "../" * 40 + "etc/passwd",
    "/etc/cron.d/x",
    "-",
    "--",
    "-rf",
    ".",
    "..",
    "\\",
    "'",
    '"',
    "''",
)
STRINGS = tuple(text.replace("{m}", "MARKER") for text in (*RUNS, *SHOWS))
KEYS = (
    "name",
    "output_dir",
    "model.shape",
    "model.path",
    "model.freeze",
    "tokenizer.path",
    "data.train_file",
    "data.validation_file",
    "data.prompt_column",
    "data.text_column",
    "launch.main_process_ip",
    "launch.network_interface",
    "launch.pass_env",
    "training.optim",
    "training.run_name",
    "training.lr_scheduler_type",
)
NAMES = tuple(
    text
    for text in STRINGS
    if text not in ("", ".", "..")
    and "/" not in text
    and len(os.fsencode(text.encode("utf-8", "replace"))) <= 255
    and not strict_yaml.CONTROL.search(text)
    and not HIDDEN.search(text)
)


def test_the_corpus_is_large():
    assert len(set(STRINGS)) >= 100
    assert len(NAMES) >= 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    builders.recipe(root)
    return root


def markers(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("MARKER*")]


@pytest.mark.shows("F47", "over 100 hostile strings in every key; no marker file appears")
def test_no_string_in_any_key_is_executed_or_reaches_the_terminal_as_it_is(folder, monkeypatch):
    monkeypatch.chdir(folder)
    lines = []
    for number, text in enumerate(
        text for text in STRINGS if "\0" not in text and "\ud800" not in text
    ):
        key = KEYS[number % len(KEYS)]
        value = json.dumps([text]) if key in ("model.freeze", "launch.pass_env") else text
        lines += [
            [
                "run",
                str(folder / "tiny.yaml"),
                "--dry-run",
                f"--{key}={value}",
                "--training.save_steps=0",
            ]
        ]
        lines += [
            ["plan", text],
            ["run", str(folder / "tiny.yaml"), text],
            ["plan", "sft", f"--{text}=1"],
        ]
        lines += [["run", str(folder / "tiny.yaml"), "--dry-run", "--resume", f"=={text}"]]
    for line, found in zip(lines, started(folder, lines), strict=True):
        assert found["code"] in (2, 3, 4, 5), (line, found)
        assert found["err"].startswith("error: "), (line, found)
        assert all(
            one.isprintable()
            for one in (found["err"] + found["out"]).replace("\t", " ").split("\n")
        ), (
            line,
            found,
        )
    assert not markers(folder)


class Tags(html.parser.HTMLParser):
    """The tags of a page and the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"{tag} {name}" for name, _ in attrs)}


def test_what_is_rendered_holds_every_string_as_text(tmp_path, monkeypatch):
    """Folders of these names, with the files of a run in them: YAML and JSON read back equal, a
    shell sees one word."""
    for number, text in enumerate(NAMES):
        root = tmp_path / str(number) / text
        root.mkdir(parents=True)
        monkeypatch.setenv("LOWMEM_ROOT", str(root))
        recipe = builders.recipe_of(
            data={"train_file": str(root / "train.parquet")},
            output_dir=str(root / "model"),
            training={"run_name": text},
            launch={
                "nodes": 2,
                "num_processes": 2,
                "main_process_ip": text,
                "network_interface": text,
            },
        )
        machine = builders.machine()
        plan = builders.plan(builders.recipe_of())
        plan = replace(plan, rendezvous=Rendezvous(0, text, 29500, text, 300))
        run = layout.RunDir.create(root / "runs", recipe.name, datetime(2026, 1, 1))
        workspace = Workspace.here()
        attempt = run_files.write_run(run, recipe, machine, plan, workspace)
        assert run.read_recipe() == recipe
        assert strict_yaml.read_yaml(run.recipe_yaml)[0]["data"]["train_file"] == str(
            root / "train.parquet"
        )
        assert yaml.safe_load(run.accelerate_file.read_text())["main_process_ip"] == text
        command = run_files.command(
            plan, machine, run, attempt, workspace, {"OMP_NUM_THREADS": text}
        )
        words = [
            "env",
            *(f"{key}={value}" for key, value in sorted(command.env.items())),
            *command.argv,
        ]
        script = f"set -- {command}\nprintf '%s\\0' \"$@\""
        told = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, check=True
        ).stdout
        assert told.decode().split("\0")[:-1] == words
        assert (
            subprocess.run(["sh", "-n", str(run.command_file)], capture_output=True).returncode == 0
        )
        failure = Failure("x", 1, text, text, text)
        page = Tags()
        page.feed(report_page(recipe, machine, plan, RunResult(str(run.root), 1, failure, 1.0, 0)))
        page.close()
        assert page.found <= {
            *(
                "html",
                "html lang",
                "meta",
                "meta charset",
                "meta name",
                "meta content",
                "title",
                "style",
                "h1",
                "h2",
                "p",
            ),
            *("span", "span class", "pre", "div", "div class", "b", "h3", "i", "i class"),
            *("i style", "table", "table class", "tr", "td", "details", "summary", "script"),
        }
    assert not markers(tmp_path)


def test_a_terminal_a_log_and_a_report_show_what_hides():
    for text in STRINGS:
        assert all(line.isprintable() for line in visible(text).replace("\t", " ").split("\n")), (
            text
        )
        stream = io.StringIO()
        Screen(stream=stream).say(text)
        assert all(
            line.isprintable() for line in stream.getvalue().replace("\t", " ").split("\n")
        ), text
    assert visible("plain, 日本語 é 🙂\n\tit's") == "plain, 日本語 é 🙂\n\tit's"


@pytest.mark.faults
@pytest.mark.shows("F47", "a run in a folder of a hostile name; no marker file appears")
def test_a_run_in_a_folder_of_a_hostile_name_trains_and_its_pasted_line_does_too(tmp_path):
    root = tmp_path / "a 'b\" $(touch MARKER) `touch MARKER`; %touch MARKER é"
    recipe = builders.recipe(root, training={"max_steps": 1, "save_steps": 1})
    dry = builders.launch(root / "workspace", "run", str(recipe), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    line = dry.stdout.strip().splitlines()[-1]
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert (root / "model/model.safetensors").exists()
    assert not markers(tmp_path, Path.cwd())
