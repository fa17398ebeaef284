"""A local judging model: a child process serves it, and ends with the run."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import Future

from sixfold.errors import UserError
from sixfold.processes.child import Child, ChildError

from .client import JudgeFailed

SERVER = "sixfold_serving.judge_server"
"""Program of the child. It needs torch, which this package does not import."""
START_S = 600.0
"""Time limit for loading the model, in seconds."""


class LocalModel:
    """Model that a child process serves on a loopback address.

    Args:
        model: a run, a checkpoint, a model folder or a hub id.
    """

    def __init__(self, model: str, device: str) -> None:
        self._model = model
        self._device = device
        self._child: Child | None = None
        self._url: Future[str] = Future()

    def start(self) -> None:
        """Start the child without waiting. A second call does nothing."""
        if self._child is not None:
            return
        child = self._child = Child(SERVER, keeps_output=True)
        child.post(json.dumps({"model": self._model, "device": self._device}).encode())
        url: Future[str] = Future()
        self._url = url
        # A running future ignores the cancellation of a question that waits for it. The thread
        # reads the child's only answer, also if that question is cancelled.
        url.set_running_or_notify_cancel()
        threading.Thread(target=self._load, args=(child, url), daemon=True).start()

    async def url(self) -> str:
        """Base URL of the server. Waits until the model is loaded.

        Raises:
            UserError: if the model cannot be loaded.
            JudgeFailed: if the server has ended.
        """
        self.start()
        child = self._child
        assert child is not None
        url = await asyncio.wrap_future(self._url)
        if child.closed:
            raise JudgeFailed("the local judge was closed")
        if child.process.poll() is not None:
            raise JudgeFailed(f"the local judge has ended. Its last output:\n{child.last_words()}")
        return url

    def close(self) -> None:
        """End the child. A second call does nothing."""
        child, self._child = self._child, None
        if child:
            child.close()

    def _load(self, child: Child, url: Future[str]) -> None:
        """Set the base URL, or the error if the model cannot be loaded."""
        try:
            url.set_result(self._address(child))
        except Exception as error:  # noqa: BLE001  boundary: the questions that wait raise it
            url.set_exception(error)

    def _address(self, child: Child) -> str:
        """Wait for the answer of the child."""
        try:
            answer = json.loads(child.receive(START_S))
            problem = answer.get("fatal", "")
        except ChildError as error:
            problem = f"the process {error}. Its last output:\n{child.last_words()}"
        if problem:
            raise UserError(
                f"environment.judge.model = '{self._model}': {problem}. If it is a model of an"
                " endpoint, set environment.judge.url"
            )
        return str(answer["url"])
