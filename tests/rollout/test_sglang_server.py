"""The client of SGLang, compared with tests/data/sglang/contract.json: requests and replies in the
form of SGLang's source code.

SGLang itself does not run in these tests, and the contract was not recorded from it. A loopback
server compares each request with the next one of the contract, and sends the reply of the contract.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sixfold.backends import json_server
from sixfold.backends.sglang_server import SglangServer
from sixfold.backends.vllm_process import vllm_config
from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import EngineLost, Sampled, SampleKey, wait_for
from sixfold.types import SamplingParams

CONTRACT = json.loads((Path(__file__).parents[1] / "data/sglang/contract.json").read_text())
PARAMS = SamplingParams(max_tokens=4, temperature=0.8, stop_token_ids=(1,))


class Recorded(ThreadingHTTPServer):
    """Answers the exchanges of a contract in order.

    Attributes:
        wrong: requests that differ from the contract.
        folder: files of the last weights that were sent.
    """

    def __init__(self, exchanges: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.exchanges = copy.deepcopy(exchanges)
        self.wrong: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.config: dict[str, Any] = {}
        self.rids: list[str] = []
        self.pause = threading.Event()
        self.waiting = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reply_to(self, asked: dict[str, Any]) -> dict[str, Any]:
        exchange = self.exchanges.pop(0)
        body = asked.get("body", {})
        if "model_path" in body:
            folder = Path(body["model_path"])
            self.weights = load_file(folder / "model.safetensors")
            self.config = json.loads((folder / "config.json").read_text())
            body["model_path"] = "<folder>"
        if "rid" in body:
            self.rids.append(body["rid"])
            body["rid"] = "<rid>"
        if asked != exchange["request"]:
            self.wrong.append(f"{exchange['what']}: {asked}")
        if exchange.get("slow"):
            self.waiting.set()
            self.pause.wait(5)
        return dict(exchange["reply"])


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: Recorded

    def do_GET(self) -> None:
        self._answer({"method": "GET", "path": self.path})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer({"method": "POST", "path": self.path, "body": body})

    def _answer(self, asked: dict[str, Any]) -> None:
        reply = self.server.reply_to(asked)
        body = reply.get("body", "")
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(reply["status"])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing to standard error."""


@pytest.fixture
def recorded() -> Iterator[Any]:
    servers: list[Recorded] = []

    def start(*exchanges: dict[str, Any]) -> Recorded:
        servers.append(Recorded(list(exchanges)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.pause.set()
        server.shutdown()
        server.server_close()


def connect(server: Recorded, policy: Policy, dtype: torch.dtype = torch.float32) -> SglangServer:
    config = vllm_config(policy.model.config, type(policy.model).__name__)
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    engine = SglangServer(server.url, config, dtype, renderer)
    wait_for(engine.check())
    return engine


def load(engine: SglangServer, policy: Policy) -> None:
    weights = dict(policy.model.named_parameters(remove_duplicate=False))
    assert wait_for(engine.load(weights, 7)) == 0


def sample(engine: SglangServer, k: int = 0, stops: tuple[str, ...] = ()) -> Sampled:
    return wait_for(engine.generate([5, 6, 7], PARAMS, SampleKey("t", k), stops=stops))


def changed(exchange: dict[str, Any], **reply: Any) -> dict[str, Any]:
    return {**exchange, "reply": {**exchange["reply"], **reply}}


def test_the_whole_contract_in_order(
    recorded: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not used if an address is given
    server = recorded(*CONTRACT)
    engine = connect(server, policy)
    assert engine.version == -1
    load(engine, policy)
    stop, length = sample(engine), sample(engine, 1, ("zz",))
    scores = wait_for(engine.score([9, 8, 7]))
    assert server.wrong == [] and len(server.exchanges) == 1 and len(set(server.rids)) == 2

    assert engine.version == 7
    assert (stop.tokens, stop.logp, stop.version) == (
        [40, 41, 1],
        [-0.5, -1.25, -0.0625],
        [7, 7, 7],
    )
    assert (stop.finish_reason, stop.reused, stop.seconds) == ("stop", 0, 0.21)
    # Older servers send no spans: all tokens have the same version.
    assert (length.tokens, length.version, length.finish_reason, length.reused) == (
        [42, 43, 44, 45],
        [7] * 4,
        "length",
        2,
    )
    assert scores == [-4.5, -0.75]
    expected = dict(policy.model.named_parameters())
    assert server.weights.keys() == expected.keys() and all(
        torch.equal(server.weights[k], expected[k]) for k in expected
    )
    assert server.config["architectures"] == [type(policy.model).__name__]


def test_spans_of_two_versions_are_kept_apart(recorded: Any, policy: Policy) -> None:
    exchange = copy.deepcopy(CONTRACT[3])
    exchange["reply"]["body"]["meta_info"]["weight_versions"] = [
        {"version": "6", "start": 0, "end": 2},
        {"version": "7", "start": 2, "end": 3},
    ]
    engine = connect(recorded(CONTRACT[0], exchange), policy)
    assert sample(engine).version == [6, 6, 7]


def test_an_aborted_completion_is_data(recorded: Any, policy: Policy) -> None:
    exchange = copy.deepcopy(CONTRACT[3])
    exchange["reply"]["body"]["meta_info"]["finish_reason"] = {
        "type": "abort",
        "message": "Abort in waiting queue",
    }
    engine = connect(recorded(CONTRACT[0], exchange), policy)
    assert sample(engine).finish_reason == "aborted"


def test_weights_go_over_in_the_dtype_of_the_run(recorded: Any, policy: Policy) -> None:
    server = recorded(*CONTRACT[:3])
    load(connect(server, policy, torch.bfloat16), policy)
    assert {t.dtype for t in server.weights.values()} == {torch.bfloat16}


def test_no_server_says_how_to_start_one(policy: Policy) -> None:
    with pytest.raises(
        UserError,
        match=(
            r"no SGLang server at http://127.0.0.1:9 \(.*\). Start one with python -m"
            r" sglang.launch_server"
        ),
    ):
        engine = SglangServer(
            "http://127.0.0.1:9", policy.model.config, torch.float32, Renderer(policy.tokenizer)
        )
        wait_for(engine.check())


def test_refusals_carry_what_the_server_said(recorded: Any, policy: Policy) -> None:
    refused = changed(
        CONTRACT[1],
        status=400,
        body={
            "success": False,
            "message": "Failed to get weights iterator",
            "num_paused_requests": 0,
        },
    )
    engine = connect(recorded(CONTRACT[0], refused), policy)
    with pytest.raises(
        UserError,
        match=r"answered POST /update_weights_from_disk with 400: .*Failed to get weights iterator",
    ):
        load(engine, policy)
    assert engine.version == -1


def test_server_that_keeps_the_old_version_is_detected(recorded: Any, policy: Policy) -> None:
    stale = changed(CONTRACT[2], body={**CONTRACT[2]["reply"]["body"], "weight_version": "default"})
    engine = connect(recorded(CONTRACT[0], CONTRACT[1], stale), policy)
    with pytest.raises(UserError, match="reports weights 'default' after '7'"):
        load(engine, policy)
    assert engine.version == -1


def test_other_server_on_the_port_is_reported(recorded: Any, policy: Policy) -> None:
    with pytest.raises(
        UserError, match=r"did not answer GET /health with JSON, so it is not SGLang"
    ):
        connect(recorded(changed(CONTRACT[0], body="<html>")), policy)


def test_a_cancelled_call_is_aborted_in_the_server(recorded: Any, policy: Policy) -> None:
    server = recorded(CONTRACT[0], {**CONTRACT[3], "slow": True}, CONTRACT[-1])
    engine = connect(server, policy)

    async def play() -> None:
        call = asyncio.create_task(engine.generate([5, 6, 7], PARAMS, SampleKey("t")))
        await asyncio.to_thread(server.waiting.wait, 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(play())
    assert server.wrong == [] and server.exchanges == []
    assert len(server.rids) == 2 and len(set(server.rids)) == 1


def test_new_weights_and_the_probe_do_not_queue_behind_completions(
    recorded: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_server, "CONNECTIONS", 1)
    server = recorded(CONTRACT[0], {**CONTRACT[3], "slow": True}, *CONTRACT[1:3], CONTRACT[5])
    engine = connect(server, policy)
    weights = dict(policy.model.named_parameters(remove_duplicate=False))

    async def play() -> None:
        call = asyncio.create_task(engine.generate([5, 6, 7], PARAMS, SampleKey("t")))
        await asyncio.to_thread(server.waiting.wait, 5)
        await engine.load(weights, 7)
        await engine.score(CONTRACT[5]["request"]["body"]["input_ids"])
        assert not call.done()
        server.pause.set()
        await call

    asyncio.run(play())
    assert server.wrong == [] and server.exchanges == []


def test_a_request_that_the_server_cannot_run_is_a_mistake_of_the_caller(
    recorded: Any, policy: Policy
) -> None:
    refused = changed(CONTRACT[3], status=400, body={"error": {"message": "too long"}})
    broken = changed(CONTRACT[3], status=500, body="out of memory")
    engine = connect(recorded(CONTRACT[0], refused, broken), policy)
    with pytest.raises(ValueError, match="too long"):
        sample(engine)
    with pytest.raises(EngineLost, match="out of memory"):
        sample(engine)


def test_a_lost_server_is_waited_for_as_long_as_the_patience_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=pause)
    monkeypatch.setattr(json_server, "time", clock)

    async def check() -> None:
        if now < 5:
            raise EngineLost("no server")

    json_server.reach(check, 5.0)
    assert now == 5
    now = 0.0
    with pytest.raises(EngineLost, match="no server"):
        json_server.reach(check, 4.0)
    assert now == 4


def test_a_server_that_hangs_is_noticed_while_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and does not answer, as a stopped process. A live one may be slow."""
    monkeypatch.setattr(json_server, "BEAT_S", 0.02)
    monkeypatch.setattr(json_server, "ALIVE_S", 0.1)

    async def ask(alive: bool) -> Any:
        asked = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            line = await reader.readline()
            asked += line.startswith(b"GET /health")
            while not alive or (line.startswith(b"POST") and asked < 3):
                await asyncio.sleep(0.005)
            writer.write(b"HTTP/1.1 503 busy\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = "http://127.0.0.1:" + str(server.sockets[0].getsockname()[1])
        made = json_server.JsonServer("SGLang", url, "a command")
        return await made.ask("POST", "/generate", {}, json_server.LONG_S)

    with pytest.raises(EngineLost, match=r"did not answer GET /health within 0.1 s"):
        asyncio.run(ask(alive=False))
    with pytest.raises(json_server.Refused, match=r"answered POST /generate with 503"):
        asyncio.run(ask(alive=True))


@pytest.mark.slow
def test_missing_answer_times_out(
    recorded: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_server, "SHORT_S", 0.2)
    with pytest.raises(UserError, match=r"did not answer GET /health within 0.2 s"):
        connect(recorded({**CONTRACT[0], "slow": True}), policy)
