"""Answers of `sixfold serve` for models whose turns end with other tokens than their generation
settings name.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from serving import running
from tests.models.families import BY_NAME, QUESTION, save_family

from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig


def load(name: str, folder: Path) -> Policy:
    return load_policy(
        ModelConfig(path=str(save_family(BY_NAME[name], folder))), seed=0, device="cpu"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("qwen2.5-base", "42"), ("r1-distill", "hm</think>42")])
def test_a_chat_ends_with_its_turn(name: str, said: str, tmp_path: Path) -> None:
    policy = load(name, tmp_path / "model")
    with running(policy, record=tmp_path / "record") as server:
        answer = server.client().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=12,
        )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (said, "stop")
    (line,) = next((tmp_path / "record").iterdir()).read_text().splitlines()
    record = json.loads(line)
    assert (
        record.get("opened", "") + record["text"] == ("<think>\n" if "think" in said else "") + said
    )


@pytest.mark.slow
def test_a_stop_token_that_only_the_request_names_is_no_text(tmp_path: Path) -> None:
    """Also: a stop string of the template ends a chat."""
    policy = load("qwen2.5-base", tmp_path)
    end = policy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with running(replace(policy, stop_token_ids=())) as server:
        create = server.client().chat.completions.create
        answer = create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=12,
            extra_body={"stop_token_ids": [end]},
        )
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
            "42",
            "stop",
        )
    with running(replace(policy, stop_token_ids=(), stop_strings=("<|im_end|>",))) as server:
        create = server.client().chat.completions.create
        answer = create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=12,
        )
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
            "42",
            "stop",
        )
