"""Answers by search: equal to a search on an engine of its own, with all tokens counted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import torch
from serving import Running, running
from tests.reward_model.comparisons import saved

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.model.scalar_head import scalar_head
from sixfold.recipe.schema import ProcessScoringConfig, RewardScoringConfig
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.step_model import step_model_of
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import wait_for
from sixfold.types import SamplingParams, Task
from sixfold_search import Settings, Stepping, search
from sixfold_search.scorers import load_scorer
from sixfold_serving import search as search_module
from sixfold_serving.exchange import noise_key

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = "What is one and one? "
BEAM = {"method": "beam", "n": 8, "expand": 4, "steps": "every:4", "aggregate": "mean"}


@pytest.fixture(scope="module")
def prm(chat_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prm") / "prm"
    steps = step_model_of(chat_policy, chat_policy.model, "newline")
    torch.manual_seed(1)
    torch.nn.init.normal_(scalar_head(steps).weight, std=0.5)
    saved(steps, chat_policy, folder)
    return folder


@pytest.fixture(scope="module")
def searching(chat_policy: Policy, prm: Path) -> Iterator[Running]:
    with running(chat_policy, scorer=str(prm)) as it:
        yield it


def post(server: Running, path: str, status: int = 200, **more: Any) -> dict[str, Any]:
    if path == CHAT:
        more = {"messages": [{"role": "user", "content": ASKED}], **more}
    body = {"model": "tiny", "max_tokens": 12, "seed": 4, **more}
    answer = httpx.post(server.url + path, json=body, timeout=30)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_answer_is_that_of_a_search_on_its_own_engine(
    searching: Running, chat_policy: Policy, prm: Path, path: str
) -> None:
    renderer = Renderer(chat_policy.tokenizer, chat_policy.stop_token_ids)
    task = Task("t", ({"role": "user", "content": ASKED},))
    prompt = renderer.encode(task) if path == CHAT else renderer.encode_text(ASKED)
    generator = EngineGenerator(Engine(CausalLM(chat_policy.model), kv_tokens=4096), renderer)
    scorer = load_scorer(str(prm), ProcessScoringConfig(), RewardScoringConfig())
    found = wait_for(
        search(
            generator,
            renderer,
            Task(noise_key(prompt), task.prompt),
            method="beam",
            params=SamplingParams(12, stop_token_ids=chat_policy.stop_token_ids, seed=4),
            settings=Settings(n=8, expand=4),
            stepping=Stepping("every:4"),
            scorer=scorer,
            aggregate="mean",
            prompt=prompt,
        )
    )
    generator.close()

    def ask(number: int) -> dict[str, Any]:
        given = {} if path == CHAT else {"prompt": ASKED}
        return post(searching, path, search=BEAM, return_token_ids=True, **given)

    with ThreadPoolExecutor(3) as pool:  # searches do not change each other, nor what they count
        answers = [*pool.map(ask, range(3))]
    for answer in answers:
        (choice,) = answer["choices"]
        assert choice["token_ids"] == found.best.tokens[len(prompt) :]
        assert (choice.get("text") or choice["message"]["content"]) == found.text
        assert answer["search"] == {
            "method": "beam",
            "value": pytest.approx(found.value),
            "completions": len(found.candidates),
            "refused_by_scorer": found.refused,
            "recomputed": False,
        }
        cost = found.cost
        assert cost.scored > 0 and len(found.candidates) > 1
        assert answer["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": cost.sampled,
            "total_tokens": len(prompt) + cost.sampled,
            "prefilled_tokens": cost.prefilled,
            "scorer_tokens": cost.scored,
        }
    searching.idle()


def test_best_of_is_ranked_by_the_reward_model_if_the_server_has_one(searching: Running) -> None:
    best = post(searching, CHAT, best_of=6)
    same = post(searching, CHAT, search={"method": "best_of_n", "n": 6})
    assert best["search"] == same["search"] and best["search"]["method"] == "best_of_n"
    assert best["choices"] == same["choices"] and best["usage"]["scorer_tokens"] > 0
    votes = post(searching, CHAT, search={"method": "majority", "n": 6})
    assert votes["search"]["value"] is None and votes["usage"]["scorer_tokens"] == 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_best_of_without_a_reward_model_is_by_the_log_prob_per_token(
    server: Running, path: str
) -> None:
    """The server records too: all completions were sampled by the policy."""
    given = {} if path == CHAT else {"prompt": [ASKED, "two"]}
    every = post(server, path, n=5, return_token_ids=True, **given)
    best = post(server, path, n=2, best_of=5, return_token_ids=True, **given)
    expected = []
    for at in range(0, len(every["choices"]), 5):
        ranked = sorted(every["choices"][at : at + 5], key=lambda c: -fmean(c["token_logprobs"]))
        expected += ranked[:2]
    assert best["choices"] == [one | {"index": at} for at, one in enumerate(expected)]
    assert best["usage"] == every["usage"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"search": {}}, "search.method", "missing"),
    ({"search": {"method": "beams"}}, "search", "Did you mean 'beam'"),
    ({"search": {"method": "beam", "m": 2}}, "search.m", "unknown"),
    ({"search": {"method": "beam", "n": 5}}, "search", "multiple of expand"),
    ({"search": {"method": "majority", "expand": 2}}, "search.expand", "no effect"),
    ({"search": {"method": "beam", "steps": "newlin"}}, "search.steps", "newline"),
    ({"search": {"method": "beam", "steps": "/tmp/a.py:f"}}, "search.steps", "name a function"),
    ({"search": {"method": "beam", "aggregate": "max"}}, "search", "min, mean"),
    ({"search": {"method": "greedy", "budget": 3}}, "search.budget", "prompt alone"),
    ({"search": {"method": "majority"}, "n": 2}, "n", "search"),
    ({"search": {"method": "majority"}, "stream": True}, "stream", "search"),
    ({"search": {"method": "majority"}, "best_of": 2}, "best_of", "Give one"),
    ({"search": {"method": "beam"}, "frequency_penalty": 1}, "frequency_penalty", "search"),
    ({"best_of": 4, "n": 2}, "n", "best_of"),
    ({"best_of": 2, "n": 3}, "best_of", "less than n"),
]


def test_a_bad_search_is_one_line_that_names_the_field(searching: Running, server: Running) -> None:
    for more, param, words in BAD:
        error = post(searching, CHAT, 400, **more)["error"]
        assert (error["param"], words in error["message"]) == (param, True), error
        assert "\n" not in error["message"]
    two = post(searching, TEXT, 400, prompt=["a", "b"], search={"method": "majority"})["error"]
    assert two["param"] == "prompt"
    recorded = post(server, CHAT, 400, search={"method": "majority"})["error"]
    assert "--record" in recorded["message"]
    unscored = post(server, CHAT, 400, search={"method": "beam"})["error"]
    assert unscored["param"] == "search.method" and "--scorer" in unscored["message"]
    session = post(server, f"/sessions/some{TEXT}", 400, prompt="a", best_of=2)["error"]
    assert session["param"] == "best_of"
    given: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "a"}]},
        TEXT: {"prompt": "a"},
    }
    for path, more in given.items():  # refused before a conversation of the session waits for it
        more["search"] = {"method": "majority"}
        refused = post(server, f"/sessions/searched{path}", 400, **more)["error"]
        assert refused["param"] == "search"
    unknown = httpx.post(f"{server.url}/sessions/searched/reward", json={"reward": 1.0})
    assert unknown.json()["error"]["code"] == "session_not_found"


def test_a_search_samples_no_more_tokens_at_once_than_another_request(
    searching: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "MAX_TOKENS", 191)
    error = post(searching, CHAT, 400, search={"method": "majority"})["error"]  # 16 of 12 tokens
    assert error["param"] == "search.n" and "exceed 191 tokens" in error["message"]


def test_a_full_queue_is_429(chat_policy: Policy, prm: Path) -> None:
    with running(chat_policy, scorer=str(prm), max_queue=1) as it:
        error = post(it, CHAT, 429, search=BEAM)["error"]
        assert error["code"] == "rate_limit_exceeded"
        it.idle()
