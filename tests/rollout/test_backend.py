"""`[rollout.backend]`: its four kinds, the server's address, and the explanation in the plan."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.recipe.explain import explain
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import EngineBackend, SglangBackend, SixfoldBackend, VllmBackend
from sixfold.recipe.schema.backend import SGLANG, SIXFOLD
from sixfold.recipe.toml import parse_recipe


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("kind = 'engine'", EngineBackend()),
        ("kind = 'vllm'", VllmBackend()),
        ("kind = 'vllm'\npython = '/opt/python'", VllmBackend(python="/opt/python")),
        ("kind = 'sglang'", SglangBackend(url=SGLANG)),
        ("kind = 'sixfold'", SixfoldBackend(url=SIXFOLD)),
        ("kind = 'sglang'\nurl = 'https://[::1]:8000/'", SglangBackend(url="https://[::1]:8000")),
    ],
)
def test_each_kind_has_its_own_settings(text: str, backend: object) -> None:
    assert parse_recipe(f"[rollout.backend]\n{text}", "x").rollout.backend == backend


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("", "Did you mean 'http://127.0.0.1:30000'?"),
        ("localhost:8000", "Did you mean 'http://localhost:8000'?"),
        ("http://localhost", "Did you mean 'http://localhost:30000'?"),
        ("http://localhost:many", "Did you mean 'http://localhost:many'?"),
        ("ftp://host:1", "not the URL of a server"),
    ],
)
def test_an_address_without_host_or_port_is_refused(url: str, hint: str) -> None:
    flags = ["--rollout.backend.kind=sglang", f"--rollout.backend.url={url}"]
    with pytest.raises(UserError) as refused:
        parse_recipe("run.seed = 1", "x", flags)
    assert f"rollout.backend.url = '{url}'" in str(refused.value) and hint in str(refused.value)


def test_the_plan_says_who_samples_and_how_weights_get_there() -> None:
    def said(backend: str) -> str:
        text = f"[rollout.backend]\n{backend}"
        return explain(make_plan(parse_recipe(text, "test")))

    assert "engine and trainer share one set of weights" in said("kind = 'engine'")
    vllm = said("kind = 'vllm'\npython = '/opt/python'")
    assert "run by /opt/python" in vllm and "updated after every step" in vllm
    assert "share one set" not in vllm
    sglang = said("kind = 'sglang'\nurl = 'http://host:1'")
    assert "at http://host:1, which must be running" in sglang and "KV cache" not in sglang
    sixfold = said("kind = 'sixfold'\nurl = 'http://host:2'")
    assert "Sixfold server at http://host:2, which must be running" in sixfold
