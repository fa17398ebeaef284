"""Ends of a completion: from the model's files, and from the recipe's settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.models.families import BY_NAME, save_family
from transformers import AutoTokenizer, GenerationConfig

from sixfold.cli import main
from sixfold.errors import UserError
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig
from sixfold.renderer.renderer import Renderer
from sixfold.run.rendered_prompt import rendering
from sixfold.types import Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5 base."""
    return save_family(BY_NAME["qwen2.5-base"], tmp_path_factory.mktemp("qwen") / "model")


def load(path: Path, **changes: Any) -> Policy:
    return load_policy(ModelConfig(path=str(path), **changes), seed=0, device="cpu")


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def names(policy: Policy) -> list[str]:
    return [str(policy.tokenizer.decode([token])) for token in policy.stop_token_ids]


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["auto"], ["<|endoftext|>", "<|im_end|>"]),
        (["auto", "<|im_start|>"], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        (["<|im_end|>"], ["<|im_end|>"]),
        (["7"], ["7"]),
        ([], []),
    ],
)
def test_stop_tokens_by_the_recipe_are_those_of_the_saved_model(
    tokens: list[str], expected: list[str], folder: Path, tmp_path: Path
) -> None:
    policy = load(folder).stopping_at(tokens, ["Q:"])
    assert sorted(names(policy)) == sorted(expected)
    assert policy.stop_strings == ("Q:",)
    policy.save(tmp_path / "saved")
    kept = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert sorted(
        [kept.eos_token_id] if isinstance(kept.eos_token_id, int) else kept.eos_token_id
    ) == sorted(policy.stop_token_ids)
    assert kept.stop_strings == ["Q:"]
    assert load(tmp_path / "saved").stop_strings == ("Q:",)


def test_stop_strings_of_a_models_files_are_followed_and_those_of_its_template_are_not_saved_twice(
    folder: Path, tmp_path: Path
) -> None:
    """With stop strings in its settings, transformers' `generate` asks for the tokenizer."""
    given = copied(folder, tmp_path / "given")
    settings = json.loads((given / "generation_config.json").read_text())
    (given / "generation_config.json").write_text(json.dumps(settings | {"stop_strings": "Human:"}))
    (given / "plain.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}###\n{% endfor %}"
    )
    policy = load(given, chat_template=str(given / "plain.jinja"))
    assert policy.stop_strings == ("###", "Human:")
    policy.save(tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").stop_strings == ["Human:"]


def test_unknown_token_is_refused(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"rollout\.stop_tokens.*'<\|im_ends\|>'.*<\|im_end\|>.*rollout\.stop"
    ):
        load(folder).stopping_at(["<|im_ends|>"], [])


def test_the_template_may_be_left_out(folder: Path) -> None:
    policy = load(folder, chat_template="none")
    assert names(policy) == ["<|endoftext|>"]
    assert policy.tokenizer.chat_template is None


def test_generation_settings_that_transformers_refuses_to_save_are_saved(
    folder: Path, tmp_path: Path
) -> None:
    """As Vicuna's: values for sampling beside do_sample = false."""
    given = copied(folder, tmp_path / "given")
    settings = json.loads((given / "generation_config.json").read_text()) | {
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": False,
    }
    (given / "generation_config.json").write_text(json.dumps(settings))
    load(given).save(tmp_path / "saved")
    kept = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (kept.temperature, kept.top_p, kept.do_sample) == (0.6, 0.9, True)


def test_more_tokens_than_embeddings_are_refused_but_for_pictures(
    folder: Path, tmp_path: Path
) -> None:
    given = copied(folder, tmp_path / "given")
    tokenizer = AutoTokenizer.from_pretrained(given)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [f"<|image_{i}|>" for i in range(20)]}
    )
    tokenizer.save_pretrained(given)
    load(given)
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(given)
    with pytest.raises(
        UserError,
        match=(
            r"model\.path = .* 1 tokens of the tokenizer have no"
            r" embedding.*<\|new\|>.*resize_token_embeddings"
        ),
    ):
        load(given)


def test_a_model_without_an_end_token_is_said_to_be_one(folder: Path) -> None:
    policy = load(folder, chat_template="none").stopping_at([], [])
    lines = rendering(
        Renderer(policy.tokenizer), [Task("t", "q")], policy.stop_token_ids, policy.stop_strings
    )
    assert "no end token" in lines[-1] and "rollout.stop_tokens" in lines[-1]


def test_explain_renders_the_first_prompt(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "6*7?", "answer": "42"}\n')
    (tmp_path / "r.toml").write_text(
        f'[model]\npath = "{folder}"\n[data]\nsource = "{tmp_path}/tasks.jsonl"\nheldout ='
        ' 0\n[rollout]\nstop = ["\\u001b[1mQ:"]\n'
    )
    assert (
        main(["explain", str(tmp_path / "r.toml"), "--render", "--data.system_prompt", "Be brief."])
        == 0
    )
    shown = capsys.readouterr().out
    assert (
        "<|im_start|>system\nBe"
        " brief.<|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n" in shown
    )
    assert "ends at <|endoftext|>, <|im_end|>, " in shown and "\x1b" not in shown
