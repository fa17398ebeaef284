"""docs/algorithms/: what each page says of a row, its code, its metrics and its numbers is what the
row, the code and the schema say.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.lineage import NAMING, changes
from sixfold.algorithm.method import CORRECTION_BANDS, Method
from sixfold.algorithm.off_policy import CORRECTIONS
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, final_rewards, last_sampled
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.schema import AlgorithmConfig
from sixfold.report.schema import METRICS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "algorithms"
SOURCE = ROOT / "src" / "sixfold" / "algorithm"
SECOND_FORMS = {"gspo_token": "gspo", "reinforce_pp_baseline": "reinforce_pp"}
"""Rows that share the file and the page of their predecessor."""
PAGES = sorted(FOLDER.glob("*.md"))


def stem(name: str) -> str:
    return SECOND_FORMS.get(name, name)


def page(name: str) -> str:
    return (FOLDER / f"{stem(name)}.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Text under a second-level heading."""
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found, f"no section '{heading}'"
    return found[1]


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, its header first; an escaped bar is no border."""
    blocks = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    split = [
        [
            re.split(r"(?<!\\)\|", line)[1:-1]
            for line in block.splitlines()
            if not line.startswith("|---")
        ]
        for block in blocks
    ]
    return [[[cell.strip() for cell in row] for row in table] for table in split]


def words(text: str) -> set[str]:
    """Words between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def links(text: str) -> dict[str, Path]:
    """Name -> file of every link to a name in a Python file."""
    return {
        name: (FOLDER / path).resolve()
        for name, path in re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)\)", text)
    }


def names_in(file: Path) -> set[str]:
    """Functions, classes and constants of a module, read without running it."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        ):
            names |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return names


def a_batch() -> Batch:
    """Two groups of three with everything filled in that any row reads; rewards 1 0 0 and 1 1 0."""
    mask = torch.tensor([[False, True, True, True]] * 5 + [[False, True, True, False]])
    old = torch.where(mask, -1.0, 0.0)
    return Batch(
        tokens=torch.zeros(6, 4, dtype=torch.int64),
        mask=mask,
        old_logp=old,
        version=torch.zeros(6, 4, dtype=torch.int64),
        rewards=final_rewards([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], mask),
        step_ends=last_sampled(mask),
        lengths=mask.sum(-1) + 1,
        prompt_lengths=torch.ones(6, dtype=torch.int64),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        truncated=torch.zeros(6, dtype=torch.bool),
        parts=torch.tensor([[1.0, 0.0, 0.0, 1.0, 1.0, 0.0]]).T,
        part_names=("reward",),
        greedy=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        ref_logp=old - 0.5,
        values=torch.where(mask, 0.5, 0.0),
    )


def logged(row: Method) -> set[str]:
    """The keys of the row's own that a step of it logs, apart from those that every
    algorithm has.
    """
    algorithm = make_algorithm(row, horizon=5)
    batch = algorithm.prepare(a_batch())
    keys = set(algorithm.compute_loss(batch, batch.old_logp).means)
    rooms = ["critic"] * row.needs_critic + ["dynamic"] * bool(row.dynamic_sampling)
    return keys | {metric.key for metric in METRICS if metric.key.split("/")[0] in rooms}


@pytest.mark.parametrize("name", ZOO)
def test_the_row_is_quoted_and_the_table_is_what_it_changes(name: str) -> None:
    row, patch = ZOO[name], section(page(name), "The patch")
    source = (SOURCE / f"{stem(name)}.py").read_text(encoding="utf-8")
    (quoted,) = [block for block in blocks(patch, "python") if f'name="{name}"' in block]
    assert quoted in source, "the row has changed: copy it from the file"
    listed = [
        rows for header, *rows in tables(patch) if header[:3] == ["choice", row.patches, name]
    ]
    said = [
        (cells[0].strip("`"), *(ast.literal_eval(cell.strip("`")) for cell in cells[1:3]))
        for rows in listed
        for cells in rows
    ]
    assert sorted(said) == sorted((c.field, c.before, c.after) for c in changes(row))


@pytest.mark.parametrize("file", PAGES, ids=lambda p: p.stem)
def test_every_linked_name_is_in_its_file(file: Path) -> None:
    for name, target in links(file.read_text(encoding="utf-8")).items():
        assert name in names_in(target), f"{name} is not in {target.name}"


@pytest.mark.parametrize("name", ZOO)
def test_every_metric_that_the_row_logs_is_explained(name: str) -> None:
    said = words(section(page(name), "Metrics"))
    assert logged(ZOO[name]) <= said
    unclipped = {"train/clipped_frac", "train/clip_active_frac"} - logged(ZOO[name])
    assert not unclipped & {
        cells[0].strip("`") for table in tables(section(page(name), "Metrics")) for cells in table
    }, "not logged by this row"
    assert "train/kl" in said, "what a KL would log"


def test_the_bands_of_off_policy_are_the_rules() -> None:
    (table,) = tables(section((FOLDER / "off_policy.md").read_text(encoding="utf-8"), "The rules"))
    said = {
        cells[0].strip("`"): tuple(None if cell == "–" else float(cell) for cell in cells[1:3])
        for cells in table[1:]
    }
    assert said == CORRECTION_BANDS and set(said) >= set(CORRECTIONS)


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """The page's programs, run but for the last."""
    names: dict[str, Any] = {}
    for block in blocks((FOLDER / "writing_your_own.md").read_text(encoding="utf-8"), "python")[:2]:
        exec(compile(block, "writing_your_own.md", "exec"), names)
    return names


def test_the_recipe_of_the_page_is_its_row(own: dict[str, Any]) -> None:
    (text,) = blocks((FOLDER / "writing_your_own.md").read_text(encoding="utf-8"), "toml")
    row = resolve_algorithm(AlgorithmConfig(**tomllib.loads(text)["algorithm"]))
    assert all(
        getattr(row, f.name) == getattr(own["HOUSE"], f.name)
        for f in fields(Method)
        if f.name not in NAMING
    )
    assert own["algorithm"].method == own["HOUSE"] and own["algorithm"].horizon == 64


def test_the_object_of_the_page_learns_what_is_above_average(own: dict[str, Any]) -> None:
    """Rows 0, 3 and 4 have reward 1 in a mixed group: 9 tokens, each with gradient -1/9, whatever
    lies under the mask and in any split.
    """
    mine = own["AboveAverage"](horizon=5)
    batch = a_batch()
    failed = batch.rewards.clone()
    failed[4, 3] = torch.nan
    for scores, rows in ((batch.rewards, [0, 3, 4]), (failed, [0, 3])):
        ready = mine.prepare(batch.with_(rewards=scores))
        expected = torch.zeros(6, 4)
        expected[rows] = torch.where(batch.mask, -1.0 / (3 * len(rows)), 0.0)[rows]
        for split in ([range(6)], [[0, 5], [1, 2, 3, 4]]):
            logp = torch.where(batch.mask, -0.7, torch.nan).requires_grad_()
            outputs = [
                mine.compute_loss(ready.rows(torch.tensor(list(part))), logp[list(part)])
                for part in split
            ]
            sum(output.loss for output in outputs).backward()
            torch.testing.assert_close(logp.grad, expected)
            assert sum(float(output.sums["train/loss"]) for output in outputs) == pytest.approx(0.7)
    assert not mine.prepare(batch.with_(rewards=final_rewards([1.0] * 6, batch.mask))).weights.any()


@pytest.mark.slow
def test_the_object_of_the_page_runs_on_the_shared_task(
    own: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    block = blocks((FOLDER / "writing_your_own.md").read_text(encoding="utf-8"), "python")[2]
    short = block.replace("range(60)", "range(2)").replace("seed=0)", "seed=0, steps=2)")
    assert "range(2)" in short and "steps=2" in short
    exec(compile(short, "writing_your_own.md", "exec"), own)
    assert isinstance(own["task"].learners.algorithm, own["AboveAverage"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [step for step, _ in lines] == ["0", "1"] and all(
        0 <= float(reward) <= 1 for _, reward in lines
    )
