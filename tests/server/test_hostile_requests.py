"""Hostile requests: each is quickly refused with a 4xx, and a concurrent stream continues."""

from __future__ import annotations

import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Running, running

from sixfold.cli import main
from sixfold.model.loading import Policy

CHAT, TEXT, WEIGHTS = "/v1/chat/completions", "/v1/completions", "/v1/weights"
SAY = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(chat_policy: Policy) -> Iterator[Running]:
    with running(chat_policy, allow_weight_updates=True) as it:
        yield it


def post(server: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        server.url + path,
        content=raw,
        headers={"content-type": "application/json", **headers},
        timeout=60,
    )


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": SAY, "max_tokens": 4} | more


def text(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 4} | more


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


MIXED: list[Any] = [1, "a", [], {}, None, 1.5, True, [1], [[]], {"a": 1}]
BIG: dict[str, tuple[str, dict[str, Any] | bytes]] = {
    "mixed prompt": (TEXT, text(prompt=MIXED * 50_000)),
    "mixed messages": (CHAT, chat(messages=MIXED * 20_000)),
    "parts": (CHAT, chat(messages=[{"role": "user", "content": [part("a")] * 120_000}])),
    "wrong parts": (CHAT, chat(messages=[{"role": "user", "content": [{}] * 200_000}])),
    "messages": (CHAT, chat(messages=SAY * 60_000)),
    "keys": (CHAT, chat(**{f"key{i}": 1 for i in range(100_000)})),
    "keys of a message": (
        CHAT,
        chat(messages=[{"role": "user", "content": "a"} | {f"key{i}": 1 for i in range(100_000)}]),
    ),
    "stops": (CHAT, chat(stop=["a"] * 250_000)),
    "stop tokens": (CHAT, chat(stop_token_ids=["a"] * 250_000)),
    "bias": (CHAT, chat(logit_bias={str(i): 1 for i in range(100_000)})),
    "tools": (CHAT, chat(tools=[{"type": "function"}] * 100_000)),
    "long key": (CHAT, chat(**{"k" * 4_000_000: 1})),
    "long model": (CHAT, chat(model="m" * 4_000_000)),
    "long text": (TEXT, text(prompt="a " * 2_000_000)),
    "long message": (CHAT, chat(messages=[{"role": "user", "content": "a " * 2_000_000}])),
    "many prompts": (TEXT, text(prompt=["a"] * 250_000)),
    "nested": (CHAT, b'{"model": "tiny", "messages": ' + b"[" * 400 + b"]" * 400 + b"}"),
    "empty lists": (CHAT, b'{"model": "tiny", "messages": [' + b"[]," * 1_300_000 + b"[]]}"),
    "huge number": (CHAT, b'{"model": "tiny", "n": ' + b"9" * 4000 + b"}"),
}


@pytest.mark.mostly_nightly(6)
@pytest.mark.slow
@pytest.mark.parametrize("case", BIG)
def test_a_large_request_is_refused_at_once_while_others_are_answered(
    server: Running, case: str
) -> None:
    """The event loop answers /health meanwhile. The test measures CPU time, which does not depend
    on other work of the machine.
    """
    path, body = BIG[case]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert len(raw) < 4 << 20
    waits: list[float] = []
    done = threading.Event()
    clock = time.pthread_getcpuclockid(server.thread.ident or 0)

    def loop_seconds() -> float:
        return time.clock_gettime(clock)

    def watch() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not done.wait(0.01):
                before = loop_seconds()
                client.get("/health")
                waits.append(loop_seconds() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        start = time.process_time()
        answer = post(server, path, raw)
        seconds = time.process_time() - start
    finally:
        done.set()
        watcher.join()
    assert answer.status_code in (400, 404, 413), answer.text[:300]
    assert len(answer.text) < 2000, "the answer repeats the request"
    assert seconds < 4 and max(waits, default=0) < 2


def test_a_large_request_takes_little_memory(server: Running) -> None:
    """500,000 items of all kinds would take 1.9 GB, if pydantic reported each item once per form of
    a prompt.
    """
    raw = json.dumps(text(prompt=[x for x in MIXED[:4]] * 60_000)).encode()
    tracemalloc.start()
    try:
        assert post(server, TEXT, raw).status_code in (400, 413)
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.mostly_slow(5)
@pytest.mark.parametrize("value", [1e-39, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
def test_numbers_that_divide_logits_to_infinity_are_refused(
    server: Running, field: str, value: float
) -> None:
    answer = post(server, CHAT, chat(**{field: value}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("value", [1e-20, 1e-6, 2.0])
def test_computable_temperatures_are_accepted(server: Running, value: float) -> None:
    answer = post(server, CHAT, chat(temperature=value, logprobs=True, top_logprobs=5))
    assert answer.status_code == 200
    assert all(t["logprob"] <= 0 for t in answer.json()["choices"][0]["logprobs"]["content"])


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    "path",
    ["a" * 900, "a" * 5000, "a/" * 2500, "x\0y", "\n", "~", "/", "/etc", "/dev/null", "/proc/self"],
)
def test_a_path_to_no_weights_is_a_400_that_lists_nothing(server: Running, path: str) -> None:
    answer = post(server, WEIGHTS, {"path": path, "version": 1})
    assert answer.status_code == 400
    assert "passwd" not in answer.text and "found" not in answer.text


def test_error_does_not_list_the_folder(server: Running, tmp_path: Path) -> None:
    (tmp_path / "secret-plan.txt").write_text("x")
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "secret" not in post(server, WEIGHTS, {"path": str(tmp_path), "version": 1}).text
    (tmp_path / "config.json").write_text("{}")
    assert "weights.bin" not in post(server, WEIGHTS, {"path": str(tmp_path), "version": 1}).text


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("version", [10**40, 2**63, 2**52])
def test_a_version_that_leaves_no_room_for_later_ones_is_refused(
    server: Running, version: int, chat_policy: Policy, tmp_path: Path
) -> None:
    chat_policy.save(tmp_path)
    answer = post(server, WEIGHTS, {"path": str(tmp_path), "version": version})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "version")
    after = server.engine.version + 1
    assert post(server, WEIGHTS, {"path": str(tmp_path), "version": after}).status_code == 200


@pytest.mark.parametrize(
    "more",
    [dict(n=128, max_tokens=10**9), dict(max_tokens=10**30), dict(n=10**30), dict(seed=10**30)],
)
def test_enormous_counts_are_400(server: Running, more: dict[str, Any]) -> None:
    assert post(server, CHAT, chat(**more)).status_code == 400


def test_noise_of_many_long_completions_is_bounded(chat_policy: Policy) -> None:
    """The engine draws the noise of n completions at once: 128 of 100,000 tokens would be
    400 MB.
    """
    from sixfold_serving.requests import MAX_TOKENS, Limits, TextAsk, parse_ask

    limits = Limits(vocabulary=100, context=1 << 24, default_tokens=16, characters_per_token=8)
    assert limits.max_tokens(parse_ask(TextAsk, text(n=4, max_tokens=MAX_TOKENS // 4)), 2)
    with pytest.raises(Exception, match="exceed 4194304 tokens"):
        limits.max_tokens(parse_ask(TextAsk, text(n=128, max_tokens=100_000)), 2)


HOSTS = {
    "127.0.0.1:8000": True,
    "localhost": True,
    "LOCALHOST.:80": True,
    "[::1]:8000": True,
    "127.8.9.10": True,
    "evil.example": False,
    "evil.example:8000": False,
    "localhost.evil.example": False,
    "127.0.0.1.evil.example": False,
    "169.254.169.254": False,
    "[::1].evil.example": False,
    "192.168.1.7:8000": False,
}


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("host", HOSTS)
def test_foreign_host_header_is_refused_on_loopback(server: Running, host: str) -> None:
    for path in ("/v1/models", "/health", "/metrics"):
        answer = httpx.get(server.url + path, headers={"host": host})
        assert answer.status_code == (200 if HOSTS[host] else 403), host
    assert post(server, TEXT, text(), host=host).status_code == (200 if HOSTS[host] else 403)


@pytest.mark.slow
def test_a_proxy_may_ask_by_a_name_that_is_allowed(chat_policy: Policy) -> None:
    with running(chat_policy, allow_host=("models.example",)) as server:
        assert (
            httpx.get(server.url + "/v1/models", headers={"host": "Models.example:443"}).status_code
            == 200
        )
        assert (
            httpx.get(server.url + "/v1/models", headers={"host": "other.example"}).status_code
            == 403
        )


@pytest.mark.slow
def test_headers_that_do_not_come_end_the_connection(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sixfold_serving.connections.HEADER_SECONDS", 0.3)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    whole, part = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /health HTTP/1.1\r\n"
    for before, sent in ((b"", b""), (b"", part), (whole, part)):
        with socket.create_connection(address, timeout=60) as connection:
            if before:
                connection.sendall(before)
                assert b"200" in connection.recv(4096)
            connection.sendall(sent)
            while connection.recv(4096):  # raises TimeoutError if the server waits forever
                pass


@pytest.mark.slow
def test_a_connection_that_asks_again_is_kept(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sixfold_serving.connections.HEADER_SECONDS", 0.2)
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.get("/health").status_code == 200
            time.sleep(0.1)


def test_bodies_that_arrive_together_are_bounded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sixfold_serving.bounds.MAX_BODIES", 3000)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type:"
        b" application/json\r\ncontent-length: 5000\r\n\r\n"
    )
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with (
        socket.create_connection(address, timeout=10) as first,
        socket.create_connection(address, timeout=10) as second,
    ):
        first.sendall(head + b" " * 2000)
        time.sleep(0.1)
        second.sendall(head + b" " * 2000)
        assert b"503" in second.recv(4096).split(b"\r\n")[0]
    assert post(server, TEXT, text()).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\xc3"}',
        json.dumps(chat()).encode("utf-16"),
    ],
)
def test_invalid_utf8_is_a_400(server: Running, raw: bytes) -> None:
    assert post(server, CHAT, raw).status_code == 400


def test_a_header_flood_is_refused(server: Running) -> None:
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10
    ) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 50_000 + b"\r\n")
            status = connection.recv(4096).split(b"\r\n")[0]
        except ConnectionError:
            status = b"400"
        assert b"400" in status
    assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "99999"], "from 0 to 65535"),
        (["--port", "-1"], "expected an integer"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen on"),
        (["--host", "a..b", "--port", "0"], "cannot listen on"),
        (["--host", "a\0b", "--port", "0"], "cannot listen on"),
        (["--host", "x" * 300, "--port", "0"], "cannot listen on"),
        (["--host", "1.2.3.4", "--port", "0"], "cannot listen on"),
        (["--host", "0.0.0.0", "--port", "0"], "--insecure"),
        (["--host", "", "--port", "0"], "--insecure"),
    ],
)
def test_unavailable_address_is_a_one_line_error(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SIXFOLD_API_KEY", raising=False)
    assert main(["serve", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_key_or_insecure_flag_allows_other_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands reach the model folder, which does not exist."""
    monkeypatch.delenv("SIXFOLD_API_KEY", raising=False)
    for more in (["--insecure"], ["--api-key", "k"]):
        assert main(["serve", str(tmp_path), "--host", "0.0.0.0", "--port", "0", *more]) == 2
        assert "config.json" in capsys.readouterr().err
