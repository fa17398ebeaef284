"""Everything that the pages point at exists: links and their anchors, files, settings, metrics,
commands, modules, and the words of quoted errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sixfold.cli import verbs
from sixfold.recipe.knobs import knobs, sections
from sixfold.recipe.schema import Recipe
from sixfold.report.schema import find
from sixfold.types import Task
from sixfold_environments.maths.answers import math_grade

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sixfold"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "recipes").rglob("*.md"),
    ]
)
YOURS = {
    *("environment.py", "tasks.py", "rewards.py", "my.toml", "mine.toml", "recipe.toml"),
    "hardware.toml",
}
"""File names that stand for a user's own, or for a file of a run."""
A_RUNS_FILE = re.compile(r"\.(json|jsonl|html|safetensors)$")
METRIC = re.compile(
    r"(step|tokens_total)$|(train|reward|rollout|mismatch|sync|heldout|time|group|critic|dynamic|correction|algorithm)/[a-z][a-z_0-9/]*$"
)


def prose(page: Path) -> str:
    """The page without its code blocks, whose lines are programs and output."""
    without_fences = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    return re.sub(r"^    .*$", "", without_fences, flags=re.MULTILINE)


def code_words(page: Path) -> Iterator[str]:
    """Words between backticks."""
    return (m[1] for m in re.finditer(r"`([^`\n]+)`", prose(page)))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_exist(page: Path) -> None:
    """A path in backticks is relative to the repository, to src, to src/sixfold, or to the page."""
    for word in code_words(page):
        is_file = word.endswith((".py", ".md", ".toml")) or re.match(
            r"(src|tests|docs|recipes|benchmarks)/", word
        )
        if (
            not is_file
            or not re.fullmatch(r"[\w./-]+", word)
            or word in YOURS
            or word.startswith(".")
            or "NAME" in word
        ):
            continue
        near = (PACKAGE / "algorithm",) if page.name == "CONTRIBUTING.md" else ()
        assert any(
            (base / word).exists() for base in (ROOT, PACKAGE, PACKAGE.parent, page.parent, *near)
        ), word


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_settings_metrics_and_commands_exist(page: Path) -> None:
    for word in code_words(page):
        key, _, _ = word.partition(" = ")
        if (
            key.split(".")[0] in Recipe.model_fields
            and re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key)
            and not A_RUNS_FILE.search(key)
            and key != "reward_model.ground_truth"  # a column of verl
        ):
            is_module = (PACKAGE / (key.replace(".", "/") + ".py")).exists()
            assert key in knobs() or key in sections() or is_module or key.endswith(".py"), (
                f"{key}: no such setting"
            )
        if METRIC.match(word) and not (PACKAGE / word).exists():
            assert find(word), f"{word}: no such metric"
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?:^    |`)(?:\.venv/bin/)?sixfold ([a-z]+)", text, re.MULTILINE)
    assert set(named) <= set(verbs())
    for flag in re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", text):
        flag = re.sub(r"^stages\.\w+\.", "", flag)  # of one stage
        assert flag == "section.key" or flag in knobs(), f"--{flag}: no such setting"


@pytest.mark.slow
def test_what_the_maths_table_says_is_accepted_and_refused() -> None:
    page = (ROOT / "docs" / "verifiers.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1:-1]
        for line in page.splitlines()
        if line.startswith("| `") and line.count("|") == 5
    ]
    checked = 0
    for row in rows:
        for cell, expected in ((row[0], 1.0), (row[2], 0.0)):
            answers: list[str] = []
            for before, word in re.findall(r"(for )?`([^`]+)`", cell):
                if not before:
                    answers.append(word)
                    continue
                for answer in answers:
                    assert (
                        math_grade(rf"so \boxed{{{answer}}}", Task("t", "", answer=word)).value
                        == expected
                    ), f"{answer} for {word}"
                    checked += 1
                answers = []
    assert checked >= 20
