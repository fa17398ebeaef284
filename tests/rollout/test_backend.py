"""`rollout.backend`: what it may say, and the nearest right form where it says something else."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.recipe.backend import Backend, parse_backend
from sixfold.recipe.explain import explain
from sixfold.recipe.plan import make_plan
from sixfold.recipe.toml import parse_recipe


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("engine", Backend("engine")),
        ("vllm", Backend("vllm")),
        ("vllm:/opt/vllm/bin/python", Backend("vllm", python="/opt/vllm/bin/python")),
        ("sglang:http://127.0.0.1:30000", Backend("sglang", url="http://127.0.0.1:30000")),
        ("sglang:https://[::1]:8000/", Backend("sglang", url="https://[::1]:8000")),
    ],
)
def test_right_forms(text: str, backend: Backend) -> None:
    assert parse_backend(text) == backend


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("vlm", "Did you mean 'vllm'?"),
        ("engin", "Did you mean 'engine'?"),
        ("engine:/usr/bin/python", "Did you mean 'engine'?"),
        ("vllm:", "Did you mean 'vllm'?"),
        ("", "is none of 'engine', 'vllm'"),
        ("sglang", "Did you mean 'sglang:http://127.0.0.1:30000'?"),
        ("sglang:localhost:8000", "Did you mean 'sglang:http://localhost:8000'?"),
        ("sglang:http://localhost", "Did you mean 'sglang:http://localhost:30000'?"),
        ("sglang:http://localhost:many", "Did you mean 'sglang:http://localhost:many'?"),
        ("sglang:ftp://host:1", "names no server"),
    ],
)
def test_wrong_forms_name_the_nearest_right_one(text: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_backend(text)
    assert f"rollout.backend = '{text}'" in str(refused.value) and hint in str(refused.value)


def test_a_wrong_form_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match="Did you mean 'vllm'"):
        make_plan(parse_recipe("[rollout]\nbackend = 'vlm'", "test", []))


def test_the_plan_says_who_samples_and_how_weights_get_there() -> None:
    def said(backend: str) -> str:
        return explain(
            make_plan(
                parse_recipe(
                    f"[rollout]\nbackend = '{backend}'\n[engine]\nprefix_cache = 'none'", "test", []
                )
            )
        )

    assert "engine and trainer share one set of weights" in said("engine")
    vllm = said("vllm:/opt/python")
    assert (
        "vLLM in a process of its own, under /opt/python" in vllm
        and "handed over after every step" in vllm
        and "share one set" not in vllm
    )
    sglang = said("sglang:http://host:1")
    assert "SGLang at http://host:1, which must be running" in sglang and "KV cache" not in sglang
