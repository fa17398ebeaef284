"""A name that does not exist locally: a path is refused at once, a hub id is left to the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from sixfold.recipe.hub_names import not_a_hub_id

HUB_IDS = [
    "gpt2",
    "openai/gsm8k",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "a_b/c.d-e_1.0",
    "_x/y",
]
PATHS = [
    *(
        "./x",
        "../x",
        "/x",
        "~/x",
        "x/",
        "a/b/c",
        "runs\\demo",
        "C:\\models\\a",
        ".",
        "..",
        "x.csv",
        "x.JSONL",
        "data/foo.jsonl",
    ),
    *(
        "runs/nope",
        "data/foo",
        "models/a",
        "a b",
        "a/b--c",
        "a..b",
        "-x",
        "a/b.",
        "a?b",
        "https://huggingface.co/a/b",
        "x" * 97,
        "x" * 5000,
    ),
    *("tëst", "org/model.safetensors", "\n", "", " ", "a\0b", "gpt2\n"),
]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", HUB_IDS)
def test_hub_ids_are_left_to_the_hub(name: str) -> None:
    assert not_a_hub_id(name) == ""


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_refused(name: str) -> None:
    assert not_a_hub_id(name)


def test_name_that_starts_with_an_existing_folder_is_a_path(tmp_path: Path) -> None:
    assert not_a_hub_id("mine/model") == ""
    (tmp_path / "mine" / "models").mkdir(parents=True)
    assert (
        not_a_hub_id("mine/model")
        == f"no such folder (looked in {tmp_path}). Did you mean 'models'?"
    )


def test_missing_file_error_suggests_a_similar_file(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    assert (
        not_a_hub_id("trian.csv")
        == f"no such file (looked in {tmp_path}). Did you mean 'train.csv'?"
    )
