"""Queue of jobs whose prompts are scored. One piece is computed between two engine steps."""

from __future__ import annotations

from collections.abc import Iterator

from ..engine.engine import Engine
from ..engine.scoring import PromptScore
from .engine_job import Job


class ScoringQueue:
    """First-in, first-out queue of jobs to score. Used only by the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: list[Job] = []
        self._pieces: Iterator[PromptScore | None] | None = None
        self._version = 0

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @property
    def jobs(self) -> list[Job]:
        """The jobs in the queue, including the one that is being scored."""
        return list(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def step(self) -> Job | None:
        """Compute the next piece. Returns the job if that completes its `scores`, else None."""
        if not self._jobs:
            return None
        job = self._jobs[0]
        # Start again if the weights changed: all scores of a job must be of one weight version.
        if self._pieces is None or self._version != self._engine.version:
            job.scores.clear()
            self._pieces = self._engine.score(
                job.prompts, job.params.temperature, job.params.top_logprobs, job.adapter
            )
            self._version = self._engine.version
        score = next(self._pieces)
        if score is not None:
            job.scores.append(score)
        if len(job.scores) < len(job.prompts):
            return None
        self._pieces = None
        return self._jobs.pop(0)

    def drop(self, job: Job) -> bool:
        """Remove a job. Returns False if it is not in the queue."""
        if job not in self._jobs:
            return False
        if job is self._jobs[0]:
            self._pieces = None
        self._jobs.remove(job)
        return True
