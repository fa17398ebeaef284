"""Contradictory settings that save memory are refused before anything is loaded."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.recipe import checks
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import load_recipe

MODEL = "--environment.rewards=prm:X"
HALF, LORA = "--run.precision=bfloat16", "--model.lora.rank=4"
SEARCH = ("--sample.search.method=best_of_n", "--sample.search.scorer=judge")


@pytest.mark.parametrize(
    ("flags", "setting", "remedy"),
    [
        (["--trainer.weights=bfloat16"], "trainer.weights", "run.precision"),
        (["--trainer.rounding=stochastic"], "trainer.rounding", "trainer.weights = 'bfloat16'"),
        (["--reference.precision=bfloat16"], "reference.precision", "run.precision"),
        (
            ["--reference.offload=true", "--reference.placement=worker"],
            "reference.offload",
            "reference.placement = 'inline'",
        ),
        (["--trainer.weights=bfloat16", HALF, LORA], "trainer.weights", "model.lora.base"),
        (["--reference.offload=true", LORA], "reference.offload", "Remove it"),
        (["--reference.precision=bfloat16", HALF, LORA], "reference.precision", "Remove it"),
        (["--environment.prm.temperature=0.2"], "environment.prm.temperature", "credit = 'min'"),
        (["--environment.prm.ends=newlin"], "environment.prm.ends", "Did you mean 'newline'"),
        ([MODEL, "--environment.prm.beta=0.2"], "environment.prm.beta", "POLICY,REFERENCE"),
        (["--environment.prm.credit=gain"], "environment.prm.credit", "Add prm:PATH"),
        (["--environment.prm.ends=newline"], "environment.prm.ends", "Add prm:PATH"),
        ([*SEARCH, "--environment.prm.beta=0.2"], "environment.prm.beta", "'judge', which"),
        (
            [*SEARCH[:1], "--sample.search.scorer=verifier", "--environment.prm.ends=newline"],
            "environment.prm.ends",
            "Add prm:PATH",
        ),
        ([*SEARCH, "--environment.prm.credit=gain"], "environment.prm.credit", "Add prm:PATH"),
        ([MODEL, "--environment.agent.command=x"], "environment.agent", "Remove one of them"),
        ([MODEL, "--data.prompt_form=rendered"], "data.prompt_form", "convention = 'sixfold'"),
    ],
)
def test_contradictions_are_refused(flags: list[str], setting: str, remedy: str) -> None:
    with pytest.raises(UserError) as refused:
        make_plan(load_recipe("demo", ["--algorithm.beta=0.1", *flags]))
    assert setting in str(refused.value) and remedy in str(refused.value)


def test_8_bits_without_torchao_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("demo", ["--trainer.optimizer=adamw8bit"])
    make_plan(recipe)
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"trainer.optimizer.*sixfold\[torchao\]"):
        make_plan(recipe)


def test_settings_that_fit_together_are_accepted() -> None:
    flags = [HALF, "--trainer.weights=bfloat16", "--trainer.rounding=stochastic"]
    flags += ["--reference.precision=bfloat16", "--reference.offload=true"]
    make_plan(load_recipe("demo", ["--algorithm.beta=0.1", *flags]))
    make_plan(load_recipe("demo", [*SEARCH, "--environment.prm.ends=newline"]))
