"""An SGLang server without a model. `FakeGenerator` answers the requests of `SglangServer`."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fake_generator import FakeGenerator

from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import GeneratorClosed, Sampled, SampleKey
from sixfold.types import SamplingParams


class FakeSglang(ThreadingHTTPServer):
    """The server. It starts immediately, in its own threads."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, renderer: Renderer, context: int, max_running: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = FakeGenerator(renderer, context=context, max_running=max_running)
        self.asked: dict[str, Future[Any]] = {}
        self.loop = asyncio.new_event_loop()
        for work in (self.loop.run_forever, self.serve_forever):
            threading.Thread(target=work, daemon=True).start()
        self._ticking = asyncio.run_coroutine_threadsafe(self._tick(), self.loop)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    async def _tick(self) -> None:
        """Make an iteration of the event loop (one token) take 4 ms, so that tests see it run."""
        while True:
            time.sleep(0.004)
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._ticking.cancel()
        self.shutdown()
        self.server_close()
        self.loop.call_soon_threadsafe(self.loop.stop)

    def answer(self, path: str, body: dict[str, Any], gone: Callable[[], bool]) -> Any:
        known: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/health": lambda body: None,
            "/generate": lambda body: self._generate(body, gone),
            "/abort_request": lambda body: self.asked[body["rid"]].cancel() and None,
            "/update_weights_from_disk": self._load,
            "/get_model_info": lambda body: {"weight_version": str(self.fake.version)},
        }
        return known[path](body)

    def _generate(self, body: dict[str, Any], gone: Callable[[], bool]) -> Any:
        tokens, drawn = body["input_ids"], body["sampling_params"]
        if "logprob_start_len" in body:
            scores = self._wait(self.fake.score(tokens))
            inputs = [[None, tokens[0], None]] + [[s, 0, None] for s in scores]
            return {"meta_info": {"input_token_logprobs": inputs}}
        params = SamplingParams(
            drawn["max_new_tokens"],
            drawn["temperature"],
            stop_token_ids=tuple(drawn["stop_token_ids"]),
        )
        key = SampleKey(str(drawn["sampling_seed"]))
        work = self.fake.generate(
            tokens, params, key, stops=drawn["stop"], priority=body.get("priority", 0)
        )
        sampled: Sampled = self._wait(work, body["rid"], gone)
        return {
            "meta_info": {
                "finish_reason": {"type": sampled.finish_reason},
                "weight_versions": [
                    {"version": str(v), "start": i, "end": i + 1}
                    for i, v in enumerate(sampled.version)
                ],
                "output_token_logprobs": [
                    [p, t, None] for t, p in zip(sampled.tokens, sampled.logp, strict=True)
                ],
                "cached_tokens": 0,
                "e2e_latency": 0.1,
            }
        }

    def _load(self, body: dict[str, Any]) -> Any:
        async def drained() -> None:
            while self.fake.running:
                await asyncio.sleep(0.001)
            await self.fake.load({}, int(body["weight_version"]))

        self._wait(drained())
        return {"success": True, "message": "loaded"}

    def _wait(self, work: Any, name: str = "", gone: Callable[[], bool] = lambda: False) -> Any:
        """Result of a coroutine. It is cancelled if the client is gone."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        if name:
            self.asked[name] = future
        while not wait([future], 0.02).done:
            if gone():
                future.cancel()
        return future.result()


class _Handler(BaseHTTPRequestHandler):
    server: FakeSglang

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        try:
            status, reply = 200, self.server.answer(self.path, body, self._gone)
        except ValueError as error:
            status, reply = 400, {"error": {"message": str(error)}}
        except (GeneratorClosed, CancelledError) as error:
            status, reply = 500, {"error": {"message": str(error)}}
        data = b"" if reply is None else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(data)

    def _gone(self) -> bool:
        """True if the client has closed the connection."""
        ready, _, _ = select.select([self.connection], [], [], 0)
        return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing to standard error."""
