"""A mistake of the user gives one line with the setting, the problem and the remedy, exit code 2,
and leaves nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sixfold.cli import main
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig

from .processes import tiny_recipe

SIZES = ScratchConfig(
    hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=32, context=64
)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., list[str]]:
    """A minimal recipe file and the flags of a tiny run in tmp_path/runs, with overrides (__ for
    the dot).
    """
    (tmp_path / "r.toml").write_text('run.name = "x"\n')
    return lambda **overrides: [
        str(tmp_path / "r.toml"),
        *tiny_recipe(tmp_path / "runs", run__name="x", run__steps=1, **overrides),
    ]


def jsonl(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fails(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str) -> str:
    """Run the command line; the one line it prints."""
    assert main(list(argv)) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("sixfold: error:")
    ]
    assert len(lines) == 1
    assert not (tmp_path / "runs" / "x").exists(), "a refused run must leave no folder"
    return lines[0]


def test_missing_dataset(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, tmp_path, "train", *recipe(data__source=str(tmp_path / "nope.jsonl")))
    assert "nope.jsonl" in said


@pytest.mark.parametrize("setting", ["model__path", "data__source"])
def test_a_misspelt_folder_is_named_and_not_asked_of_the_hub(
    setting: str,
    recipe: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-model").mkdir()
    (tmp_path / "tiny-model" / "config.json").write_text("{}")
    (tmp_path / "tiny-model" / "rows.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    said = fails(capsys, tmp_path, "train", *recipe(**{setting: "tiny-modle"}))
    assert "Did you mean 'tiny-model'?" in said and setting.replace("__", ".") in said


def test_empty_dataset(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, tmp_path, "train", *recipe(data__source=jsonl(tmp_path / "d.jsonl")))
    assert "0 rows" in said or "empty" in said


def test_a_row_without_the_field_that_the_verifier_needs(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = jsonl(tmp_path / "d.jsonl", {"question": "1+1=", "answer": "2"}, {"question": "1+2="})
    said = fails(capsys, tmp_path, "train", *recipe(data__source=rows, environment__rewards="math"))
    assert "d.jsonl:2" in said and "'answer'" in said and "question" in said


@pytest.mark.slow
def test_a_prompt_longer_than_the_context(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = jsonl(tmp_path / "d.jsonl", *({"question": "1" * n, "answer": "1"} for n in (3, 5, 80)))
    said = fails(
        capsys, tmp_path, "train", *recipe(data__source=rows, data__heldout="1", sft__steps="0")
    )
    assert "82 tokens" in said and "52 fit" in said and "data.overlong = 'drop'" in said


@pytest.mark.slow
def test_every_prompt_too_long(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = jsonl(
        tmp_path / "d.jsonl", *({"question": "1" * (80 + n), "answer": "1"} for n in range(3))
    )
    said = fails(
        capsys,
        tmp_path,
        "train",
        *recipe(data__source=rows, data__heldout="1", data__overlong="drop", sft__steps="0"),
    )
    assert "0 usable tasks" in said and "more than 52 tokens" in said


def test_one_sample_a_group(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "at least 2" in fails(
        capsys, tmp_path, "train", *recipe(rollout__samples_per_prompt="1")
    )


@pytest.mark.slow
def test_characters_that_the_tokenizer_lacks(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = jsonl(
        tmp_path / "d.jsonl", {"question": "1+1=", "answer": "2"}, {"question": "Ä?", "answer": "2"}
    )
    said = fails(
        capsys, tmp_path, "train", *recipe(data__source=rows, data__heldout="1", sft__steps="0")
    )
    assert "characters that the tokenizer does not know" in said and "Ä" in said


@pytest.mark.slow
def test_a_model_with_pickled_weights(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"x")
    said = fails(capsys, tmp_path, "train", *recipe(model__path=str(tmp_path / "m")))
    assert "pickle" in said


def test_no_gpu(
    recipe: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "Use --run.device cpu" in fails(capsys, tmp_path, "train", *recipe(run__device="cuda"))


@pytest.mark.nightly
@pytest.mark.slow
def test_an_earlier_run_is_kept_when_the_new_recipe_is_wrong(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *recipe()]) == 0
    run = tmp_path / "runs" / "x"
    before = sorted(run.rglob("*"))
    assert main(["train", *recipe()]) == 2
    assert "already holds a run (step 1)" in capsys.readouterr().err
    # A mistake of the recipe comes first: it remains under another name.
    wrong = recipe(environment__rewards="arithmetic,no_file.py:f")
    assert main(["train", *wrong]) == 2
    assert "no_file.py" in capsys.readouterr().err
    assert main(["train", *recipe(data__source=str(tmp_path / "nope.jsonl")), "--overwrite"]) == 2
    assert sorted(run.rglob("*")) == before
    late = (
        {"environment__rewards": "arithmetic,missing_module:f"},
        {
            "reference__path": str(tmp_path / "no"),
            "algorithm__beta": 0.1,
        },
    )
    for overrides in late:
        assert main(["train", *recipe(**overrides), "--overwrite"]) == 2
        assert sorted(run.rglob("*")) == before and [p.name for p in run.parent.iterdir()] == ["x"]
    assert main(["train", *recipe(), "--overwrite"]) == 0
    assert [p.name for p in run.parent.iterdir()] == ["x"]


def test_a_foreign_or_corrupt_checkpoint_is_refused(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert main(["eval", *recipe(), "--checkpoint", str(tmp_path / "nope")]) == 2
    said = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("sixfold: error:")
    ]
    assert len(said) == 2 and "is not a run" in said[0] and "no checkpoint, run or model" in said[1]


@pytest.mark.nightly
@pytest.mark.slow
def test_eval_and_generate_on_a_run(
    recipe: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *recipe()]) == 0
    run = str(tmp_path / "runs" / "x")
    load_policy(ModelConfig(scratch=SIZES), seed=7, device="cpu").save(tmp_path / "other")
    capsys.readouterr()
    assert (
        main(
            [
                "eval",
                *recipe(eval__temperature="1", eval__samples="2"),
                "--checkpoint",
                run,
                "--against",
                str(tmp_path / "other"),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "pass@2" in said and "minus" in said and "p =" in said
    assert (
        main(["generate", run, "--prompt", "1+1=", "--n", "3", "--max-tokens", "5", "--seed", "1"])
        == 0
    )
    first = capsys.readouterr().out
    assert first.count("---") == 3
    assert (
        main(["generate", run, "--prompt", "1+1=", "--n", "3", "--max-tokens", "5", "--seed", "1"])
        == 0
    )
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("settings", "setting", "remedy"),
    [
        ({"model__lora__targets": "q_prj"}, "model.lora.targets", "Did you mean 'q_proj'"),
        ({"model__lora__targets": "lm_head"}, "model.lora.targets", "linear layers"),
        ({"model__lora__rank": 17}, "model.lora.rank = 17", "Use at most"),
        ({"moe__balance_loss": 0.1, "model__lora__rank": 0}, "moe.balance_loss", "Remove"),
        ({"moe__routing": "replay", "model__lora__rank": 0}, "moe.routing", "Remove"),
        ({"parallel__replicas": 2}, "parallel.replicas = 2", "torchrun"),
    ],
)
def test_what_does_not_fit_a_new_model_is_found_before_sft(
    recipe: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, object],
    setting: str,
    remedy: str,
) -> None:
    flags = recipe(**{"model__lora__rank": 2, "sft__steps": 4, **settings})
    said = fails(capsys, tmp_path, "train", *flags)
    assert setting in said and remedy in said
