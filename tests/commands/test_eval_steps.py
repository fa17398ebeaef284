"""`sixfold eval` of process reward models: figures are those counted from transformers' scores."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from sixfold.cli import main
from sixfold.commands import eval_steps
from sixfold.data.step_labels import LabelledSolution
from sixfold.model.scalar_head import scalar_head
from sixfold.reward_model.step_model import step_model_of
from tests.reward_model.comparisons import policy, saved

ROWS = [
    {"id": f"{n}", "problem": f"{n}+{n}=", "steps": [f"{n}", "a b", f"{n}-1"], "label": n % 4 - 1}
    for n in range(24)
]
"""ProcessBench's form: `label` is the number of the first wrong step, or -1."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and a recipe with two sources."""
    place, own = tmp_path_factory.mktemp("models"), policy()
    for seed, name in enumerate(("one", "two")):
        model = step_model_of(own, own.model, "newline")
        torch.manual_seed(seed)
        torch.nn.init.normal_(scalar_head(model).weight, std=1.0)
        saved(model, own, place / name)
    for name, rows in (("easy", ROWS[:12]), ("hard", ROWS[12:])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [f'{{source = "{place}/{name}.jsonl", name = "{name}"}}' for name in ("easy", "hard")]
    lines = [
        f'run = {{name = "bench", dir = "{place}/runs"}}',
        f"data.sources = [{', '.join(sources)}]",
        "data.heldout = 0",
        'data.prompt_field = "problem"',
        'prm.separator = " "',
    ]
    (place / "bench.toml").write_text("\n".join([*lines, ""]))
    return place


def scores(folder: Path, row: dict[str, Any]) -> list[float]:
    """By transformers, at the last token of each step. A token is a character or a mark."""
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), policy().tokenizer
    texts = [step + " " for step in row["steps"][:-1]] + row["steps"][-1:]
    prompt = tokenizer(f"<|user|>{row['problem']}<|assistant|>")["input_ids"]
    ids = tokenizer("".join(texts))["input_ids"]
    assert len(ids) == len("".join(texts))
    with torch.no_grad():
        right = model(torch.tensor([[*prompt, *ids]])).logits[0].double().softmax(-1)[:, 1]
    return [float(right[len(prompt) + end - 1]) for end in accumulate(map(len, texts))]


@pytest.mark.nightly
def test_figures_are_those_counted_by_hand(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, (one, two) = tmp_path / "out", (str(place / name) for name in ("one", "two"))
    assert main(["eval", str(place / "bench.toml"), one, "--against", two, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    results = json.loads((out / "results.json").read_bytes())
    right: dict[str, list[bool]] = {}
    for model, recorded in zip((one, two), results["process_reward_models"], strict=True):
        every = {row["id"]: scores(Path(model), row) for row in ROWS}
        said = {
            name: next((at for at, score in enumerate(found) if score < 0.5), -1)
            for name, found in every.items()
        }
        right[model] = [said[row["id"]] == row["label"] for row in ROWS]
        for name, rows in (("easy", ROWS[:12]), ("hard", ROWS[12:]), ("", ROWS)):
            part = recorded["subsets"][name]
            shares = []
            for key, wrong in (("error_found", True), ("all_right", False)):
                agree = [said[r["id"]] == r["label"] for r in rows if (r["label"] >= 0) == wrong]
                shares.append(sum(agree) / len(agree))
                assert part[key] == pytest.approx(shares[-1])
                low, high = part[f"{key}_interval"]
                assert low <= part[key] <= high
            f1 = 2 * shares[0] * shares[1] / (sum(shares) or 1)
            assert part["first_error_f1"] == pytest.approx(f1)
            assert f"{100 * f1:.1f}" in shown
        number = results["process_reward_models"].index(recorded) + 1
        lines = (out / f"completions-{number}.jsonl").read_text().splitlines()
        written = [[*json.loads(line)["parts"].values()] for line in lines]
        assert written == [pytest.approx(found, abs=1e-5) for found in every.values()]
    assert len({*right[one]}) == 2
    (test,) = results["comparisons"]
    assert test["difference"] == pytest.approx((sum(right[one]) - sum(right[two])) / len(ROWS))
    assert "mean F1" in shown


def test_mistakes_are_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy().save(tmp_path / "policy")
    bench, one, own = (str(place / "bench.toml"), str(place / "one"), str(tmp_path / "policy"))
    for given, said in (
        ([bench, own, one], "is no process reward model"),
        ([bench, f"{own},{tmp_path}/nowhere"], "nowhere"),
        ([bench, one, "--environment.prm.convention", "qwen"], "is missing"),
    ):
        assert main(["eval", *given, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert said in error
    assert not (tmp_path / "out").exists()


def test_the_paired_test_reads_scores_as_the_figures_do() -> None:
    """In float32 the score would be 0.5, which is right."""
    solution = LabelledSolution("t", "1+1=")
    judged = [eval_steps._Judged(solution, "2", [0.5 - 1e-12], [0.0], [], [])]
    assert eval_steps._figures(judged)["error_found"] == 1.0
    assert eval_steps._right(judged) == {"t": 1.0}
