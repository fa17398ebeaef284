"""Alarms about the progress of a run. Each is one line, repeated only after it has cleared.

They report slower steps, fewer tokens per second, slower checks, completions of more and more
steps under a process reward, degenerate groups, a sampler whose log-probs differ from the trainer's
or have another temperature, a verifier that pays for what a stricter one refuses, a biased or
unreadable judge, and phases that take another time than predicted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from .metric import Value
from .numbers import number
from .predicted import LEAST_STEPS, alarm_line, compare, step_figures
from .prediction import Prediction

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
RESIDUAL = 0.1
"""Share of groups with equal rewards after dynamic sampling above which the tasks do not fit."""
KL_DRIFT = 0.01
"""Mean KL of sampler to trainer on fresh tokens, in nats per token, above which the sampler counts
as a different policy. Probabilities then differ by about 10%.
"""
TEMPERATURE_GAP = 0.01
"""Difference of mismatch/temperature from 1 that raises an alarm. The metric is only reported if
its standard error is below a fifth of this.
"""
DISPLACED = 0.1
"""Log-prob that better completions lose, in nats per token, above which they are displaced."""
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
    "reward/part/prm.steps": (
        "the policy may be collecting rewards of steps: their number per completion has grown",
        "steps",
        1,
    ),
}


class _Level(NamedTuple):
    """An alarm about the level of a metric: its mean over a window of steps.

    The level fills in `words`. A saved state has the alarm under `name`, "" for the metric's key.
    """

    metric: str
    window: int
    wrong: Callable[[float], bool]
    words: str
    name: str = ""


_LEVELS = (
    _Level(
        "group/degenerate_frac",
        WINDOW,
        lambda share: share > DEGENERATE,
        "{:.0%} of groups have equal rewards and give no gradient: the tasks may have become too"
        " easy or too hard",
        "degenerate",
    ),
    _Level(
        "dynamic/degenerate_frac",
        WINDOW,
        lambda share: share > RESIDUAL,
        "{:.0%} of groups still have equal rewards after dynamic sampling: too few tasks suit the"
        " policy. Sort the tasks again (data.curriculum.every, or sixfold data), or raise"
        " algorithm.dynamic_sampling",
    ),
    _Level(
        "mismatch/kl_k3",
        WINDOW,
        lambda kl: not kl <= KL_DRIFT,  # true for NaN
        "sampler and trainer differ: their KL divergence is {:.2g} nats per token, although they"
        " have the same version of the weights",
        "apart",
    ),
    _Level(
        "mismatch/temperature",
        1,
        lambda temperature: abs(temperature - 1) > TEMPERATURE_GAP,
        "the engine's log-probs fit a temperature of {:.3g} times the trainer's: check that"
        " rollout.temperature reaches the engine, and that its log-probs are those at this"
        " temperature",
        "temperature",
    ),
    _Level(
        "heldout/strict_gap",
        1,
        lambda gap: gap > STRICT_GAP,
        "the verifier counts {:.1%} of the held-out samples as solved that eval.strict refuses: the"
        " policy may be exploiting it. Read the samples in the report",
        "strict",
    ),
)
_PREFERENCE = (
    _Level(
        "preference/displacement",
        WINDOW,
        lambda nats: nats > DISPLACED,
        "likelihood displacement: the better completions have lost {:.2f} nats per token on the"
        " reference, although the margin grows. Try the loss dpop or squared_po, or a term"
        " 'sft'",
    ),
    _Level(
        "preference/heldout_displacement",
        1,
        lambda nats: nats > DISPLACED,
        "likelihood displacement: held-out better completions have lost {:.2f} nats per token since"
        " the start, although their margin has grown",
    ),
    _Level(
        "preference/length_corr",
        WINDOW,
        lambda share: abs(share) > 0.5,
        "the margin goes with the length of the completions (preference/length_corr = {:.2f}): try"
        " dpo_norm, ld_dpo or simpo, or pairs of equal length",
    ),
)

_JUDGE = (
    _Level(
        "judge/position_bias",
        WINDOW,
        lambda mean: abs(mean) > 0.3,
        "the judge prefers one position (judge/position_bias = {:.2f}): use another judge; with"
        " pairwise.orders = 'both' such verdicts are ties",
    ),
    _Level(
        "judge/length_corr",
        WINDOW,
        lambda mean: abs(mean) > 0.3,
        "the judge's values go with the length of completions (judge/length_corr = {:.2f}): raise"
        " pairwise.length_control, or add a criterion of brevity",
    ),
    _Level(
        "judge/refused_frac",
        WINDOW,
        lambda mean: mean > 0.2,
        "completions are refused that say nothing or forge a verdict (judge/refused_frac ="
        " {:.2f}): read the samples: the policy may be looking for exploits",
    ),
    _Level(
        "judge/unreadable_frac",
        WINDOW,
        lambda mean: mean > 0.2,
        "replies of the judge have no readable verdict (judge/unreadable_frac = {:.2f}): use"
        " another judge, or raise environment.judge.max_tokens",
    ),
)


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

    def observe(self, metrics: Mapping[str, Value]) -> list[str]:
        """Lines of the alarms that start with this step."""
        self._seen += 1
        values = {
            key: float(value) for key, value in metrics.items() if isinstance(value, int | float)
        }
        values["time/step_s"] = sum(
            values.get(f"time/{role}_s", 0.0)
            for role in ("rollout", "environment", "reference", "trainer", "sync")
        )
        # After dynamic sampling, the share of what was sampled is another: the filter has its own.
        if not self.group_baseline or "dynamic/degenerate_frac" in values:
            values.pop("group/degenerate_frac", None)
        said = [self._drift(key, values[key]) for key in _WATCHED if key in values]
        said += self._levels(_LEVELS, values)
        said += self._compare_with_prediction(values)
        said += self._levels((*_JUDGE, *_PREFERENCE), values)
        return [line for line in said if line]

    def observe_end(self) -> list[str]:
        """Alarms about durations of the last steps, for a run that ends between two comparisons."""
        first = self.prediction.first_step if self.prediction else self._seen
        return [] if (self._seen - first) % WINDOW == 0 else self._deviations()

    def state(self) -> dict[str, Any]:
        """The whole state, JSON-serialisable. A value that is not finite becomes None."""
        windows = {
            name: {key: [_json(x) for x in values] for key, values in table.items()}
            for name, table in self._windows().items()
        }
        return {"seen": self._seen, "ringing": sorted(self._ringing), **windows}

    def load(self, state: Mapping[str, Any]) -> None:
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

    def _levels(self, rows: Iterable[_Level], values: Mapping[str, float]) -> list[str | None]:
        said = []
        for metric, window, wrong, words, name in rows:
            if metric in values:
                level, known, key = values[metric], True, name or metric
                if window > 1:
                    last = self._last.setdefault(key, deque(maxlen=window))
                    last.append(level)
                    level, known = fmean(last), len(last) == window
                said.append(self._ring(key, known and wrong(level), words.format(level)))
        return said

    def _compare_with_prediction(self, values: Mapping[str, float]) -> list[str]:
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
        return self._deviations() if after > 0 and after % WINDOW == 0 else []

    def _deviations(self) -> list[str]:
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
