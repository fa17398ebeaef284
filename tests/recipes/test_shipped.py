"""Every shipped recipe parses and has a plan, and those for a CPU run a few steps, scaled down."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from sixfold.recipe.find import find_recipe, shipped_recipes
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import load_recipe, load_staged
from sixfold.run.start import train_run
from sixfold.stages.driver import train_stages

from ..forked_programs import OF_A_RUN, fork_programs

FEW = [
    "--run.steps",
    "2",
    "--run.threads",
    "1",
    "--eval.every",
    "0",
    "--eval.tasks",
    "4",
    "--rollout.prompts_per_step",
    "2",
    "--rollout.samples_per_prompt",
    "2",
]
SMALL = [
    "--model.scratch.hidden_size",
    "32",
    "--model.scratch.layers",
    "1",
    "--data.limit",
    "200",
    "--data.heldout",
    "6",
    "--sft.steps",
    "3",
    "--sft.stop_at_accuracy",
    "0",
]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes that check answers. A run is shorter than the start of an interpreter."""
    fork_programs(monkeypatch, targets=OF_A_RUN)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_it_parses_and_has_a_plan(name: str) -> None:
    staged = load_staged(name)
    assert staged.base.run.name == name
    stages = [staged.planned(stage.name, name) for stage in staged.stages]
    for recipe in stages or [staged.base]:
        rollout = recipe.rollout
        made = rollout.prompts_per_step * rollout.samples_per_prompt
        assert make_plan(recipe).trajectories == made


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_steps_and_not_minutes_end_it(name: str) -> None:
    """A machine may be several times as slow as that of docs/recipes.md."""
    staged = load_staged(name)
    run, kinds = staged.base.run, {stage.kind for stage in staged.stages}
    assert "steps" in run.model_fields_set or (kinds and "rl" not in kinds)
    assert not run.max_minutes or run.max_minutes >= 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("demo", "demo_lora", "calculator", "code_functions", "reasoning_gym"),
        *("sql_agent", "search_agent"),
    ],
)
def test_it_runs_a_few_steps(name: str, tmp_path: Path) -> None:
    extra = ["--data.reasoning_gym.size", "20"] if name == "reasoning_gym" else []
    assert train_run(load_recipe(name, ["--run.dir", str(tmp_path), *FEW, *SMALL, *extra])) == 0
    check_run(tmp_path / name)


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["anchor", "pipeline", "dpo", "rlhf", "prm_search"])
def test_all_stages_run_a_few_steps(name: str, tmp_path: Path) -> None:
    few = ["--run.dir", str(tmp_path), *FEW, *SMALL, "--environment.preflight", "8"]
    few += ["--pretrain.steps", "2", "--sft.tasks", "0"]
    text = find_recipe(name).read_text()
    if name != "anchor":  # the model has learned nothing: a reward of any text makes pairs
        odd = tmp_path / "odd.py"
        odd.write_text("def odd(completion, task):\n    return float(len(completion) % 2)\n")
        paid = f'rewards = ["worked_sum", "{odd}:odd"]\nweights = [0.0, 1.0]'
        text = text.replace('\nrewards = ["worked_sum"]', f"\n{paid}")
        text = text.replace("[eval]\n", '[eval]\nmetric = "worked_sum"\n', "metric =" not in text)
        text = re.sub(r"tasks = (990|1980|1500|4900|660|600)\b", "tasks = 40", text)
    own = r"^(eval\.every|rollout\.prompts_per_step|run\.steps) = .*\n"
    text = re.sub(own, "", text, flags=re.M)  # no flag for all may replace what a stage sets
    if name in ("rlhf", "prm_search"):  # a stage has held-out rows of its own: no flag for all
        for whole, few_rows in (("200", "2"), ("400", "2"), ("1000", "6"), ("500", "6")):
            text = re.sub(rf"heldout = {whole}\b", f"heldout = {few_rows}", text)
        at = few.index("--data.heldout")
        del few[at : at + 2]
    file = str(tmp_path / f"{name}.toml")
    Path(file).write_text(text)
    staged = load_staged(file, few)
    assert train_stages(staged) == 0
    rows = json.loads((tmp_path / name / "stages.json").read_text())
    assert [row["stage"] for row in rows] == [stage.name for stage in staged.stages]
    for stage, row in zip(staged.stages, rows, strict=True):
        if stage.kind not in ("sample", "reward_model", "prm"):
            assert 0 <= row["heldout"] <= 1 and sum(row["verdicts"].values()) == pytest.approx(1)
            assert (row["kl"] is not None and row["kl"] >= 0) == bool(row["start"])
            assert row["steps"] == (3 if stage.kind == "sft" else 2), stage.name
    page = (tmp_path / name / "report.html").read_text()
    assert page.count("pre-flight: ") >= sum(stage.kind == "rl" for stage in staged.stages)


def check_run(run: Path) -> None:
    """Two steps logged, engine and trainer agree, and the trained model loads as any other."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == [1, 2]
    assert all(
        s["mismatch/max_abs_logp"] <= 1e-4
        for s in steps
        if "mismatch/max_abs_logp" in s and "bfloat16" not in (run / "recipe.toml").read_text()
    )
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["heldout_after"] <= 1
    saved = run / "checkpoints" / "step-000002" / "model"
    if (run / "base").exists():  # an adapter: transformers reads its base and adds it
        saved = saved if (saved / "adapter_config.json").exists() else run / "nothing"
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert sum(p.numel() for p in model.parameters()) > 0
