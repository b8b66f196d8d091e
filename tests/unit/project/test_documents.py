"""The pages that users read: short enough, in two languages, without dead links or dead keys."""

from __future__ import annotations

import importlib.util
import json
import re
import typing
import unicodedata
from pathlib import Path

import pydantic
import pytest

from benchmarks import cuda_build_modes
from launch.schema.modes import LAUNCH_MODES
from launch.schema.recipe import Recipe
from scripts import make_sample_data

ROOT = Path(__file__).resolve().parents[3]
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
PAGES = (*READMES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KEY = re.compile(
    r"--(model|tokenizer|data|lora|quantization|training|evaluation|numerics|launch)\.(\w+)"
)


def ask_readme():
    spec = importlib.util.spec_from_file_location("ask_readme", ROOT / ".ci/ask_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def columns(line: str) -> int:
    """A Chinese character takes two columns of a terminal."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in line)


def path_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", READMES, ids=path_name)
def test_a_readme_has_at_most_130_lines_of_100_columns(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    prose = BLOCK.sub("", page.read_text(encoding="utf-8")).splitlines()
    assert 80 < len(lines) <= 130
    assert not [line for line in prose if columns(line) > 110]


@pytest.mark.parametrize("page", PAGES, ids=path_name)
def test_every_link_of_a_page_leads_to_a_file(page):
    links = LINK.findall(page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_index_names_every_page_once_in_order():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    entries = re.findall(r"^(\d+)\. \[(\S+)\]\((\S+)\):", index, re.MULTILINE)
    assert [int(number) for number, _, _ in entries] == list(range(1, len(entries) + 1))
    assert all(title == link for _, title, link in entries)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(link for _, _, link in entries) == sorted(pages)


def test_both_readmes_have_the_same_commands_and_links():
    english, chinese = (page.read_text(encoding="utf-8") for page in READMES)

    def commands(text: str) -> list[str]:
        lines = "".join(BLOCK.findall(text)).splitlines()
        stripped = [line.split(" #")[0].rstrip() for line in lines]
        return [line for line in stripped if line and not line.startswith("#")]

    assert commands(english) == commands(chinese)
    assert len(commands(english)) >= 20
    swapped = {"README.md": "README.zh-CN.md", "README.zh-CN.md": "README.md"}
    links = [swapped.get(link, link) for link in LINK.findall(english)]
    assert sorted(links) == sorted(LINK.findall(chinese))


@pytest.mark.parametrize("page", PAGES, ids=path_name)
def test_a_key_that_a_page_sets_is_a_key_of_a_recipe(page):
    def section(name: str) -> type[pydantic.BaseModel]:
        annotation = Recipe.model_fields[name].annotation
        choices = (annotation, *typing.get_args(annotation))
        return next(c for c in choices if isinstance(c, type) and issubclass(c, pydantic.BaseModel))

    def is_known(name: str, key: str) -> bool:
        from_transformers = section(name).model_config.get("extra") == "allow"
        return from_transformers or key in section(name).model_fields

    keys = set(KEY.findall(page.read_text(encoding="utf-8")))
    assert [f"{name}.{key}" for name, key in keys if not is_known(name, key)] == []


def test_questions_of_the_readmes_have_their_right_answer_and_are_in_no_training_data():
    """.ci/run asks them to the model of the quick start; here is what it has to answer."""
    kinds = {row for kind in make_sample_data.KINDS for row in kind()}
    train, valid = make_sample_data.draw(5000, 500, 23333)
    for page in READMES:
        rows = {(question, answer) for _, question, answer in ask_readme().commands(page)}
        assert rows == {(question, answer) for _, question, answer in ask_readme().printed()}
        assert len(rows) == 3
        assert rows <= kinds
        assert not rows & set(train + valid)


def test_every_test_that_the_page_on_security_names_exists():
    names = set(re.findall(r"\btest_\w+", (ROOT / "docs/security.md").read_text(encoding="utf-8")))
    files = list((ROOT / "tests").rglob("test_*.py"))
    there = {path.stem for path in files}
    for path in files:
        there |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(names) >= 20
    assert names - there == set()


def test_the_table_of_the_cuda_build_is_that_of_its_results():
    rows = cuda_build_modes.read(ROOT / "benchmarks/results/cuda_build_modes.json")["rows"]
    page = (ROOT / "docs/modes.md").read_text(encoding="utf-8")
    written = page.partition(cuda_build_modes.BEGIN)[2].partition(cuda_build_modes.END)[0]
    assert written.strip() == cuda_build_modes.docs_text(rows)


def test_the_page_on_cards_says_where_the_results_of_cards_were_measured_and_nothing_more():
    results = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "benchmarks/results").glob("*.json"))
    ]
    machines = [each.get("machine", "") for each in results if isinstance(each, dict)]
    measured = {match for text in machines for match in re.findall(r"NVIDIA \w+|AMD Radeon", text)}
    page = (ROOT / "docs/cards.md").read_text(encoding="utf-8")
    (ran,) = re.findall(r"^\| \*\*ran\*\* (.+)$", page, re.MULTILINE)
    assert set(re.findall(r"NVIDIA \w+|AMD \w+", ran)) == measured
    by_memory, by_modes, by_selfcheck = (
        json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        for name in ("gpu_memory", "modes-gpu", "selfcheck_h200")
    )
    assert f"driver {by_selfcheck['facts']['driver']}" in ran
    for result in (by_memory["versions"], by_modes["versions"], by_selfcheck["facts"]):
        assert f"torch {result['torch'].rpartition('.')[0]})" in ran
    modes = {row["strategy"]["mode"] for row in by_memory["rows"]}
    modes |= {row["mode"] for row in by_modes["rows"]}
    assert {name for name in LAUNCH_MODES if f"`{name}`" in ran} == modes


def test_a_case_that_failed_or_has_not_run_is_not_said_to_have_passed():
    made = [
        {"mode": "fsdp2", "ranks": 2, "family": family, "tuned": "lora", "precision": precision}
        for precision in ("bf16", "fp16")
        for family in cuda_build_modes.FAMILIES
    ]
    made[2]["failed"] = "exit 3"
    (line,) = (
        line for line in cuda_build_modes.docs_text(made).splitlines() if line.startswith("| fsdp2")
    )
    assert line == "| fsdp2 | 2 | not yet run | bf16, fp16 (llama-tiny failed) | not yet run |"
    (line,) = (
        line
        for line in cuda_build_modes.docs_text(made[:1]).splitlines()
        if line.startswith("| fsdp2")
    )
    assert line == "| fsdp2 | 2 | not yet run | not yet run | not yet run |"
