"""A process with the embedded engine: the parent's side of `run/sampler_worker.py`."""

from __future__ import annotations

import pickle

from ..processes.child import Child, ChildEnded, ChildError, ChildSilent, last_lines
from ..rollout.generator import EngineLost
from .linked_sampler import LinkedSampler


class SamplerProcess(LinkedSampler):
    """A process that samples. It starts at once; `ready` waits for it.

    Args:
        number: its number, for messages.
        program: module that it runs.
        setup: its first request: the engine that it builds.
        threads: its CPU threads.
        silence_s: longest time without a heartbeat, in seconds.
        gpus: CUDA_VISIBLE_DEVICES of the process. None: those of this one.

    Attributes:
        given: the file with its weights. None before the first `swap`.
        child: the process.
    """

    def __init__(
        self,
        number: int,
        program: str,
        setup: object,
        threads: int,
        silence_s: float,
        gpus: str | None = None,
    ) -> None:
        super().__init__(f"sampler {number}", silence_s)
        self.given: str | None = None
        self._staged: str | None = None
        self.child = Child(
            program,
            environment={
                "OMP_NUM_THREADS": str(threads),
                **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
            },
            keeps_output=True,
        )
        self._setup: bytes | None = pickle.dumps(setup)

    def ready(self) -> None:
        """Wait until the engine is built.

        Raises:
            EngineLost: it was not.
        """
        if self._link is not None or self._setup is None:
            return
        setup, self._setup = self._setup, None
        try:
            self.child.send(setup, self._silence_s)
            self.child.receive(self._silence_s)
        except ChildError as error:
            lost = self._lost(error)  # before `close`: it reads the last output
            self.child.close(grace_s=0.0)
            raise lost from error
        self._connect(self.child)

    async def stage(self, given: str, version: int) -> None:
        """As `Sampler.stage`, of a file with the names of the policy's parameters."""
        await self._ask("stage", {"path": given, "version": version})
        self._staged = given

    async def swap(self, version: int) -> int:
        running = (await self._ask("swap", {"version": version}))["running"]
        self.given = self._staged
        return int(running)

    def close(self) -> None:
        """End the process. Calls that are waiting raise GeneratorClosed."""
        if self._link is None:
            self.child.close(grace_s=0.0)
        else:
            self._link.close()

    def _lost(self, error: ChildError) -> EngineLost:
        last = f"Its last output:\n{self.child.last_words()}"
        if isinstance(error, ChildEnded):
            return EngineLost(f"the process of {self._name} {error}. {last}")
        if isinstance(error, ChildSilent):
            return EngineLost(f"the process of {self._name}: {error}. {last}")
        return EngineLost(f"{self._name} failed:\n{last_lines(str(error))}")
