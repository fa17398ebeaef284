"""`POST /v1/weights`: another checkpoint while requests run. It is off by default, and a failure
changes nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import ALPHABET, OPTIONS, Running, running

from sixfold.engine import weights
from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.types import SamplingParams
from sixfold_serving.exchange import noise_key
from sixfold_serving.serve import serve

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def base(chat_policy: Policy) -> Policy:
    """A model that never samples an end token."""
    return replace(chat_policy, stop_token_ids=())


@pytest.fixture(scope="module")
def other(base: Policy) -> Policy:
    """The same model after much training."""
    made = replace(base, model=copy.deepcopy(base.model))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in made.model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return made


@pytest.fixture(scope="module")
def checkpoint(other: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    other.save(folder)
    return folder


@pytest.fixture
def serving(base: Policy) -> Iterator[Running]:
    def slow(engine: Engine) -> None:
        step = engine.step

        def slowly() -> Any:
            time.sleep(
                0.005 if engine.version == 0 else 0.0
            )  # so that an update comes before the end
            return step()

        engine.step = slowly  # type: ignore[method-assign]

    own = replace(base, model=copy.deepcopy(base.model))
    with running(own, slow, allow_weight_updates=True) as it:
        yield it


def post(serving: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{serving.url}/v1/weights", json=body, timeout=30)


def ask(serving: Running, tokens: int = 12) -> dict[str, Any]:
    answer = serving.client().completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=tokens,
        seed=3,
        extra_body={"return_token_ids": True},
    )
    return answer.choices[0].model_extra or {}


def direct(policy: Policy, tokens: int = 12) -> tuple[list[int], list[float]]:
    engine = Engine(CausalLM(policy.model), kv_tokens=500)
    engine.add(
        noise_key(PROMPT),
        PROMPT,
        SamplingParams(max_tokens=tokens, seed=3, stop_token_ids=policy.stop_token_ids),
        [0],
    )
    (s,) = engine.run()
    return s.tokens[len(PROMPT) :], s.logp


@pytest.mark.slow
def test_weights_change_under_a_running_request(
    serving: Running, base: Policy, other: Policy, checkpoint: Path
) -> None:
    versions: list[int] = []
    tokens: list[int] = []
    stream = serving.client().completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=400,
        seed=3,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    posted = None
    for chunk in stream:
        extra = chunk.choices[0].model_extra or {}
        versions += extra["weight_versions"]
        tokens += extra["token_ids"]
        if posted is None:
            posted = post(serving, path=str(checkpoint), version=5)
    assert posted is not None and posted.status_code == 200, posted and posted.text
    assert posted.json() == {"object": "weights", "version": 5, "in_flight": 1}
    changed = versions.index(5)
    assert 0 < changed < len(versions) == 400 and versions == [0] * changed + [5] * (400 - changed)
    old, _ = direct(base, 400)
    assert tokens[:changed] == old[:changed] and tokens != old
    after = ask(serving)
    assert (after["token_ids"], after["token_logprobs"]) == direct(other)
    assert set(after["weight_versions"]) == {5}
    assert serving.metric("weight_version") == 5


@pytest.mark.slow
def test_failed_update_keeps_the_old_weights(
    serving: Running, base: Policy, checkpoint: Path, scratch_config: ScratchConfig, tmp_path: Path
) -> None:
    wider, foreign, broken = (tmp_path / name for name in ("wider", "foreign", "broken"))
    for folder, change in (
        (wider, dict(alphabet=ALPHABET, intermediate_size=96)),
        (foreign, dict(alphabet=ALPHABET + "~")),
    ):
        load_policy(
            ModelConfig(scratch=scratch_config.model_copy(update=change)), seed=3, device="cpu"
        ).save(folder)
    bad = replace(base, model=copy.deepcopy(base.model))
    with torch.no_grad():
        bad.model.model.norm.weight[3] = torch.inf
    bad.save(broken)
    before = [p.clone() for p in serving.engine.runner.model.module.parameters()]
    for body, status, param, words in (
        (dict(path=str(wider), version=1), 400, "path", "has shape"),
        (dict(path=str(foreign), version=1), 400, "path", "another vocabulary"),
        (dict(path=str(broken), version=1), 400, "path", "'model.norm.weight' is not finite"),
        (dict(path=str(tmp_path / "nowhere"), version=1), 400, "path", "no such folder"),
        (dict(path="owner/model", version=1), 400, "path", "no such folder"),
        (dict(path=str(checkpoint), version=0), 400, "version", "greater than or equal to 1"),
        (dict(path=str(checkpoint)), 400, "version", "missing parameter 'version'"),
        (dict(path=str(checkpoint), version=1, force=True), 400, "force", "unknown parameter"),
    ):
        answer = post(serving, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param) and words in error[
            "message"
        ], answer.text
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, serving.engine.runner.model.module.parameters(), strict=True)
    )
    served = ask(serving)
    assert (served["token_ids"], served["token_logprobs"]) == direct(base) and set(
        served["weight_versions"]
    ) == {0}


@pytest.mark.slow
def test_a_version_must_grow(serving: Running, checkpoint: Path) -> None:
    assert post(serving, path=str(checkpoint), version=2).json() == {
        "object": "weights",
        "version": 2,
        "in_flight": 0,
    }
    for version in (1, 2):
        answer = post(serving, path=str(checkpoint), version=version)
        assert (
            answer.status_code == 409
            and f"version = {version} must be greater" in answer.json()["error"]["message"]
        )
    assert post(serving, path=str(checkpoint), version=3).status_code == 200


@pytest.mark.slow
def test_an_error_in_the_middle_does_not_end_the_server(
    serving: Running, base: Policy, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = weights._copy, [0]

    def failing(target: torch.Tensor, source: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("out of memory")
        whole(target, source)

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_copy", failing)
        assert post(serving, path=str(checkpoint), version=1).status_code == 500
    served = ask(serving)
    assert (served["token_ids"], served["token_logprobs"]) == direct(base) and set(
        served["weight_versions"]
    ) == {0}
    assert post(serving, path=str(checkpoint), version=1).status_code == 200


@pytest.mark.slow
def test_torn_weights_end_it(
    serving: Running, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(weights, "_copy", failing)
    assert post(serving, path=str(checkpoint), version=1).status_code == 500
    assert httpx.get(f"{serving.url}/health").status_code == 503
    assert post(serving, path=str(checkpoint), version=1).status_code == 503


@pytest.mark.slow
def test_it_is_off_unless_asked_for(chat_policy: Policy, checkpoint: Path) -> None:
    with running(chat_policy) as plain:
        assert post(plain, path=str(checkpoint), version=1).status_code == 404
        assert plain.engine.version == 0


def test_non_loopback_address_needs_a_key() -> None:
    with pytest.raises(
        UserError, match=r"--allow-weight-updates on 0\.0\.0\.0: anyone .* set an --api-key"
    ):
        serve(replace(OPTIONS, model="/nowhere", host="0.0.0.0", allow_weight_updates=True))
