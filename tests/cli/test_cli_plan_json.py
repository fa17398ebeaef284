"""`sixfold plan TARGET --json` has the numbers of the page, unrounded."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sixfold.cli import main

TOPOLOGIES = ["colocated", "disaggregated", "async"]


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    return capsys.readouterr().out


def record(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output(capsys, *words, "--json", code=code))
    assert found["verdict"]["exit_code"] == code
    return found


def cells(text: str, label: str) -> list[str]:
    """Columns of the last row with a label."""
    found: list[str] = re.findall(rf"^  {re.escape(label)} {{2,}}(.*)$", text, re.M)[-1].split()
    return found


def test_numbers_of_a_plan_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("70B", "--gpus", "64xH100", "--algorithm.beta", "0.01", "--pass-rate", "0.8")
    text, found = output(capsys, *words, code=1), record(capsys, *words, code=1)
    plans = found["topologies"]
    assert list(plans) == TOPOLOGIES
    for name in ("rollout", "reference", "trainer", "sync"):
        shown = cells(text, name)
        assert shown == [f"{plan['phases'][name]:.2f}" for plan in plans.values()]
    assert cells(text, "step") == [f"{plan['step']:.2f}" for plan in plans.values()]
    tokens = [f"{plan['tokens_per_second']:,.0f}" for plan in plans.values()]
    assert cells(text, "tokens/s") == tokens
    for plan in plans.values():
        if "sync_operations" in plan:
            assert sum(plan["sync_operations"].values()) == pytest.approx(plan["phases"]["sync"])
    assert found["run"] is None
    assert found["verdict"]["text"].split() == text.split()[: len(found["verdict"]["text"].split())]
    assert found["memory"]["fits"] is False and re.search(r"verdict +does not fit", text)
    assert cells(text, "needed at least")[0] == f"{found['memory']['least'] / 1e9:.1f}"
    parts = found["memory"]["parts"]
    moments = float(cells(text, "AdamW moments")[0])  # rounded so that the rows add up
    assert moments == pytest.approx(parts["AdamW moments"] / 1e9, abs=0.1)
    groups = found["groups"]
    assert f"{groups['equal_rewards']:.1%} of groups at a pass rate of 0.8" in text
    assert cells(text, "longest sample")[0] == f"{groups['longest_to_mean']:.1f}"
    # Bits of the recipe and of the hardware, by hand.
    assert groups["equal_rewards"] == pytest.approx(0.8**8 + 0.2**8)
    assert found["devices"]["bytes"] == 80e9 and found["work"]["prompts"] == 128
    assert found["model"]["parameters"] == 70_554_000_000


def test_one_device_has_no_pools(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, "gsm8k", "--gpus", "1xL4")
    assert list(found["topologies"]) == ["colocated"]
    assert found["memory"]["fits"] is True and found["memory"]["two_pools_fit"] is None
    assert "simulation" not in found


def test_a_simulation_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gsm8k", "--gpus", "2xH100", "--simulate", "2", "--seed", "5"]
    words += ["--mtbf", "0.05", "--restart", "2"]
    text, found = output(capsys, *words), record(capsys, *words)["simulation"]
    plans = found["topologies"]
    assert (found["steps"], found["seed"], found["staleness_bound"]) == (2, 5, 3)
    assert cells(text, "step, seconds") == [f"{plan['step']:.2f}" for plan in plans.values()]
    busy = [f"{plan['sampling_busy']:.0%}" for plan in plans.values()]
    assert cells(text, "sampling devices busy") == busy
    for plan in plans.values():
        assert sum(plan["staleness"].values()) == pytest.approx(1)
        assert plan["useful_tokens_per_second"] <= plan["tokens_per_second"]
    assert list(found["samples_per_prompt"]) == ["2", "4", "8", "16"]
    for samples, others in found["samples_per_prompt"].items():
        useful = [f"{other['useful_tokens_per_second']:,.0f}" for other in others.values()]
        assert cells(text, f"{samples} samples")[:3] == useful
    assert found["samples_per_prompt"]["8"] == plans
    failures = found["failures"]
    assert (failures["device_hours"], failures["restart"]) == (0.05, 2)
    mean = [sum(run[name]["failures"] for run in failures["runs"]) / 5 for name in TOPOLOGIES]
    assert cells(text, "failures") == [f"{number:.1f}" for number in mean]
    closed = [f"{failures['expected_slowdown'][name]:.2f}" for name in TOPOLOGIES]
    assert cells(text, "closed form") == closed


def test_json_is_not_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gsm8k", "--json", "--html", "plan.html"]) == 2
    assert "leave out --json" in capsys.readouterr().err


def test_time_and_cost_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """With the settings that make it fit."""
    words = ("7B", "--gpus", "1xH100")
    text, found = output(capsys, *words, code=4), record(capsys, *words, code=4)
    run = found["run"]
    assert f"A step takes {run['step']:.2f} s: 100 steps in {run['hours']:.1f} hours" in text
    assert f"{run['us_dollars']:,.2f} US dollars" in text
    assert run["hours"] == pytest.approx(100 * run["step"] / 3600)
    flags = " ".join(f"--{key} {value}" for key, value in found["verdict"]["settings"].items())
    assert flags in " ".join(text.split())
