"""Preference losses on the command line: pages, settings of TRL, recipes, and the small task."""

from __future__ import annotations

import ast
import json
import tomllib
from dataclasses import fields, replace
from typing import Any

import pytest

from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.preference.loss import Settings
from sixfold.preference.small_task import SmallTask, measured, train_loss
from sixfold.preference.zoo import LOSSES
from sixfold.recipe.explain.preference_losses import loss_recipe_lines
from sixfold.recipe.preference_plan import resolve_losses
from sixfold.recipe.schema import PreferenceConfig


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["algorithms", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LOSSES)
def test_a_page_has_what_the_row_says_and_its_recipe_makes_the_row(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    row, text = LOSSES[name], printed(capsys, name)
    assert all(part in text for part in (row.formula, row.paper, row.change, row.use, row.peers))
    assert all(f"\n  {setting} = " in text for setting in row.reads)
    written = tomllib.loads("\n".join(loss_recipe_lines(row)))["stages"][0]["preference"]
    written["losses"] = tuple(written["losses"])
    assert resolve_losses(PreferenceConfig(**written)) == [(row, row.defaults, 1.0)]


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_is_its_predecessor_with_choices_changed(name: str) -> None:
    row = LOSSES[name]
    if not row.patches:
        return
    before = LOSSES[row.patches]
    told = {"name", "patches", "paper", "formula", "change", "use", "peers"}
    changed = [
        f.name
        for f in fields(row)
        if f.name not in told and getattr(row, f.name) != getattr(before, f.name)
    ]
    assert changed, "a row that changes nothing is not another loss"
    own = {f.name for f in fields(Settings) if getattr(row.defaults, f.name) != f.default}
    fixed = {"per_token", "policy_weights", "kept"}
    assert own <= {*row.reads, *fixed}, "a default that no setting can change"


@pytest.mark.parametrize("name", LOSSES)
def test_settings_of_trl_are_python(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (data,) = json.loads(printed(capsys, name, "--convert", "trl", "--format", "json"))
    block = printed(capsys, name, "--convert", "trl").split(f"{name} in trl\n\n")[1]
    (line,) = ast.parse(block.partition("\n\n")[0].partition("\ndifference")[0]).body
    assert isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
    pasted = {k.arg: ast.literal_eval(k.value) for k in line.value.keywords}
    assert pasted == data["changed"]
    assert (ast.unparse(line.value.func) == "KTOConfig") == LOSSES[name].unpaired


def test_all_losses_of_trl_are_reached(capsys: pytest.CaptureFixture[str]) -> None:
    reached = set[Any]()
    for name in LOSSES:
        (data,) = json.loads(printed(capsys, name, "--convert", "trl", "--format", "json"))
        kind = {**data["kept"], **data["changed"]}.get("loss_type")
        if not data["lacks"]:
            reached |= {
                (data["entry"], one) for one in (kind if isinstance(kind, list) else [kind])
            }
    of_dpo = {kind for entry, kind in reached if entry == "DPOConfig"}
    assert len(of_dpo) == 15
    assert reached - {("DPOConfig", kind) for kind in of_dpo} == {
        ("KTOConfig", "kto"),
        ("KTOConfig", "apo_zero_unpaired"),
        ("CPOConfig", "sigmoid"),
        ("CPOConfig", "simpo"),
        ("ORPOConfig", None),
    }


def test_cdpo_is_the_sum_of_two_losses_of_trl() -> None:
    import torch

    from sixfold.preference.pairs import Pairs, Statistics

    d, one = torch.linspace(-30, 30, 7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    settings = LOSSES["cdpo"].defaults
    rows = Pairs(d, torch.zeros_like(d), one, one)
    e = settings.label_smoothing
    plain, robust, smooth = (
        LOSSES[name].per_pair(rows, replace(settings, label_smoothing=value), Statistics())
        for name, value in (("dpo", 0.0), ("robust", e), ("cdpo", e))
    )
    torch.testing.assert_close(2 * (1 - e) * plain + (2 * e - 1) * robust, smooth)


def test_a_recipe_overrides_what_a_loss_reads() -> None:
    config = PreferenceConfig(
        losses=(
            "dpo",
            "robust",
            "sft",
        ),
        weights=(
            0.8,
            0.2,
            0.1,
        ),
        beta=0.3,
        label_smoothing=0.2,
    )
    found = resolve_losses(config)
    assert [(row.name, weight) for row, _, weight in found] == [
        ("dpo", 0.8),
        ("robust", 0.2),
        ("sft", 0.1),
    ]
    assert [s.beta for _, s, _ in found] == [0.3, 0.3, 0.1]
    assert [s.label_smoothing for _, s, _ in found] == [0.0, 0.2, 0.0]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"losses": ("dpo_nrom",)}, "no loss 'dpo_nrom'. Did you mean 'dpo_norm'?"),
        (
            {
                "losses": ("dpo",),
                "weights": (
                    1.0,
                    2.0,
                ),
            },
            "preference.weights has 2 numbers",
        ),
        ({"losses": ("dpo",), "weights": (0.0,)}, "use weights >= 0, not all 0"),
        (
            {
                "losses": (
                    "dpo",
                    "kto",
                )
            },
            "'kto' takes single completions",
        ),
        ({"losses": ("dpo",), "target_margin": 1.0}, "preference.target_margin has no effect"),
        ({"losses": ("nca",), "divergence": "js"}, "preference.divergence has no effect"),
        (
            {
                "losses": (
                    "dpo",
                    "ipo",
                ),
                "sft_weight": 1.0,
            },
            "Add 'sft' to preference.losses",
        ),
        ({"divergence_alpha": 0.3}, "needs preference.divergence = 'alpha'"),
        ({"losses": ("exo",), "label_smoothing": 0.0}, "makes the loss exo infinite"),
    ],
)
def test_refusals_say_what_is_wrong(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve_losses(PreferenceConfig(**config))
    assert said in str(refused.value)


def test_displacement_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    """DPO lowers better completions. What is made against that lowers them less."""
    task = SmallTask(seed=0)
    start = measured(task, task.reference)
    shifts = {}
    for name in ("dpo", "dpo_shift", "dpop", "squared_po", "cpo"):
        end = measured(task, train_loss(LOSSES[name], task, 60))
        assert end["held out"][0] > 0.6 and start["held out"][0] == 0.0
        shifts[name] = end["held out"][1] - start["held out"][1]
    assert shifts["dpo"] < -1
    assert all(shift > shifts["dpo"] for name, shift in shifts.items() if name != "dpo")
    text = printed(capsys, "dpo", "--try", "--steps", "60")
    assert f"{shifts['dpo']:+.3f} nats per token (displaced)" in text
