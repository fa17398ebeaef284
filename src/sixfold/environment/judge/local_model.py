"""A local judging model: a child process serves it, and ends with the run."""

from __future__ import annotations

import asyncio
import json

from ...errors import UserError
from ...processes.child import Child, ChildError
from .client import JudgeFailed

SERVER = "sixfold.commands.judge_server"
"""Program of the child. It needs torch, which this package does not import."""
START_S = 600.0
"""Longest time to load the model."""


class LocalModel:
    """A model folder that a child process serves on loopback.

    Args:
        model: a run, a checkpoint, a model folder or a hub id.
        device: device of the model.
    """

    def __init__(self, model: str, device: str) -> None:
        self._start = {"model": model, "device": device}
        self._child: Child | None = None
        self._url = ""
        self._problem = ""
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def start(self) -> None:
        """Start the child without waiting."""
        if self._child is None:
            self._child = Child(SERVER, keeps_output=True)
            self._child.post(json.dumps(self._start).encode())

    async def url(self) -> str:
        """Base URL of the server, as soon as the model is loaded.

        Raises:
            UserError: if the model cannot be loaded.
            JudgeFailed: if the server has ended.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = loop, asyncio.Lock()
        async with self._lock[1]:
            if self._problem:
                raise UserError(self._problem)
            if not self._url:
                self.start()
                await self._loaded()
        assert self._child is not None
        if self._child.process.poll() is not None:
            raise JudgeFailed(
                "the local judge has ended. Its last output:\n" + self._child.last_words()
            )
        return self._url

    async def _loaded(self) -> None:
        assert self._child is not None
        try:
            answer = json.loads(await asyncio.to_thread(self._child.receive, START_S))
            self._url = answer.get("url", "")
            self._problem = answer.get("fatal", "")
        except ChildError as error:
            last = self._child.last_words()
            self._problem = f"the process {error}. Its last output:\n{last}"
        if self._problem:
            self._problem = (
                f"environment.judge.model = '{self._start['model']}': {self._problem}. Set"
                " environment.judge.url if it is a model of an endpoint"
            )
            raise UserError(self._problem)

    def close(self) -> None:
        """End the child. A second call does nothing."""
        child, self._child, self._url = self._child, None, ""
        if child:
            child.close()
