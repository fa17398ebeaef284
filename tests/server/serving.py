"""A real server on a loopback port, on a scratch model, in a thread of the test's process: uvicorn,
the engine's thread, the `openai` client.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
import uvicorn
from openai import OpenAI
from starlette.types import ASGIApp

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence
from sixfold.model.loading import Policy
from sixfold_serving.app import Served, make_app
from sixfold_serving.serve import listen, make_served, uvicorn_config
from sixfold_serving.verb import ServeOptions

ALPHABET = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=()<>#;:,.? \n\"'{}[]_|&"
)
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|' +"
    " (m.role if m.role in ('system', 'assistant') else 'user') + '|>' + m.content }}{% for c in"
    " m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + (c.function.arguments | tojson) +"
    " '</tool_call>' }}{% endfor %}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}{%"
    " if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPTIONS = ServeOptions(
    model="", port=0, name="tiny", max_tokens=16, kv_tokens=4096, device="cpu", grace=3
)


@dataclass
class Running:
    """A server under test."""

    url: str
    served: Served
    uvicorn: uvicorn.Server
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        return self.served.engine.engine

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def idle(self, seconds: float = 10.0) -> None:
        """Wait until no request waits or runs, then check that all blocks are free."""
        until = time.monotonic() + seconds
        while (
            self.engine.busy or self.served.engine.waiting or self.served.engine._choices
        ) and time.monotonic() < until:
            time.sleep(0.01)
        scheduler = self.engine.scheduler
        assert (
            not self.engine.busy
            and self.served.engine.waiting == 0
            and not self.served.engine._choices
        )
        assert (scheduler.blocks.used, scheduler.reservation.reserved) == (0, 0)
        assert scheduler.blocks.free + scheduler.blocks.idle == scheduler.blocks.count

    def metric(self, name: str) -> float:
        """One number of /metrics."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return float(
            next(line.split()[-1] for line in lines if line.startswith(f"sixfold_{name} "))
        )


def slowed(seconds: float) -> Callable[[Engine], None]:
    """A `prepare` for `running` that makes each step of the engine longer by `seconds`."""

    def prepare(engine: Engine) -> None:
        step = engine.step

        def slower() -> list[Sequence]:
            time.sleep(seconds)
            return step()

        engine.step = slower  # type: ignore[method-assign]

    return prepare


@contextmanager
def running(
    policy: Policy, prepare: Callable[[Engine], None] = lambda engine: None, **changes: object
) -> Iterator[Running]:
    """A server with these options, ended afterwards. prepare: gets the engine before it
    starts.
    """
    served = make_served(copy.copy(policy), replace(OPTIONS, **changes))  # type: ignore[arg-type]
    prepare(served.engine.engine)
    with answering(make_app(served)) as (url, server, thread):
        yield Running(url, served, server, thread)


@contextmanager
def answering(app: ASGIApp) -> Iterator[tuple[str, uvicorn.Server, threading.Thread]]:
    """An application at an address, ended afterwards."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(app, OPTIONS.grace))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive(), "the server did not stop"
