"""Alarms about the progress of a run. Each is one line, repeated only after it has cleared.

They report slower steps, fewer tokens per second, slower checks, degenerate groups, a sampler whose
log-probs differ from the trainer's or have another temperature, a verifier that pays for what a
stricter one refuses, a biased or unreadable judge, and phases that take another time than
predicted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from ..planning.prediction import Prediction
from .metric import Value
from .numbers import number, percent
from .predicted import LEAST_STEPS, alarm_line, compare, step_figures

WARM_UP = 5
"""First steps left out of the baseline: caches are filled and memory is mapped."""
BASELINE = 20
WINDOW = 10
CREEP = 0.2
"""Relative change for the worse at which an alarm starts: median of the last WINDOW steps against
median of the BASELINE steps.
"""
NOTICEABLE_S = 1e-3
"""Minimum slowdown in seconds: without it, noise in a check of 5 microseconds would raise an
alarm.
"""
DEGENERATE = 0.5
"""Share of degenerate groups above which most of the sampling is wasted."""
KL_DRIFT = 0.01
"""Mean KL of sampler to trainer on fresh tokens, in nats per token, above which the sampler counts
as a different policy. Probabilities then differ by about 10%.
"""
TEMPERATURE_GAP = 0.01
"""Difference of mismatch/temperature from 1 that raises an alarm. The metric is only reported if
its standard error is below a fifth of this.
"""
STRICT_GAP = 0.05
"""Share of held-out samples that only the usual verifier counts as solved, above which it is
probably exploited.
"""

_PREDICTED = "predicted/"
"""Start of the keys of figures that are compared with the prediction."""

_WATCHED = {
    "time/step_s": ("the duration of a step has grown", "s", 1),
    "rollout/tok_s": ("the sampling speed has fallen", "tokens/s", -1),
    "time/check_p99_s": ("the duration of the slowest 1% of checks has grown", "s", 1),
}


_JUDGE = {
    "judge/position_bias": (
        0.3,
        "the judge prefers one position",
        "use another judge; with pairwise.orders = 'both' such verdicts are ties",
    ),
    "judge/length_corr": (
        0.3,
        "the judge's values go with the length of completions",
        "raise pairwise.length_control, or add a criterion of brevity",
    ),
    "judge/refused_frac": (
        0.2,
        "completions are refused that say nothing or forge a verdict",
        "read the samples: the policy may be looking for exploits",
    ),
    "judge/unreadable_frac": (
        0.2,
        "replies of the judge have no readable verdict",
        "use another judge, or raise environment.judge.max_tokens",
    ),
}
"""Metric of the judge -> absolute mean of WINDOW steps that raises an alarm, problem and remedy."""


@dataclass
class Alarms:
    """Checks every step's metrics. The baseline is the run's first BASELINE steps after WARM_UP.

    Attributes:
        group_baseline: True if a group with equal rewards gives no gradient. Otherwise no alarm
            says so.
        prediction: predicted durations. None: nothing was predicted, and no alarm compares them.
    """

    group_baseline: bool = True
    prediction: Prediction | None = None
    _seen: int = 0
    _first: dict[str, list[float]] = field(default_factory=dict)
    _last: dict[str, deque[float]] = field(default_factory=dict)
    _ringing: set[str] = field(default_factory=set)

    def look(self, metrics: Mapping[str, Value]) -> list[str]:
        """Lines of the alarms that start with this step."""
        self._seen += 1
        values = {
            key: float(value) for key, value in metrics.items() if isinstance(value, int | float)
        }
        values["time/step_s"] = sum(
            values.get(f"time/{role}_s", 0.0)
            for role in ("rollout", "environment", "reference", "trainer", "sync")
        )
        said = [
            line for key in _WATCHED if key in values and (line := self._drift(key, values[key]))
        ]
        if (
            self.group_baseline
            and "group/degenerate_frac" in values
            and (line := self._degenerate(values["group/degenerate_frac"]))
        ):
            said.append(line)
        if "mismatch/kl_k3" in values and (line := self._apart(values["mismatch/kl_k3"])):
            said.append(line)
        if "mismatch/temperature" in values and (
            line := self._tempered(values["mismatch/temperature"])
        ):
            said.append(line)
        if "heldout/strict_gap" in values and (line := self._lenient(values["heldout/strict_gap"])):
            said.append(line)
        said += self._predicted(values)
        return said + [
            line for key in _JUDGE if key in values and (line := self._judged(key, values[key]))
        ]

    def look_at_end(self) -> list[str]:
        """Alarms about durations of the last steps, for a run that ends between two comparisons."""
        first = self.prediction.first_step if self.prediction else self._seen
        return [] if (self._seen - first) % WINDOW == 0 else self._compared()

    def state(self) -> dict[str, Any]:
        """The whole state, JSON-serialisable. A value that is not finite becomes None."""
        windows = {
            name: {key: [_json(x) for x in values] for key, values in table.items()}
            for name, table in self._windows().items()
        }
        return {"seen": self._seen, "ringing": sorted(self._ringing), **windows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._seen, self._ringing = state["seen"], set(state["ringing"])
        self._first = {key: [_number(x) for x in values] for key, values in state["first"].items()}
        self._last = {
            key: deque((_number(x) for x in values), maxlen=WINDOW)
            for key, values in state["last"].items()
        }

    def _windows(self) -> Mapping[str, Mapping[str, Iterable[float]]]:
        return {"first": self._first, "last": self._last}

    def _drift(self, key: str, value: float) -> str | None:
        first, last = (
            self._first.setdefault(key, []),
            self._last.setdefault(key, deque(maxlen=WINDOW)),
        )
        if self._seen <= WARM_UP:
            return None
        if len(first) < BASELINE:
            first.append(value)
            return None
        last.append(value)
        if len(last) < WINDOW or median(first) <= 0:
            return None
        words, unit, sign = _WATCHED[key]
        before, now = median(first), median(last)
        worse = sign * (now / before - 1) > CREEP and (unit != "s" or now - before > NOTICEABLE_S)
        return self._ring(
            key,
            worse,
            f"{words} from {number(before)} to {number(now)} {unit} since the start of the run",
        )

    def _degenerate(self, share: float) -> str | None:
        last = self._last.setdefault("degenerate", deque(maxlen=WINDOW))
        last.append(share)
        high = len(last) == WINDOW and fmean(last) > DEGENERATE
        return self._ring(
            "degenerate",
            high,
            f"{percent(fmean(last), 0)} of groups have equal rewards and give no gradient: the"
            " tasks may have become too easy or too hard",
        )

    def _apart(self, kl: float) -> str | None:
        last = self._last.setdefault("apart", deque(maxlen=WINDOW))
        last.append(kl)
        far = len(last) == WINDOW and not fmean(last) <= KL_DRIFT  # NaN counts as far
        return self._ring(
            "apart",
            far,
            f"sampler and trainer differ: their KL divergence is {fmean(last):.2g} nats per token,"
            " although they have the same version of the weights",
        )

    def _tempered(self, temperature: float) -> str | None:
        return self._ring(
            "temperature",
            abs(temperature - 1) > TEMPERATURE_GAP,
            f"the engine's log-probs fit a temperature of {temperature:.3g} times the trainer's:"
            " check that rollout.temperature reaches the engine, and that its log-probs are those"
            " at this temperature",
        )

    def _lenient(self, gap: float) -> str | None:
        return self._ring(
            "strict",
            gap > STRICT_GAP,
            f"the verifier counts {percent(gap)} of the held-out samples as solved that eval.strict"
            " refuses: the policy may be exploiting it. Read the samples in the report",
        )

    def _judged(self, key: str, value: float) -> str | None:
        last = self._last.setdefault(key, deque(maxlen=WINDOW))
        last.append(value)
        limit, words, remedy = _JUDGE[key]
        mean = fmean(last)
        high = len(last) == WINDOW and abs(mean) > limit
        return self._ring(key, high, f"{words} ({key} = {mean:.2f}): {remedy}")

    def _predicted(self, values: Mapping[str, float]) -> list[str]:
        """Compare the last WINDOW steps with the prediction, once in WINDOW steps.

        The first step of a prediction does not count: caches are filled and kernels are compiled.
        """
        if self.prediction is None:
            return []
        after = self._seen - self.prediction.first_step
        for key, value in step_figures(values).items():
            last = self._last.setdefault(f"{_PREDICTED}{key}", deque(maxlen=WINDOW))
            if after > 0:
                last.append(value)
            else:
                last.clear()  # what another machine measured before a resume
        return self._compared() if after > 0 and after % WINDOW == 0 else []

    def _compared(self) -> list[str]:
        windows = {
            key.removeprefix(_PREDICTED): values
            for key, values in self._last.items()
            if key.startswith(_PREDICTED)
        }
        steps = [
            dict(zip(windows, row, strict=True)) for row in zip(*windows.values(), strict=True)
        ]
        if self.prediction is None or len(steps) < LEAST_STEPS:
            return []
        found = compare(self.prediction, steps)
        lines = [
            self._ring(
                _PREDICTED + phase.name, phase.deviates, alarm_line(phase, found, len(steps))
            )
            for phase in found.phases
        ]
        return [line for line in lines if line]

    def _ring(self, key: str, wrong: bool, line: str) -> str | None:
        new = wrong and key not in self._ringing
        if wrong:
            self._ringing.add(key)
        else:
            self._ringing.discard(key)
        return line if new else None


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value
