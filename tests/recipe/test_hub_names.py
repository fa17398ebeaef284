"""A name that does not exist locally: a path is refused at once, a hub id is left to the hub."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sixfold.checkpoint.model_source import model_folder
from sixfold.errors import UserError
from sixfold.recipe import hub_names
from sixfold.recipe.hub_names import hub_answers, hub_folder, not_a_hub_id, not_found

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


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub_names, "hub_answers", lambda: True)


@pytest.fixture
def unreachable(online: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hub_names, "hub_answers", lambda: False)


def make(folder: Path, file: str) -> None:
    folder.mkdir(parents=True)
    (folder / file).write_text("{}")


@pytest.mark.parametrize(
    ("there", "name"), [("tiny-model", "tiny-modle"), ("golden", "goldne"), ("runs/a", "rusn/a")]
)
def test_a_misspelt_local_name_is_never_asked_of_the_hub(
    tmp_path: Path, online: None, monkeypatch: pytest.MonkeyPatch, there: str, name: str
) -> None:
    monkeypatch.setattr(hub_names, "hub_answers", lambda: pytest.fail("asked the hub"))
    make(tmp_path / there, "config.json")
    assert f"Did you mean '{there}'?" in not_found(name, "models")
    assert f"Did you mean '{there}'?" in not_found(name, "datasets")
    with pytest.raises(UserError, match=f"MODEL: .*'{name}'.*Did you mean '{there}'"):
        model_folder(name)


def test_a_folder_that_is_no_model_and_a_distant_name_keep_no_hub_id_back(
    tmp_path: Path, online: None
) -> None:
    make(tmp_path / "gpt3", "notes.txt")
    make(tmp_path / "gpt2-large-sft", "config.json")
    assert not_found("gpt2", "models") == "" == not_found("openai/gsm8k", "datasets")


@pytest.mark.parametrize("name", ["gpt2", "owner/name"])
def test_without_a_network_the_error_says_offline(unreachable: None, name: str) -> None:
    for kind in ("models", "datasets"):
        reason = not_found(name, kind)  # type: ignore[arg-type]
        assert "offline" in reason and "huggingface.co" in reason and "not in the hub" in reason


def test_what_the_cache_holds_is_found_without_a_network(unreachable: None) -> None:
    (hub_folder("owner/name", "models") / "snapshots").mkdir(parents=True)
    (hub_folder("owner/rows", "datasets") / "snapshots").mkdir(parents=True)
    assert not_found("owner/name", "models") == "" == not_found("owner/rows", "datasets")


def test_the_hub_is_tried_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listening socket answers; after it is closed, nobody does. Proxies are left out."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub_answers.cache_clear()
        assert hub_answers()
    hub_answers.cache_clear()
    assert not hub_answers()
    hub_answers.cache_clear()
