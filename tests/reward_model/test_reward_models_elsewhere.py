"""Reward models in a worker or behind HTTP give the rewards of one in the process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from comparisons import policy, random_reward_model, saved
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.server.serving import answering
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sixfold import http_client
from sixfold.environment.rewards import RewardFunction as Named
from sixfold.errors import NoAnswer, RunFailed, UserError
from sixfold.http_client import NoReply
from sixfold.processes.child import Child
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import RewardScoringConfig
from sixfold.recipe.toml import parse_recipe, parse_staged
from sixfold.renderer.renderer import Renderer
from sixfold.reward_model.asked import Asked
from sixfold.reward_model.calibration import Calibration
from sixfold.reward_model.model import load_reward_model
from sixfold.reward_model.reward import reward_model
from sixfold.reward_model.scorer import Scorer
from sixfold.reward_model.served import ServedModel, ServedModels
from sixfold.reward_model.worker import serve
from sixfold.reward_model.worker_models import NotScored, WorkerModels
from sixfold.run.fingerprint import rewards_fingerprint
from sixfold.types import Task
from sixfold_serving.serve import make_reward_served
from sixfold_serving.verb import ServeOptions

CONFIG = RewardScoringConfig(device="cpu", timeout_s=60.0)
CHAT = ({"role": "user", "content": "1+2="},)


def folder_of(place: Path, seed: int = 1, head: Any = "last") -> Path:
    own = policy()
    model = random_reward_model(head=head, own=own)
    torch.manual_seed(seed)
    for p in model.parameters():
        p.data += 0.05 * torch.randn(p.shape)
    Calibration(0.25, 0.5, 0.01 if head == "mean" else 0.0, 2.0).write(model.config)
    return saved(model, own, place)


def arguments(folder: Path, prompt: Any = "1+2=", same_tokens: bool = True) -> dict[str, Any]:
    """What a reward function is called with. same_tokens: the policy has the model's tokenizer."""
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    texts, ended = ["3", "12+3", "abc 3"], [True, True, False]
    ids, replies = scorer.encoded(Task("t", prompt), texts, ended)
    count = len(texts)
    messages = [{"role": "assistant", "content": text} for text in texts]
    return {
        "prompts": [prompt if isinstance(prompt, str) else list(prompt)] * count,
        "completions": texts if isinstance(prompt, str) else [[m] for m in messages],
        "completion_ids": replies,
        "prompt_ids": [ids] * count,
        "rendered_prompt": [scorer.renderer.shown(ids) if same_tokens else "other"] * count,
        "finish_reason": ["stop" if end else "length" for end in ended],
    }


def called(reward: Any, given: dict[str, Any]) -> list[Any]:
    if isinstance(reward, Named):
        found: list[Any] = asyncio.run(reward.function(**given))
        return found
    return list(reward(**given))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "rm")


def test_a_reply_that_is_begun_goes_on_for_another_tokenizer(folder: Path) -> None:
    begun = (*CHAT, {"role": "assistant", "content": "1"})
    given = arguments(folder, begun, same_tokens=False)
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    texts, task = given["completions"], Task("t", begun, form="continued")
    ids = scorer.encoded(task, [text[0]["content"] for text in texts], [True, True, False])
    assert called(reward_model([str(folder)], CONFIG), given) == scorer.rewards(*ids).tolist()


@pytest.mark.parametrize("begun", ["1", "1 ", " ", "a b "])
def test_a_completion_may_begin_as_the_reply_that_it_goes_on_with(folder: Path, begun: str) -> None:
    """It is read whole: the prompt has the beginning already."""
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    task = Task("t", (*CHAT, {"role": "assistant", "content": begun}), form="continued")
    texts = ["12+3", f"{begun}3", f"{begun}{begun}3", "3"]
    prompt, replies = scorer.encoded(task, texts, [True] * 4)
    assert scorer.renderer.shown(prompt).endswith(f"<|assistant|>{begun}")
    assert [scorer.renderer.shown(ids) for ids in replies] == [f"{text}<|end|>" for text in texts]


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("same_tokens", [True, False])
def test_a_completion_beyond_the_context_costs_only_itself(
    folder: Path, members: int, same_tokens: bool
) -> None:
    reward = reward_model([str(folder)] * members, CONFIG)
    given = arguments(folder, same_tokens=same_tokens)
    expected = called(reward, given)
    given["completion_ids"][1], given["completions"][1] = [5] * 400, "5" * 400
    found = called(reward, given)
    assert found[1].value is None
    # What is scored together decides about the last bits.
    scores = [[getattr(one, "value", one) for one in some[::2]] for some in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert "exceed its context" in found[1].detail


@pytest.mark.nightly
def test_a_worker_gives_the_same_rewards_and_ends_with_its_environment(
    folder: Path, tmp_path: Path
) -> None:
    other = folder_of(tmp_path / "other", seed=2, head="mean")
    paths, config = [str(folder), str(other)], CONFIG.model_copy(update={"std_factor": 1.0})
    inline = reward_model(paths, config)
    worker = reward_model(paths, config.model_copy(update={"placement": "worker"}))
    assert isinstance(worker, Named) and isinstance(worker.started, WorkerModels)
    worker.started.start()
    for given in (arguments(folder), arguments(folder, same_tokens=False)):
        expected, found = called(inline, given), called(worker, given)
        assert [(g.value, g.metrics) for g in found] == [(g.value, g.metrics) for g in expected]
    given["completion_ids"] = [[5] * 400] * 3
    given["completions"] = ["5" * 400] * 3
    with pytest.raises(NotScored, match="reads at most"):
        called(worker, given)
    child = worker.started._child
    assert child is not None and child.process.poll() is None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"was killed by SIGKILL[\s\S]*placement = 'inline'"):
        called(worker, arguments(folder))
    worker.started.close()
    assert child.process.poll() is not None


@pytest.mark.parametrize("where", ["inline", "worker", "served"])
def test_a_limit_bounds_the_rewards_of_every_placement(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(folder)
    free = called(reward_model([str(folder)], CONFIG), given)

    async def rewards(self: object, task: Asked) -> list[torch.Tensor]:
        return [torch.tensor(free, dtype=torch.float64)]

    monkeypatch.setattr(WorkerModels, "rewards", rewards)
    monkeypatch.setattr(ServedModels, "rewards", rewards)
    limit = sorted(map(abs, free))[1]
    placement = "worker" if where == "worker" else "inline"
    config = CONFIG.model_copy(update={"limit": limit, "placement": placement})
    path = "http://127.0.0.1:9" if where == "served" else str(folder)
    found = called(reward_model([path], config), given)
    assert found == pytest.approx([max(-limit, min(limit, value)) for value in free]) != free


def test_calls_after_a_missed_deadline_write_to_no_descriptor(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerModels, "start", lambda self: None)
    worker = WorkerModels([str(folder)], CONFIG.model_copy(update={"timeout_s": 0.01}))
    program = tmp_path / "silent.py"
    program.write_text("import time\ndef serve(requests): time.sleep(600)\n")
    worker._child, worker._loaded = Child(str(program)), True
    written = tmp_path / "other"

    async def rewards() -> list[BaseException]:
        task = Asked.of(**arguments(folder))
        first = asyncio.ensure_future(worker.rewards(task))
        second = asyncio.ensure_future(worker.rewards(task))
        await asyncio.wait([first])
        found = await asyncio.gather(first, second, return_exceptions=True)
        return [error for error in found if isinstance(error, BaseException)]

    requests, replies = worker._child.requests, worker._child.replies
    close = Child.close

    def closed(child: Child, grace_s: float = 0.0) -> None:
        close(child, grace_s)
        with written.open("w") as file:  # takes the numbers of the descriptors
            os.dup2(file.fileno(), requests)
            os.dup2(file.fileno(), replies)

    monkeypatch.setattr(Child, "close", closed)
    assert [type(error) for error in asyncio.run(rewards())] == [NoAnswer, NoAnswer]
    worker.close()
    assert written.read_bytes() == b""
    for number in (requests, replies):
        os.close(number)


def test_a_worker_that_closes_ends_the_call_that_waits(folder: Path, tmp_path: Path) -> None:
    worker = WorkerModels([str(folder)], CONFIG.model_copy(update={"timeout_s": 500.0}))
    program = tmp_path / "silent.py"
    reached = tmp_path / "reached"
    program.write_text(
        f"import time\ndef serve(requests):\n    next(requests)\n    open({str(reached)!r}, 'w')\n"
        "    time.sleep(600)\n"
    )
    child = worker._child = Child(str(program), keeps_output=True)
    worker._loaded = True

    async def closing() -> list[Any]:
        calls = [worker.rewards(Asked.of(**arguments(folder))) for _ in range(2)]
        waiting = asyncio.gather(*calls, return_exceptions=True)
        while not reached.exists():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(worker.close)
        return await waiting

    first, second = asyncio.run(closing())
    assert isinstance(first, RunFailed) and "was killed by" in str(first)
    assert isinstance(second, RunFailed) and "is closed" in str(second)
    assert child.closed


class Requests:
    """Requests of a parent process: the setup of a worker."""

    def __init__(self, paths: list[str]) -> None:
        config = CONFIG.model_dump(mode="json")
        setup = {"paths": paths, "config": config, "threads": torch.get_num_threads()}
        self.answers: list[bytes] = []
        self._requests = iter([json.dumps(setup).encode()])

    def __next__(self) -> bytes:
        return next(self._requests)

    def answer(self, body: bytes) -> None:
        self.answers.append(body)


def test_a_worker_says_what_cannot_be_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: Any = Requests([str(tmp_path / "nothing")])
    serve(requests)
    monkeypatch.setattr(WorkerModels, "start", lambda self: None)
    monkeypatch.setattr(WorkerModels, "_answer", lambda *_: json.loads(requests.answers.pop()))
    worker = reward_model(["any"], CONFIG.model_copy(update={"placement": "worker"}))
    assert isinstance(worker, Named) and worker.repeats_itself
    with pytest.raises(UserError, match=r"environment\.rewards = '.*nothing': cannot be loaded"):
        called(worker, arguments(folder))


def served(folder: Path, **options: Any) -> Any:
    given = {"model": str(folder), "name": "rm", "device": "cpu", **options}
    return answering(make_reward_served(ServeOptions(**given))[0])


def test_a_served_model_gives_the_same_rewards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder_of(tmp_path / "other", seed=2, head="mean")
    with served(folder) as (url, _, _), served(other) as (second, _, _):
        for paths, urls in (([folder], [url]), ([folder, other], [url, f"{second}/v1/"])):
            inline = reward_model([*map(str, paths)], CONFIG)
            elsewhere = reward_model(urls, CONFIG)
            for given in (arguments(folder), arguments(folder, CHAT, same_tokens=False)):
                expected, found = called(inline, given), called(elsewhere, given)
                for a, b in zip(found, expected, strict=True):
                    pair = (a, b) if isinstance(a, float) else (a.value, b.value)
                    assert pair[0] == pytest.approx(pair[1], abs=1e-6)
        given = arguments(folder)
        expected = called(reward_model([url], CONFIG), given)
        monkeypatch.setattr("sixfold.reward_model.served.MAX_IDS", 9)  # no two in one request
        assert called(reward_model([url], CONFIG), given) == pytest.approx(expected, abs=1e-5)
        given["completion_ids"][1], given["completions"][1] = [5] * 400, "5" * 400
        scores = [getattr(one, "value", one) for one in called(reward_model([url], CONFIG), given)]
        assert scores[1] is None
        assert scores[::2] == pytest.approx(expected[::2], abs=1e-5)
        names = [rewards_fingerprint([f"reward_model:{u}"], CONFIG) for u in (url, second)]
        assert names[0] != names[1]
    with pytest.raises(UserError, match="an ensemble of http://a and a folder"):
        reward_model(["http://a", "rm"], CONFIG)
    with pytest.raises(UserError, match=r"--max-running has no effect: .* is a reward model"):
        make_reward_served(ServeOptions(model=str(folder), max_running=3))


def test_other_clients_get_the_forms_of_vllm_and_openrlhf(folder: Path) -> None:
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    texts = ["1+2=3", "1+2=12+3"]
    ids = [scorer.spelled(text) for text in texts]
    expected = [float(scorer.rewards(i[:1], [i[1:]])[0]) for i in ids]
    raw = {"model": "rm", "use_activation": False}
    task = {"model": "rm", "prompt": "1", "completions": ["2"], "completion_ids": [[4]]}
    task |= {"prompt_ids": [3], "rendered_prompt": "1", "ended": [True]}
    with served(folder, api_key="secret") as (url, _, _):

        def posted(path: str, body: Any, key: str = "secret") -> httpx.Response:
            return httpx.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"})

        for form in (texts, ids):
            rows = posted("/classify", {**raw, "input": form}).json()["data"]
            assert [row["probs"][0] for row in rows] == pytest.approx(expected, abs=1e-6)
        probs = posted("/classify", {"model": "rm", "input": texts[0]}).json()["data"][0]["probs"]
        assert probs == [pytest.approx(float(torch.tensor(expected[0]).sigmoid()), abs=1e-6)]
        chat = {**raw, "messages": [*CHAT, {"role": "assistant", "content": "3"}]}
        value = posted("/classify", chat).json()["data"][0]["probs"][0]
        encoded = scorer.encoded(Task("t", CHAT), ["3"], [True])
        assert value == pytest.approx(float(scorer.rewards(*encoded)[0]), abs=1e-6)
        for prompts in ({}, {"prompts": ["1+2=", "1+2="]}):
            found = posted("/get_reward", {"query": texts, **prompts}).json()["rewards"]
            assert found == pytest.approx(expected, rel=1e-5)
        for path, body, status, said in (
            ("/classify", {**raw, "input": "1"}, 400, "too short"),
            ("/classify", {**raw, "input": [[9999999, 1]]}, 400, "unknown token ids"),
            ("/classify", {"model": "x", "input": "11"}, 404, "'rm' is served"),
            ("/classify", raw, 400, "either input or messages"),
            ("/classify", {**raw, "messages": [*CHAT]}, 400, "the assistant's"),
            ("/classify", {**raw, "messages": [{"role": "user"}]}, 400, "its text as content"),
            ("/v1/rewards", {**task, "completion_ids": [[-1]]}, 400, "not negative"),
            ("/v1/rewards", {**task, "ended": []}, 400, "one entry for each of 1"),
            ("/v1/rewards", {**task, "prompt": [{}]}, 400, "its text as content"),
            ("/get_reward", {"query": ["11"], "prompts": []}, 400, "0 for 1 queries"),
            ("/get_reward", {"query": ["11"], "prompts": ["2"]}, 400, "does not begin"),
            ("/get_reward", {"query": ["11", "1"], "prompts": ["1", "1"]}, 400, "query 1 has"),
            ("/get_reward", {"query": ["11", ""]}, 400, "query 1 has an empty"),
            ("/classify", {**chat, "add_generation_prompt": True}, 400, "open another turn"),
            ("/classify", {**raw, "input": [3] * 9000}, 400, "reads at most"),
            ("/classify", {**raw, "input": [[3] * 9000]}, 400, "reads at most"),
            ("/classify", {**raw, "input": ["3"] * 9000}, 400, "9000 items"),
            ("/v1/chat/completions", {}, 404, "This server has /classify, /get_reward, /v1/"),
        ):
            answer = posted(path, body)
            assert (answer.status_code, said in answer.text) == (status, True), answer.text
        assert posted("/get_reward", {"query": texts}, key="wrong").status_code == 401


def with_bos(folder: Path) -> PreTrainedTokenizerBase:
    """Make the tokenizer of a reward model add BOS to every text, without a chat template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<|system|>"})
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_completion_after_its_prompt_gets_no_bos(folder: Path) -> None:
    tokenizer = with_bos(folder)
    prompt, whole = tokenizer("1*2=")["input_ids"], tokenizer("1*2=12")["input_ids"]
    assert whole[0] == tokenizer.bos_token_id and whole[: len(prompt)] == prompt
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    expected = float(scorer.rewards(prompt, [whole[len(prompt) :]])[0])
    with served(folder) as (url, _, _):
        for prompts in ({}, {"prompts": ["1*2="]}):
            answer = httpx.post(f"{url}/get_reward", json={"query": ["1*2=12"], **prompts})
            assert answer.json()["rewards"] == [pytest.approx(expected, abs=1e-5)]


def test_a_reward_that_is_not_finite_is_no_fault_of_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = torch.tensor([1.0, math.nan, math.nan]).double()
    monkeypatch.setattr(Scorer, "rewards", lambda _, __, ids: nan[: max(2, len(ids))])
    with served(folder) as (url, _, _):
        answer = httpx.post(f"{url}/get_reward", json={"query": ["11"]})
        assert answer.status_code == 422 and "completion 1 is nan" in answer.text
        first, *others = called(reward_model([url], CONFIG), arguments(folder))
        assert first == 1.0 and [grade.value for grade in others] == [None, None]
        nan[0] = math.nan
        with pytest.raises(NoReply, match=r"status 422"):
            called(reward_model([url], CONFIG), arguments(folder))


def test_a_completion_beyond_the_context_of_a_served_model_costs_only_itself(folder: Path) -> None:
    given = arguments(folder)
    given["completion_ids"][1], given["completions"][1] = [5] * 400, "5" * 400
    expected = called(reward_model([str(folder)], CONFIG), given)
    with served(folder) as (url, _, _):
        found = called(reward_model([url], CONFIG), given)
        assert found[::2] == pytest.approx(expected[::2], abs=1e-6)
        assert found[1] == expected[1] and found[1].value is None
        with pytest.raises(NoReply, match="reads at most"):
            called(
                reward_model([url], CONFIG),
                {name: values[1:2] for name, values in given.items()},
            )


@pytest.mark.parametrize(("precision", "stored"), [("auto", "bfloat16"), ("float32", "float32")])
def test_a_served_model_gets_the_precision_of_a_policy(
    precision: str, stored: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config := folder / "config.json").write_text(
        json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"})
    )
    monkeypatch.setattr("sixfold_serving.serve.resolve_device", lambda *_: "cuda")
    asked: list[Any] = []

    def load(path: str, *rest: Any) -> Any:
        asked.extend(rest)
        return load_reward_model(path, "cpu")

    monkeypatch.setattr("sixfold_serving.serve.load_reward_model", load)
    make_reward_served(ServeOptions(model=str(folder), precision=precision))
    assert asked[:2] == ["cuda", getattr(torch, stored)]


def test_a_worker_uses_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for asked, device in (("auto", "cuda:3"), ("cuda", "cuda:3"), ("cuda:1", "cuda:1")):
        config = CONFIG.model_copy(update={"placement": "worker", "device": asked})
        worker = reward_model(["rm"], config)
        assert isinstance(worker, Named) and isinstance(worker.started, WorkerModels)
        assert worker.started._config.device == device


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.001)
    yield


Reply = Callable[[dict[str, Any]], Response]


def other_server(reply: Reply, card: dict[str, Any] | None = None) -> Any:
    """A server of vLLM's form. reply: answers /classify."""
    asked: list[dict[str, Any]] = []

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [card or {"id": "their", "owned_by": "vllm"}]})

    async def classify(request: Request) -> Response:
        asked.append(json.loads(await request.body()))
        return reply(asked[-1])

    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/classify", classify, methods=["POST"]),
        ]
    )
    return answering(app), asked


def rows(values: list[Any]) -> Response:
    data = [{"index": i, "probs": v if isinstance(v, list) else [v]} for i, v in enumerate(values)]
    return JSONResponse({"data": data[::-1]})


def test_vllm_is_asked_for_scores_without_their_activation(folder: Path, quick: None) -> None:
    failures = iter([503, 429])

    def reply(body: dict[str, Any]) -> Response:
        if status := next(failures, 0):
            return JSONResponse({"error": "busy"}, status_code=status)
        assert (body["model"], body["use_activation"]) == ("their", False)
        if "input" in body:
            return rows([float(len(text)) for text in body["input"]])
        return rows([[1.0, 1.5 + body["continue_final_message"]]])

    server, asked = other_server(reply)
    with server as (url, _, _):
        reward = reward_model([url], CONFIG)
        plain = arguments(folder)
        plain["rendered_prompt"] = plain["prompts"]
        assert called(reward, plain) == [5.0, 8.0, 9.0]
        assert len(asked) == 3
        assert called(reward, arguments(folder, CHAT)) == [0.5, 0.5, 1.5]
        said = sorted([m["content"] for m in one["messages"]] for one in asked[3:])
        assert said == [["1+2=", "12+3"], ["1+2=", "3"], ["1+2=", "abc 3"]]


@pytest.mark.parametrize("plain", [True, False])
def test_a_text_that_vllm_refuses_costs_only_itself(folder: Path, plain: bool) -> None:
    """As one beyond its context. If it refuses all, the check fails with its reason."""

    def reply(body: dict[str, Any]) -> Response:
        texts = body.get("input") or [body["messages"][-1]["content"]]
        if any("3" in text for text in texts):
            return JSONResponse({"error": "129 input tokens"}, status_code=400)
        return rows([float(len(text)) for text in texts])

    given = arguments(folder, "1+2=" if plain else CHAT)
    if plain:
        given["rendered_prompt"] = given["prompts"]
    server, asked = other_server(reply)
    with server as (url, _, _):
        reward = reward_model([url], CONFIG)
        with pytest.raises(NoReply, match=r"status 400: .*129 input tokens"):
            called(reward, given)
        given["completions"] = (
            ["4", "12+3", "5"]
            if plain
            else [[{"role": "assistant", "content": text}] for text in ("4", "12+3", "5")]
        )
        found = called(reward, given)
    expected = [5.0, None, 5.0] if plain else [1.0, None, 1.0]
    assert [getattr(one, "value", one) for one in found] == expected
    assert len(asked) == (8 if plain else 6)


def test_vllm_gets_a_reply_that_the_prompt_has_begun_as_one_message(folder: Path) -> None:
    begun = (*CHAT, {"role": "assistant", "content": "1 "})
    server, asked = other_server(lambda body: rows([1.0]))
    with server as (url, _, _):
        called(reward_model([url], CONFIG), arguments(folder, begun, same_tokens=False))
    replies = sorted(str(one["messages"][1:]) for one in asked)
    said = ("1 12+3", "1 3", "1 abc 3")
    assert replies == [str([{"role": "assistant", "content": text}]) for text in said]


def test_vllm_gets_plain_prompts_of_bos_tokenizers_as_whole_texts(folder: Path) -> None:
    renderer = Renderer(with_bos(folder))
    shown = renderer.shown(renderer.encode(Task("t", "1*2=")))  # as a run makes it
    assert shown == "<|system|>1*2="
    server, asked = other_server(lambda body: rows([1.0] * len(body.get("input", "1"))))
    given = arguments(folder, "1*2=")
    with server as (url, _, _):
        reward = reward_model([url], CONFIG)
        for start in (shown[:-4], "", "<s>", "<｜begin▁of▁text｜>", "[gMASK]<sop>", "[CLS] "):
            given["rendered_prompt"] = [f"{start}1*2="] * 3
            called(reward, given)
            assert asked.pop()["input"] == ["1*2=3", "1*2=12+3", "1*2=abc 3"]
        for read in ("<|user|>1*2=<|assistant|>", "User: 1*2=", "1*2=\n"):
            given["rendered_prompt"] = [read] * 3
            called(reward, given)
            assert [asked.pop()["messages"][0]["content"] for _ in range(3)] == ["1*2="] * 3


def test_a_server_may_not_ask_for_endless_patience(folder: Path) -> None:
    server, asked = other_server(
        lambda body: Response(status_code=503, headers={"Retry-After": "100000"})
    )
    with server as (url, _, _), pytest.raises(NoReply, match=r"status 503.*\(1 attempts\)"):
        task = Asked.of(**(arguments(folder) | {"rendered_prompt": ["1+2="] * 3}))
        asyncio.run(asyncio.wait_for(ServedModel(url, CONFIG).rewards(task), 20))
    assert len(asked) == 1


def test_servers_that_give_no_rewards_are_named(folder: Path, quick: None) -> None:
    given = arguments(folder)
    given["rendered_prompt"] = given["prompts"]
    one = {"id": "policy", "owned_by": "sixfold"}
    cases: list[tuple[Reply, dict[str, Any] | None, str]] = [
        (lambda body: rows([1.0]), None, "answered with 1 rewards for 3 completions"),
        (lambda body: rows([1.0, 2.0, [1.0, 2.0, 3.0]]), None, "more than two labels"),
        (lambda body: JSONResponse({"data": [{}]}), None, "does not answer /classify with data"),
        (lambda body: Response("no"), None, "does not answer /classify with JSON"),
        (lambda body: Response("no", 404), None, "/classify needs a reward model"),
        (lambda body: rows([]), one, "serves 'policy', which is no reward model"),
    ]
    for reply, card, said in cases:
        server, _ = other_server(reply, card)
        with server as (url, _, _), pytest.raises(UserError, match=said):
            called(reward_model([url], CONFIG), given)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = ServedModel(f"http://127.0.0.1:{free.getsockname()[1]}", CONFIG)
        with pytest.raises(UserError, match=r"no answer from .* \(6 attempts\)\. Start a server"):
            asyncio.run(gone.identity())


@pytest.mark.parametrize(
    ("rewards", "setting", "needed"),
    [
        ("arithmetic", "placement=worker", "a reward model in a folder"),
        ("reward_model:rm", "retries=2", "that is served"),
        ("reward_model:rm", "timeout_s=9", "placement = 'worker'"),
        ("reward_model:http://a", "device=cpu", "a reward model in a folder"),
        ("reward_model:http://a", "placement=worker", "a reward model in a folder"),
        ("reward_model:HTTP://a , https://b", "device=cpu", "a reward model in a folder"),
    ],
)
def test_settings_without_effect_are_refused(rewards: str, setting: str, needed: str) -> None:
    flags = [f"--environment.rewards={rewards}", f"--environment.reward_model.{setting}"]
    with pytest.raises(UserError, match=f"{setting.split('=')[0]} = .* has no effect.*{needed}"):
        make_plan(parse_recipe('run.name = "run"', "test", flags))


STAGED = """
run.name = "run"
data.source = "arithmetic"
[environment.reward_model]
placement = "worker"
timeout_s = 9.0
[[stages]]
kind = "reward_model"
name = "rm"
data.source = "pairs.jsonl"
reward_model.steps = 1
[[stages]]
kind = "rl"
run.steps = 1
environment.rewards = ["REWARD"]
"""


def test_a_setting_that_one_stage_reads_may_stand_above_all() -> None:
    for stage in parse_staged(STAGED.replace("REWARD", "stage:rm"), "test").stages:
        make_plan(stage.recipe)
    with pytest.raises(UserError, match=r"placement = .worker. has no effect"):
        parse_staged(STAGED.replace("REWARD", "arithmetic"), "test")
    own = "--stages.rm.environment.reward_model.retries=8"
    with pytest.raises(UserError, match="retries = 8 has no effect"):
        parse_staged(
            STAGED.replace("REWARD", "stage:rm")
            .replace('placement = "worker"', "")
            .replace("timeout_s = 9.0", ""),
            "test",
            [own],
        )


@pytest.mark.parametrize(
    "setting", ["run.patience=2", "run.target_accuracy=0.5", "checkpoint.keep_best=1"]
)
def test_a_reward_model_has_no_best_evaluation(setting: str) -> None:
    text = STAGED.replace("REWARD", "stage:rm")
    with pytest.raises(UserError, match=f"{setting.split('=')[0]} compares .* Remove it"):
        parse_staged(text, "test", [f"--stages.rm.{setting}"])
    parse_staged(text, "test", [f"--{setting}"])
