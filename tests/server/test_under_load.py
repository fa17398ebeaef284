"""Many concurrent clients, some of which disconnect during an answer: answers are right, all blocks
are freed, and nothing hangs. Also the end of a server.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from serving import OPTIONS, running, slowed

from sixfold.engine.engine import Engine
from sixfold.model.loading import Policy
from sixfold_serving.record import read_trajectories
from sixfold_serving.serve import serve

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLIENTS, SECONDS, ASKED = 32, 4.0, 3


def body(i: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"prompt {i % 5}",
        "seed": i % 7,
        "max_tokens": 20 + i % 3,
        "n": 1 + i % 2,
    } | more


def texts(answer: dict[str, Any]) -> list[str]:
    return [c["text"] for c in answer["choices"]]


class Client(threading.Thread):
    """Sends requests without pause for some seconds, at least `ASKED` of them. It disconnects
    during some answers. `wrong` lists the faults.
    """

    def __init__(self, number: int, url: str, expected: dict[int, list[str]], until: float) -> None:
        super().__init__(daemon=True)
        self.chance = random.Random(number)
        self.url, self.expected, self.until = url, expected, until
        self.wrong: list[str] = []
        self.asked = self.answered = self.left = 0

    def run(self) -> None:
        while time.monotonic() < self.until or self.asked < ASKED:
            self.asked += 1
            i = self.chance.randrange(len(self.expected))
            kind = self.chance.choice(["whole", "stream", "leave whole", "leave stream"])
            try:
                with httpx.Client(base_url=self.url, timeout=120) as client:
                    self.ask(client, i, kind)
            except httpx.ReadTimeout:
                self.left += kind == "leave whole"
                if kind != "leave whole":
                    self.wrong.append(f"{i}: no answer")

    def ask(self, client: httpx.Client, i: int, kind: str) -> None:
        if kind == "whole":
            self.check(i, texts(client.post(TEXT, json=body(i)).json()))
        elif kind == "leave whole":
            client.post(
                TEXT,
                json=body(i, max_tokens=200, prompt="long"),
                timeout=self.chance.uniform(0.001, 0.1),
            )
        else:
            self.stream(client, i, leaves=kind == "leave stream")

    def stream(self, client: httpx.Client, i: int, leaves: bool) -> None:
        got = [""] * (1 + i % 2)
        with client.stream("POST", TEXT, json=body(i, stream=True)) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        got[choice["index"]] += choice["text"]
                if leaves and self.chance.random() < 0.2:
                    self.left += 1
                    return
        self.check(i, got)

    def check(self, i: int, got: list[str]) -> None:
        self.answered += 1
        if got != self.expected[i]:
            self.wrong.append(f"{i}: {got} for {self.expected[i]}")


@pytest.mark.nightly
@pytest.mark.slow
def test_clients_that_come_and_go_leak_nothing_and_get_right_answers(chat_policy: Policy) -> None:
    with running(chat_policy, max_running=16, kv_tokens=2048) as server:
        expected = {
            i: texts(httpx.post(server.url + TEXT, json=body(i), timeout=30).json())
            for i in range(20)
        }
        clients = [
            Client(k, server.url, expected, time.monotonic() + SECONDS) for k in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join(300)
        assert not [c for c in clients if c.is_alive()], "a client hangs"
        assert [w for c in clients for w in c.wrong] == []
        assert sum(c.answered for c in clients) > 20 and sum(c.left for c in clients) > 5
        server.idle()
        assert server.metric("aborted_total") > 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks_at_once(
    chat_policy: Policy, tmp_path: Path, stream: bool
) -> None:
    """Another client continues. The rest of the long completion is not sampled, and the record says
    that it was aborted.
    """
    with running(chat_policy, slowed(0.02), record=tmp_path) as server:
        stays: list[httpx.Response] = []
        stayer = threading.Thread(
            target=lambda: stays.append(
                httpx.post(server.url + TEXT, json=body(0, n=1, max_tokens=60), timeout=30)
            )
        )
        ask = body(1, n=4, max_tokens=200, stream=stream, stop=["~~never~~"])
        with httpx.Client(timeout=30) as client:
            held = (
                client.send(client.build_request("POST", server.url + TEXT, json=ask), stream=True)
                if stream
                else None
            )
            if held is None:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(server.url + TEXT, json=ask, timeout=0.4)
            else:
                next(held.iter_lines())
            stayer.start()
            if held is not None:
                held.close()
        until = time.monotonic() + 60
        while len(server.engine.scheduler.running) > 1 and time.monotonic() < until:
            time.sleep(0.005)
        assert len(server.engine.scheduler.running) <= 1
        stayer.join(30)
        assert stays[0].status_code == 200
        server.idle()
        assert server.engine.stats.decoded_tokens < 4 * 200
        recorder = server.served.recorder
        assert recorder is not None
        reasons = [
            json.loads(line)["finish_reason"] for line in recorder.path.read_bytes().splitlines()
        ]
        assert reasons.count("aborted") >= 1 and len(read_trajectories(recorder.path)) == len(
            reasons
        ) - reasons.count("aborted")


@pytest.mark.slow
def test_a_request_of_a_larger_priority_overtakes_in_the_queue(chat_policy: Policy) -> None:
    """The engine runs one sequence at a time, and makes no step before all requests have arrived.
    It has taken the first one by then. Of the others, the last one to arrive is next.
    """
    all_are_here = threading.Event()
    started: list[int] = []

    def hold(engine: Engine) -> None:
        step = engine.step

        def held() -> Any:
            assert all_are_here.wait(30)
            result = step()
            for sequence in engine.scheduler.running:
                if (priority := sequence.request.priority) not in started:
                    started.append(priority)
            return result

        engine.step = held  # type: ignore[method-assign]

    with running(chat_policy, hold, max_running=1) as server:
        statuses: list[int] = []

        def ask(path: str, **more: Any) -> None:
            statuses.append(httpx.post(server.url + path, json=more, timeout=30).status_code)

        text = body(0, n=1, max_tokens=20)
        spoken = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20}
        answer = {"model": "tiny", "input": "a", "max_output_tokens": 20, "priority": 7}
        clients = []
        for path, fields in (
            (TEXT, text | {"priority": 1}),
            (TEXT, text | {"priority": -1}),
            (CHAT, spoken),
            (TEXT, text | {"priority": 5}),
            ("/v1/responses", answer),
        ):
            clients.append(threading.Thread(target=ask, args=(path,), kwargs=fields))
            clients[-1].start()
            until = time.monotonic() + 30
            while server.served.engine.waiting < len(clients) or not server.engine.busy:
                assert time.monotonic() < until
                time.sleep(0.001)
        all_are_here.set()
        for client in clients:
            client.join(30)
        assert statuses == [200] * 5
        assert started == [1, 7, 5, 0, -1]
        for wrong in (1001, -1001, 0.5, "high"):
            refused = httpx.post(server.url + TEXT, json=text | {"priority": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


@pytest.mark.slow
def test_engine_failure_is_reported_to_every_client(chat_policy: Policy) -> None:
    def breaks(engine: Engine) -> None:
        def step() -> Any:
            raise RuntimeError("out of memory")

        engine.step = step  # type: ignore[method-assign]

    with running(chat_policy, breaks) as server:
        first = httpx.post(server.url + TEXT, json=body(0), timeout=30)
        assert (first.status_code, first.json()["error"]["type"]) == (500, "server_error")
        assert httpx.post(server.url + TEXT, json=body(0), timeout=30).status_code == 503
        assert httpx.get(server.url + "/health").status_code == 503


@pytest.mark.slow
def test_a_record_that_cannot_be_written_fails_the_exchange_and_not_the_server(
    chat_policy: Policy, tmp_path: Path
) -> None:
    with running(chat_policy, record=tmp_path) as server:
        recorder: Any = server.served.recorder
        write = recorder.write

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        recorder.write = full
        answer = httpx.post(server.url + TEXT, json=body(0), timeout=30)
        assert answer.status_code == 500 and "could not be written to the record" in answer.text
        recorder.write = write
        assert httpx.post(server.url + TEXT, json=body(0), timeout=30).status_code == 200
        server.idle()


def wait_for(url: str, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(url + "/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_command_serves_and_a_signal_ends_it_within_its_grace(
    chat_policy: Policy, tmp_path: Path
) -> None:
    """SIGTERM arrives during a long answer. The answer is aborted after the grace period, its
    record is on the disk, and the process ends.
    """
    chat_policy.save(tmp_path / "model")
    command = [
        sys.executable,
        "-c",
        "import sys; from sixfold.cli import main; sys.exit(main())",
        "serve",
        str(tmp_path / "model"),
    ]
    command += [
        "--name",
        "tiny",
        "--port",
        "0",
        "--record",
        str(tmp_path / "record"),
        "--grace",
        "1",
        "--device",
        "cpu",
    ]
    environment = os.environ | {"SIXFOLD_API_KEY": "k", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving 'tiny' on cpu at http://127.0.0.1:")
        url = line.split()[-1].removesuffix("/v1")
        wait_for(url, process)
        key = {"authorization": "Bearer k"}
        assert httpx.post(url + TEXT, json=body(0), timeout=30).status_code == 401
        assert httpx.post(url + TEXT, json=body(0, n=1), headers=key, timeout=30).status_code == 200
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert process.returncode == -signal.SIGTERM
    (record,) = (tmp_path / "record").iterdir()
    assert len(read_trajectories(record)) == 1


@pytest.mark.slow
def test_a_stop_in_the_middle_ends_running_requests_within_the_grace(chat_policy: Policy) -> None:
    with running(chat_policy, slowed(0.05)) as server:
        got: list[str] = []

        def ask() -> None:
            try:
                with httpx.stream(
                    "POST",
                    server.url + TEXT,
                    json=body(0, max_tokens=200, n=1, stream=True),
                    timeout=30,
                ) as answer:
                    got.extend(answer.iter_lines())
            except httpx.TransportError as error:
                got.append(type(error).__name__)

        asking = threading.Thread(target=ask)
        asking.start()
        until = time.monotonic() + 10
        while not server.engine.scheduler.running and time.monotonic() < until:
            time.sleep(0.005)
        server.uvicorn.should_exit = True
        server.thread.join(60)
        assert not server.thread.is_alive()
        assert server.engine.stats.decoded_tokens < 200, (
            "the whole answer was sampled: it was not aborted"
        )
        asking.join(60)
        assert got and not asking.is_alive()
        assert not server.served.engine._thread.is_alive()
        assert server.engine.scheduler.blocks.used == 0


@pytest.mark.slow
def test_garbage_collection_of_imported_objects_does_not_pause_streams(
    chat_policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full garbage collection visits every object that is not frozen. With PyTorch and
    transformers loaded, it takes a quarter of a second.
    """
    chat_policy.save(tmp_path)
    visited: list[int] = []
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda *_args, **_options: visited.append(len(gc.get_objects()))
    )
    loaded = len(gc.get_objects())
    try:
        serve(replace(OPTIONS, model=str(tmp_path)))
    finally:
        gc.unfreeze()
    assert loaded > 100_000 and visited[0] < 5_000
