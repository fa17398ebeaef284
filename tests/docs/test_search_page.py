"""The program of docs/search.md runs as it is written there, and its recipe is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sixfold.model.loading import Policy
from sixfold.recipe.toml import parse_staged

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")


def test_the_program_votes(
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    policy.save(tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(program, "docs/search.md", "exec"), names)  # the page's own program
    found = names["found"]
    assert len(found.candidates) == 8  # type: ignore[attr-defined]
    assert capsys.readouterr().out.strip().endswith(str(found.cost.total))  # type: ignore[attr-defined]


def test_expert_iteration_is_two_stages_after_those_of_the_recipe() -> None:
    (stages,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    recipe = (ROOT / "recipes" / "prm_search.toml").read_text()
    *_, found, expert = parse_staged(recipe + stages, "docs/search.md").stages
    assert [name for _, name in found.inputs] == ["sft", "implicit", "sft"]
    assert [name for _, name in expert.inputs] == ["sft", "found"]
    measured = (ROOT / "benchmarks" / "expert_iteration.toml").read_text()
    *_, beams, same, _, _ = parse_staged(recipe + measured, "expert_iteration.toml").stages
    assert beams.recipe.sample.search == found.recipe.sample.search
    assert same.recipe == expert.recipe.with_settings({"sft.learning_rate": 2e-4, "sft.tasks": 0})
