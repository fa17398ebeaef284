"""`sixfold serve --kv-dtype int8`: tested on the model before the first request."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from serving import OPTIONS, running

import sixfold.rollout.kv_probe as kv_probe
from sixfold.engine.quantised_cache import Int8KVCache
from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold_serving.serve import make_served


@pytest.mark.slow
def test_it_serves_from_an_int8_cache_and_says_what_that_costs(
    chat_policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "tiny", "prompt": "one two", "max_tokens": 5, "logprobs": 0, "seed": 3}
    answers = []
    for kv_dtype in ("auto", "int8"):
        with running(chat_policy, kv_dtype=kv_dtype) as server:
            answers.append(
                httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0][
                    "logprobs"
                ]["token_logprobs"]
            )
            assert isinstance(server.engine.runner.cache, Int8KVCache) == (kv_dtype == "int8")
            assert (
                server.engine.stats.decoded_tokens == 5
            )  # the test is not part of the server's counts
        assert ("int8 KV cache: log-probs move by at most" in capsys.readouterr().out) == (
            kv_dtype == "int8"
        )
    assert answers[0] != answers[1] == pytest.approx(answers[0], abs=0.1)


def test_it_refuses_where_log_probs_would_move_too_far(
    chat_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_probe, "kv_deviation", lambda *_, **__: 0.7)
    options = replace(OPTIONS, kv_dtype="int8")
    with pytest.raises(
        UserError, match=r"--kv-dtype int8: .*0.7 nats \(limit 0.2\). Use kv_dtype auto"
    ):
        make_served(chat_policy, options)
