"""Program of a local judge: serves a model on a loopback address until its parent ends.

The only request is JSON with "model" and "device". The answer is {"url": base URL}, or
{"fatal": message} if the model cannot be served.
"""

from __future__ import annotations

import json
import threading

import uvicorn

from sixfold.errors import UserError
from sixfold.processes.program import Requests
from sixfold.run.sampling_model import load_for_sampling

from .app import make_app
from .serve import listen, make_served, uvicorn_config
from .verb import ServeOptions

END_S = 1
"""Seconds for running requests when the run ends. Nobody waits for their answers."""


def serve(requests: Requests) -> None:
    """Load the model, answer with its address, and serve it."""
    asked = json.loads(next(requests))
    try:
        options = ServeOptions(
            model=asked["model"],
            name=asked["model"],
            device=asked["device"],
            port=0,
            max_queue=4096,
            kv_tokens=65_536,
            max_running=32,
            grace=END_S,
        )
        listener = listen(options.host, options.port)
        policy = load_for_sampling(
            options.model, options.device, options.precision, "environment.judge.model"
        )
        app = make_app(make_served(policy, options))
        server = uvicorn.Server(uvicorn_config(app, options.grace))
    except UserError as error:
        requests.answer(json.dumps({"fatal": str(error)}).encode())
        return
    host, port = listener.getsockname()[:2]

    def end_with_parent() -> None:
        for _ in requests:  # the parent sends nothing more: this loop ends with the parent
            pass
        server.should_exit = True

    requests.answer(json.dumps({"url": f"http://{host}:{port}/v1"}).encode())
    threading.Thread(target=end_with_parent, daemon=True).start()
    server.run(sockets=[listener])
