"""Reward models in a process of their own (`worker.py`), which ends with the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from ..environment.own_thread import OwnThread
from ..errors import RunFailed, UserError
from ..processes.child import Child, ChildEnded, ChildSilent, RequestFailed
from ..processes.deadline import Deadline
from ..recipe.schema import RewardScoringConfig
from .asked import Asked

START_S = 600.0
"""Longest wait until the models are loaded, in seconds."""


class NotScored(RuntimeError):
    """The models gave no reward for these completions, so their check has failed."""


class WorkerModels:
    """Client of the process. It answers one task after the other.

    The rewards are those of models in the process of the run: on a CPU they have as many threads.

    Args:
        paths: model folders or hub ids.
        config: the recipe's [environment.reward_model] section.
    """

    def __init__(self, paths: Sequence[str], config: RewardScoringConfig) -> None:
        self._paths, self._config = paths, config
        self._deadline = Deadline(
            "the process of the reward models",
            config.timeout_s,
            "If they need that long, raise environment.reward_model.timeout_s",
        )
        self._child: Child | None = None
        self._loaded = False
        self._thread = OwnThread()
        self._closed = False
        self._calls = threading.Lock()  # held while a call uses the descriptors of the process

    def start(self) -> None:
        """Start the process without waiting. A second call does nothing."""
        if self._child is None:
            threads = torch.get_num_threads()
            self._child = Child(
                "sixfold.reward_model.worker",
                environment={"OMP_NUM_THREADS": str(threads)},
                keeps_output=True,
            )
            config = self._config.model_dump(mode="json") | {"placement": "inline"}
            setup = {"paths": [*self._paths], "config": config, "threads": threads}
            self._child.post(json.dumps(setup).encode())

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._closed = True
        self._thread.end()
        if self._child:
            if self._calls.locked():  # a call waits for the answer of the process
                self._child.process.terminate()
            with self._calls:
                self._child.close()

    async def rewards(self, asked: Asked) -> list[Tensor]:
        """[K] rewards by each model, float64.

        Raises:
            UserError: if the models cannot be loaded.
            NotScored: if these completions cannot be scored.
            RunFailed: if the process has ended, or is silent for too long.
        """
        # One thread asks: a call that is cancelled must not leave its answer to the next.
        return await self._thread.call(self._rewards, asked)

    def _rewards(self, asked: Asked) -> list[Tensor]:
        with self._calls:
            if self._closed:
                raise RunFailed("the process of the reward models is closed")
            self.start()
            if not self._loaded:
                if problem := self._answer(START_S).get("problem"):
                    raise UserError(problem)
                self._loaded = True
            answer = self._answer(self._deadline.seconds, json.dumps(asdict(asked)).encode())
        if problem := answer.get("problem"):
            raise NotScored(problem)
        return [torch.tensor(values, dtype=torch.float64) for values in answer["rewards"]]

    def _answer(self, seconds: float, request: bytes = b"") -> dict[str, list[list[float]]]:
        """The next answer, of a request if one is given.

        Args:
            seconds: longest silence.
            request: is sent first. Empty: the answer is owed already.
        """
        child = self._child
        assert child is not None
        if child.closed:  # an earlier call has missed the deadline
            raise self._deadline.missed()
        try:
            if request:
                child.send(request, seconds)
            found: dict[str, list[list[float]]] = json.loads(child.receive(seconds))
        except ChildSilent as error:
            child.close(grace_s=0.0)
            raise self._deadline.missed() from error
        except RequestFailed as error:
            raise NotScored(f"the process of the reward models failed:\n{error}") from error
        except ChildEnded as error:
            raise RunFailed(
                f"the process of the reward models {error}. Its last output:\n"
                f"{child.last_words()}\nSet environment.reward_model.placement = 'inline' to run"
                " without it"
            ) from error
        return found
