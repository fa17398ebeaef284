"""Busy share of every role, measured in all topologies in the same way."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..backends.samplers import Samplers
from ..batch import Metrics, number
from ..rollout.engine_generator import EngineGenerator
from ..rollout.generator import Activity, Generator
from ..rollout.scheduled import ScheduledGenerator
from ..timeline import Timeline

_TRAINS = ("batch", "reference", "algorithm", "trainer")


class RoleMeter:
    """Measures from the end of one weight sync to the end of the next.

    A sampler is measured between two reports of its own. Those of a process come with its replies,
    the last of them during the sync.

    Args:
        generator: samples. Of vLLM and of servers nothing is known.
        timeline: knows how long checks were open. It gets the weight loads of processes.
    """

    def __init__(self, generator: Generator, timeline: Timeline) -> None:
        self._generator = generator
        self._timeline = timeline
        self._began = time.perf_counter()
        self._checks_s = timeline.environment.seconds(self._began)
        self._before = dict(enumerate(_activities(generator)))

    def metrics(self, measured: Metrics) -> Metrics:
        """Metrics since the last call.

        Args:
            measured: seconds of the roles in the step that ends.
        """
        now = time.perf_counter()
        seconds, self._began = max(now - self._began, 1e-9), now
        checks_s = self._timeline.environment.seconds(now)
        found: Metrics = {
            "busy/trainer_frac": sum(number(measured, f"time/{r}_s") for r in _TRAINS) / seconds,
            "busy/sync_frac": number(measured, "time/sync_s") / seconds,
            "busy/environment_frac": (checks_s - self._checks_s) / seconds,
        }
        self._checks_s = checks_s
        pauses = []
        for sampler, current in enumerate(_activities(self._generator)):
            before, self._before[sampler] = self._before.get(sampler), current
            if current is None:
                continue
            if before is None or before.made != current.made:  # the process was replaced
                before = Activity(current.made, current.made)
            if (passed := current.at - before.at) > 0:
                share = (current.busy_s - before.busy_s) / passed
                found[f"busy/sampler_frac/{sampler}"] = share
                found[f"sampler/tok_s/{sampler}"] = (current.tokens - before.tokens) / passed
            if current.loaded != before.loaded:
                self._timeline.add(f"sampler {sampler}", "weight load", *current.loaded)
                pauses.append(current.loaded[1] - current.loaded[0])
        return found | ({"sync/pause_s": max(pauses)} if pauses else {})


def _activities(generator: Generator) -> Sequence[Activity | None]:
    if isinstance(generator, EngineGenerator | ScheduledGenerator | Samplers):
        return generator.activities()
    return ()
