"""Jobs whose prompts are being scored, a piece at a time between two steps of the engine."""

from __future__ import annotations

from collections.abc import Iterator

from ..engine.engine import Engine
from ..engine.scoring import PromptScore
from .job import Job


class ScoringQueue:
    """First come, first served. For the engine's thread alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: list[Job] = []
        self._pieces: Iterator[PromptScore | None] | None = None
        self._version = 0

    @property
    def busy(self) -> bool:
        """True while a job waits."""
        return bool(self._jobs)

    @property
    def jobs(self) -> list[Job]:
        """Those that wait."""
        return list(self._jobs)

    def add(self, job: Job) -> None:
        """Score the job's prompts when its turn comes."""
        self._jobs.append(job)

    def step(self) -> Job | None:
        """Compute the next piece. Gives back the job that it completes, with its `scores`."""
        if not self._jobs:
            return None
        job = self._jobs[0]
        if self._pieces is None or self._version != self._engine.version:  # scores of one job are of one version
            job.scores.clear()
            self._pieces = self._engine.score(job.prompts, job.params.temperature, job.params.top_logprobs, job.adapter)
            self._version = self._engine.version
        score = next(self._pieces)
        if score is not None:
            job.scores.append(score)
        if len(job.scores) < len(job.prompts):
            return None
        self._pieces = None
        return self._jobs.pop(0)

    def drop(self, job: Job) -> bool:
        """Forget a job. False if it is not here."""
        if job not in self._jobs:
            return False
        if job is self._jobs[0]:
            self._pieces = None
        self._jobs.remove(job)
        return True
