"""The program of a local judge: serves a model on loopback until its parent hangs up.

The first request is JSON with "model" and "device". The answer is {"url": base URL}, or {"fatal":
message} if the model cannot be served.
"""

from __future__ import annotations

import json
import threading

import uvicorn

from ..errors import UserError
from ..processes.program import Requests
from ..run.sampling_model import load_for_sampling
from .serve import ServeOptions, listen, make_served, uvicorn_config

KV_TOKENS, MAX_RUNNING, MAX_QUEUE = 65_536, 32, 4096
END_S = 1
"""Seconds for running requests when the run ends: nobody waits for them."""


def serve(requests: Requests) -> None:
    """Load the model, tell its address, and serve it."""
    asked = json.loads(next(requests))
    try:
        options = ServeOptions(
            asked["model"],
            "127.0.0.1",
            0,
            asked["model"],
            "",
            MAX_QUEUE,
            None,
            1024,
            KV_TOKENS,
            MAX_RUNNING,
            "auto",
            "none",
            "",
            asked["device"],
            END_S,
        )
        listener = listen(options.host, options.port)
        policy = load_for_sampling(
            options.model, options.device, options.precision, "environment.judge.model"
        )
        server = uvicorn.Server(uvicorn_config(make_served(policy, options), options.grace))
    except UserError as error:
        requests.answer(json.dumps({"fatal": str(error)}).encode())
        return
    host, port = listener.getsockname()[:2]

    def end_with_parent() -> None:
        for _ in requests:  # the parent sends nothing more: this ends when it hangs up
            pass
        server.should_exit = True

    requests.answer(json.dumps({"url": f"http://{host}:{port}/v1"}).encode())
    threading.Thread(target=end_with_parent, daemon=True).start()
    server.run(sockets=[listener])
