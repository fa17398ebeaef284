"""`sixfold eval` of reward models: figures equal those counted from transformers' own scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from sixfold.cli import main
from tests.reward_model.comparisons import policy, random_reward_model, saved

Row = dict[str, Any]

ROWS: list[Row] = [
    {"id": f"{n}", "subset": ("Math", "Focus")[n % 2], "prompt": f"{n}+{n}=", "num_correct": 1,
     "completions": [f"{2 * n}", f"{n}", "a b", f"{n}-1"]}
    for n in range(1, 8)
] + [
    {"id": f"{kind}:{n}", "subset": "Ties", "prompt": f"{right}*{n}=", "num_correct": right,
     "completions": [f"{n}{end}" for end in ("", "+0", "*1")[:right]] + ["p", "1-1"]}
    for n in range(3)
    for kind, right in (("tied", 3), ("ref", 1))
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two reward models and a policy."""
    place, own = tmp_path_factory.mktemp("models"), policy()
    model = random_reward_model(own=own)
    saved(model, own, place / "rm")
    own.save(place / "policy")
    with torch.no_grad():
        model.score.weight.mul_(-1)
    saved(model, own, place / "reverse")
    return place


def recipe(place: Path, rows: list[Row], *settings: str) -> str:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = [f'run = {{name = "bench", dir = "{place}/runs"}}', *settings]
    source = f'data.source = "{place}/rows.jsonl"'
    (place / "bench.toml").write_text("\n".join([*text, source, "data.heldout = 0", ""]))
    return str(place / "bench.toml")


def scores(folder: Path, row: Row) -> list[float]:
    """By transformers, from the text of the whole conversation."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        policy().tokenizer,
    )
    texts = [f"<|user|>{row['prompt']}<|assistant|>{c}<|end|>" for c in row["completions"]]
    with torch.no_grad():
        return [float(model(torch.tensor([tokenizer(t)["input_ids"]])).logits) for t in texts]


def test_figures_are_those_counted_by_hand(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, rm, reverse = tmp_path / "out", str(models / "rm"), str(models / "reverse")
    given = [recipe(tmp_path, ROWS), rm, "--against", reverse, "--out", str(out)]
    assert main(["eval", *given]) == 0
    shown = capsys.readouterr().out
    results = json.loads((out / "results.json").read_bytes())
    ours, theirs = results["reward_models"]
    assert (ours["checkpoint"], ours["comparisons"]) == (rm, len(ROWS))
    found = {row["id"]: scores(models / "rm", row) for row in ROWS}
    for name in ("Math", "Focus", "Ties"):
        rows = [row for row in ROWS if row["subset"] == name]
        sides = [
            (found[r["id"]][: r["num_correct"]], found[r["id"]][r["num_correct"] :]) for r in rows
        ]
        pairs = [sum(a > b for a in x for b in y) / len(x) / len(y) for x, y in sides]
        best = [max(x) > max(y) for x, y in sides]
        part = ours["subsets"][name]
        assert part["accuracy"] == pytest.approx(sum(pairs) / len(pairs))
        assert part["best_of"] == pytest.approx(sum(best) / len(best))
        low, high = part["accuracy_interval"]
        assert 0 <= low < part["accuracy"] <= high <= 1
        assert f"{name}: best of N" in shown
        if name == "Ties":
            whole = [min(x) > max(y) for x, y in sides]
            assert part["ties"]["tied_accuracy"] == pytest.approx(sum(whole[0::2]) / 3)
            assert part["ties"]["ref_accuracy"] == pytest.approx(sum(whole[1::2]) / 3)
    subsets = ours["subsets"]
    parts = [
        subsets["Math"]["best_of"],
        subsets["Focus"]["best_of"],
        subsets["Ties"]["ties"]["score"],
    ]
    assert ours["reward_bench_2"] == pytest.approx(sum(parts) / 3)
    assert f"{100 * sum(parts) / 3:.1f}" in shown
    # The other model has all scores with the other sign.
    assert theirs["accuracy"] == pytest.approx(1 - ours["accuracy"])
    (test,) = results["comparisons"]
    assert test["difference"] == pytest.approx(ours["accuracy"] - theirs["accuracy"])
    lines = [json.loads(line) for line in (out / "completions-1.jsonl").read_text().splitlines()]
    assert [x["reward"] for x in lines] == pytest.approx(
        [x for row in found.values() for x in row], abs=1e-5
    )
    assert [x["completion"] for x in lines] == [c for row in ROWS for c in row["completions"]]
    assert sum(x["solved"] for x in lines) == sum(row["num_correct"] for row in ROWS)


def test_plain_pairs_have_no_subsets_and_held_out_ones_come_first(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [{"prompt": f"{n}=", "chosen": f"{n}", "rejected": "a"} for n in range(9)]
    given = recipe(tmp_path, pairs, 'comparisons.pairs = "extremes"')
    for heldout, count in ((0, 9), (4, 4)):
        assert main(["eval", given, str(models / "rm"), "--data.heldout", str(heldout)]) == 0
        folder = tmp_path / "runs" / "evaluations" / f"bench-{1 + (heldout > 0):03d}"
        (found,) = json.loads((folder / "results.json").read_bytes())["reward_models"]
        assert (found["comparisons"], found["subsets"]) == (count, {})
        assert found["accuracy"] == found["best_of"] and found["reward_bench_2"] is None
        assert ("evaluates 9" in capsys.readouterr().out) == (heldout > 0)


def test_mistakes_are_one_line(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    liked = [{"prompt": "1", "completion": "2", "label": True}]
    rm, best_of = str(models / "rm"), 'comparisons.form = "best_of"'
    policy_model = str(models / "policy")
    none_right: list[Row] = [{**row, "num_correct": 0} for row in ROWS]
    unnamed = [{**row, "id": f"x{n}"} for n, row in enumerate(ROWS)]
    cases: list[tuple[list[Row], list[str], list[str], list[str]]] = [
        (ROWS, [], [rm, policy_model], ["policy is no reward model", "Qwen3ForCausalLM"]),
        (ROWS, [best_of], [policy_model], ["policy is no reward model", "Qwen3ForCausalLM"]),
        (none_right, [], [rm], ["0 usable comparisons of 13", "no completion is better"]),
        (liked, [], [rm], ["single completions with a label", "comparisons.form"]),
        (unnamed, [], [rm], ["ref:N or tied:N, not 'x7'", "data.id_field"]),
        (ROWS, [], [rm, "--data.source", "arithmetic"], ["'arithmetic' generates tasks"]),
    ]
    for rows, settings, given, words in cases:
        assert main(["eval", recipe(tmp_path, rows, *settings), *given]) == 2
        said = capsys.readouterr().err.splitlines()
        (error,) = [line for line in said if line.startswith("sixfold: error:")]
        assert said[-1] == error and all(word in error for word in words), error
    assert not (tmp_path / "runs").exists()
