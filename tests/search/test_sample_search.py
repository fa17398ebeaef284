"""A stage of kind `sample` whose completions are found by search."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.stages.staged_runs import flags, result

from sixfold.errors import UserError
from sixfold.recipe.toml import parse_staged
from sixfold.stages.driver import train_stages

RULE = """\
def rule(completions, **columns):
    return [float(c[-1] in "13579") if c else 0.0 for c in completions]
"""
SHARED = """\
run.name = "p"
environment.rewards = ["RULE:rule"]
model.scratch.alphabet = "0123456789+-*="
"""
SOLUTIONS = """
[[stages]]
kind = "sample"
name = "solutions"
sample.samples = 16
sample.tasks = 6
sample.keep = "all"
sample.deduplicate = false
sample.labels = "outcome"
sample.label_ends = "every:1"

[[stages]]
kind = "prm"
name = "judge"
data.source = "stage:solutions"
prm.steps = 2
prm.ends = "every:1"
"""
FOUND = """
[[stages]]
kind = "sample"
name = "found"
sample.samples = 16
sample.tasks = 12
sample.search.method = "METHOD"
sample.search.scorer = "SCORER"
"""


def recipe(place: Path, text: str, method: str = "best_of_n", scorer: str = "verifier") -> Any:
    (place / "rule.py").write_text(RULE)
    for name, value in (
        ("RULE", str(place / "rule.py")),
        ("METHOD", method),
        ("SCORER", scorer),
    ):
        text = text.replace(name, value)
    given = flags(place, rollout__max_new_tokens=3, rollout__prompts_per_step=4)
    return parse_staged(SHARED.replace("RULE", str(place / "rule.py")) + text, "p.toml", given)


def rows(run: Path) -> list[dict[str, Any]]:
    text = (run / "stages" / "found" / "dataset.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_what_search_chooses_becomes_rows(tmp_path: Path) -> None:
    """The verifier as scorer finds a solution exactly where some candidate is one."""
    chosen, every = tmp_path / "chosen", tmp_path / "every"
    for place, keep in ((chosen, "solved"), (every, "all")):
        place.mkdir()
        assert train_stages(recipe(place, f'{FOUND}sample.keep = "{keep}"\n')) == 0
    candidates: dict[str, list[str]] = {}
    for row in rows(every / "p"):
        candidates.setdefault(row["prompt"], []).append(row["completion"])
    solved = {
        prompt: next(text for text in some if text[-1] in "13579")
        for prompt, some in candidates.items()
        if any(text[-1] in "13579" for text in some)
    }
    assert 0 < len(solved) < 12
    assert {row["prompt"]: row["completion"] for row in rows(chosen / "p")} == solved
    logged = result(every / "p")["found"]["metrics"]
    assert sum(line["search/sampled_tokens"] for line in logged) > sum(
        len(text) for some in candidates.values() for text in some
    )


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose judge has led the search for solutions, from which a student has learned."""
    place = tmp_path_factory.mktemp("judged")
    student = '\n[[stages]]\nkind = "sft"\nsft.steps = 2\ndata.source = "stage:found"\n'
    text = f'{SOLUTIONS}{FOUND}sample.keep = "all"\n{student}'
    assert train_stages(recipe(place, text, "beam", "stage:judge")) == 0
    return place / "p"


@pytest.mark.slow
def test_a_judge_of_an_earlier_stage_leads_the_search_for_solutions(judged: Path) -> None:
    made = result(judged)
    assert made["found"]["inputs"].keys() == {"judge"}
    assert all(line["search/scored_tokens"] > 0 for line in made["found"]["metrics"])
    assert len(made["sft"]["metrics"]) == 2


@pytest.mark.slow
def test_another_model_in_the_scorers_folder_is_refused(judged: Path, tmp_path: Path) -> None:
    *_, saved = sorted((judged / "stages" / "judge" / "checkpoints").glob("step-*"))
    scorer = shutil.copytree(saved / "model", tmp_path / "scorer")
    staged = recipe(tmp_path, f"{FOUND}sample.min_rows = 99\n", scorer=str(scorer))
    with pytest.raises(UserError, match="min_rows = 99"):
        train_stages(staged)
    model = load_file(scorer / "model.safetensors")
    save_file({name: weight + 1 for name, weight in model.items()}, scorer / "model.safetensors")
    with pytest.raises(UserError, match=r"sampled under another sample\.search\.scorer, weights"):
        train_stages(staged, resume=tmp_path / "p")


PAIR = """
[[stages]]
kind = "sft"
name = "start"
sft.steps = 1

[[stages]]
kind = "sft"
name = "better"
sft.steps = 4
"""
IMPLICIT = "stage:better, stage:start"


@pytest.mark.slow
def test_a_policy_and_its_reference_lead_the_search(tmp_path: Path) -> None:
    """Both models read every candidate. A beta below all differences leaves the scores at 1/2."""
    chosen = []
    for name, beta in (("plain", 10.0), ("flat", 1e-30), ("none", 10.0)):
        (place := tmp_path / name).mkdir()
        text = f"{PAIR}{FOUND}sample.keep = 'reward'\nsample.threshold = 0.0\n"
        text = text + f"environment.prm.beta = {beta}\nenvironment.prm.ends = 'every:1'\n"
        scorer = IMPLICIT if name != "none" else "stage:start,stage:start"
        assert train_stages(recipe(place, text, scorer=scorer)) == 0
        made = result(place / "p")["found"]
        assert made["inputs"].keys() == {"better", "start"}
        logged = made["metrics"]
        scored = [line["search/scored_tokens"] for line in logged]
        assert all(tokens % 2 == 0 < tokens for tokens in scored)
        chosen.append([row["completion"] for row in rows(place / "p")])
    plain, flat, none = chosen
    assert plain != flat == none


MISTAKES = {
    "beams": (FOUND, "sample.search.method = 'beams': unknown. Did you mean 'beam'"),
    "beam": (
        FOUND.replace('sample.search.scorer = "SCORER"', ""),
        "'beam' needs sample.search.scorer",
    ),
    "majority": (FOUND, "sample.search.scorer has no effect: the method majority needs no scores"),
    "mcts": (
        FOUND.replace("samples = 16", "samples = 0"),
        "sample.samples",
    ),
    "lookahead": (
        FOUND.replace("samples = 16", "samples = 6"),
        "lookahead, n = sample.samples.*n = 6 is no multiple of expand = 4",
    ),
    "budget_forcing": (
        FOUND.replace('sample.search.scorer = "SCORER"', ""),
        "sample.samples has no effect on budget_forcing",
    ),
    "weighted": (
        PAIR + FOUND.replace("SCORER", f"{IMPLICIT},stage:start"),
        "sample.search.scorer names 3 models. One is a reward model; two are",
    ),
    "diverse_beam": (
        PAIR + SOLUTIONS + FOUND.replace("SCORER", "stage:judge,stage:start"),
        "'stage:judge': that stage makes a reward_model, and this setting takes a model",
    ),
    "best_of_n": (
        PAIR + FOUND.replace("SCORER", "stage:better"),
        "'stage:better': that stage makes a model, and this setting takes a reward_model",
    ),
    "": (FOUND, "sample.search.scorer has no effect without sample.search.method"),
    "regenerate": (
        FOUND + "environment.episode = 'calculator'\n",
        "sample.search completes one reply",
    ),
}


@pytest.mark.parametrize("method", MISTAKES)
def test_a_search_that_cannot_work_is_refused_before_anything_is_loaded(
    tmp_path: Path, method: str
) -> None:
    text, problem = MISTAKES[method]
    with pytest.raises(UserError, match=problem) as caught:
        recipe(tmp_path, text, method)
    assert "\n" not in str(caught.value)


def test_a_budget_below_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"budget = 2: the longest prompt alone has \d+ tokens"):
        train_stages(recipe(tmp_path, FOUND + "sample.search.budget = 2\n"))
