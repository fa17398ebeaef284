"""Job of one side of `switches.py`: some work, of the engine or of the trainer, under some
settings.

A side is a program `switches_engine.py JOB` or `switches_trainer.py JOB`, JOB a file that holds a
`Job` as JSON. It prints lines (`side_process.emit`):

    {"event": "check", ..., "counters": {...}}         the whole work once, not timed
    {"event": "run", "seconds": 8.1, "pause": 0.02}    the same again, timed, `repeats` times
    {"event": "end", "peak_mb": 900}

pause: the longest time between two tokens of a sequence. Counters explain the times. A check has
`tokens` and `logps` (by sample) or `loss` and `norm` (of the gradient).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_job import SHAPE, Profile
from side_process import emit
from tiny_qwen import Shape

SMALL = Shape(vocabulary=96, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)


@dataclass(frozen=True)
class EngineWork:
    """Requests for the engine, all there from the start. Of a profile with a `mean` the engine is
    told the cap alone, as it is in a rollout; the lengths that were drawn end its sequences from
    outside.

    room: tokens that the cache holds, as a share of what everything that may run at once could
    need. running: sequences at once (0: all).
    """

    profile: Profile
    prompts: int
    temperature: float = 1.0
    room: float = 1.0
    running: int = 0

    @property
    def longest(self) -> int:
        """The longest that a sequence may get."""
        return self.profile.shared + self.profile.prompt + self.profile.completion

    def small(self) -> EngineWork:
        """The same at a size that says nothing about speed."""
        p = self.profile
        tiny = Profile(
            -(-p.prompt // 8),
            max(12, p.completion // 8),
            p.shared // 8,
            min(p.samples, 4),
            mean=-(-p.mean // 2),
        )
        return EngineWork(
            tiny, min(self.prompts, 8), self.temperature, self.room, -(-self.running // 4)
        )


@dataclass(frozen=True)
class TrainerWork:
    """One optimizer step a run, on groups of random tokens. Lengths: as of a profile. budget:
    tokens of a micro-batch. vocabulary: of the model.
    """

    profile: Profile
    prompts: int
    budget: int
    vocabulary: int = SHAPE.vocabulary

    def small(self) -> TrainerWork:
        """The same at a size that says nothing about speed, but for a vocabulary that is there to
        be large.
        """
        p = self.profile
        tiny = Profile(-(-p.prompt // 8), p.completion // 2, samples=4, mean=-(-p.mean // 8))
        vocabulary = SMALL.vocabulary if self.vocabulary == SHAPE.vocabulary else self.vocabulary
        return TrainerWork(tiny, 2, self.budget // 8, vocabulary)


@dataclass(frozen=True)
class Job:
    """Job of one side. kind: engine or trainer. model: folder of the model. work: an EngineWork or
    a TrainerWork.
    """

    switch: str
    side: str
    kind: str
    model: str
    work: EngineWork | TrainerWork
    settings: dict[str, Any]
    repeats: int
    threads: int

    @classmethod
    def load(cls, path: str) -> Job:
        """The job in the file at `path`."""
        fields = json.loads(Path(path).read_text())
        work = fields.pop("work")
        profile = Profile(**work.pop("profile"))
        return cls(
            work=(
                EngineWork(profile, **work)
                if fields["kind"] == "engine"
                else TrainerWork(profile, **work)
            ),
            **fields,
        )

    def save(self, path: Path) -> None:
        """Write the file that `load` reads."""
        path.write_text(json.dumps(asdict(self)))


def emit_all(lines: Callable[[Job], Iterable[dict[str, Any]]]) -> None:
    """A side's whole program: its `lines` on the job in the file that it was given."""
    for line in lines(Job.load(sys.argv[1])):
        emit(**line)
