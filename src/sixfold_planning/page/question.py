"""The question of `sixfold plan --html`: what the user asked, and which other values to show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean as mean

from sixfold.pages.combinations import Words
from sixfold.pages.lab import Control, Setting
from sixfold.pages.text import written

from ..hardware import TABLE, Accelerator, Cluster
from ..planned_work import Inputs
from .inputs import rates_of, read_inputs

PROMPTS, SAMPLES = "rollout.prompts_per_step", "rollout.samples_per_prompt"
OTHERS = 5
"""Accelerators of the page besides the given one."""
STEPS, MORE_STEPS = 3, 5
"""Positions of a slider that doubles its value: with several accelerators, and with one."""


@dataclass(frozen=True)
class PlanQuestion:
    """What the user asked, and how an answer is asked for on the command line.

    Attributes:
        target: recipe or model, as for `read_inputs`.
        flags: settings that change the recipe.
        hardware: file that describes the device, or "".
        mean_tokens: mean length of completions. None: half of the bound.
        pass_rate: share of correct samples. None: as for `rates_of`.
        variation: coefficient of variation of the lengths in a group.
    """

    target: str
    flags: Sequence[str]
    cluster: Cluster
    hardware: str
    mean_tokens: float | None
    pass_rate: float | None
    variation: float

    @cached_property
    def inputs(self) -> Inputs:
        """The question as given.

        Raises:
            UserError: if the target is unknown.
        """
        return read_inputs(self.target, self.flags, mean_tokens=self.mean_tokens)

    @property
    def rates(self) -> tuple[float, ...]:
        """Pass rates of tasks, or one for all."""
        return rates_of(self.inputs, self.pass_rate)

    @property
    def rate(self) -> float:
        """Mean pass rate."""
        return mean(self.rates)

    @property
    def settings(self) -> dict[str, Setting]:
        """Value of every control as given."""
        work = self.inputs.work
        return {
            "accelerator": self.cluster.device.name,
            "devices": self.cluster.count,
            "prompts": work.prompts,
            "samples": work.samples,
            "length": work.mean_tokens,
            "variation": self.variation,
            "pass_rate": self.rate,
        }

    def changed_flags(self, prompts: int, samples: int) -> list[str]:
        """Settings with these prompts and samples per step."""
        work, flags = self.inputs.work, list(self.flags)
        for key, value, given in (
            (PROMPTS, prompts, work.prompts),
            (SAMPLES, samples, work.samples),
        ):
            if value != given:
                flags = [*_without(flags, key), f"--{key}", str(value)]
        return flags

    @property
    def words(self) -> tuple[Words, ...]:
        """Parts of the command that prints the answer at given positions of the controls."""
        own = self.settings

        def model(*, prompts: int, samples: int) -> str:
            words = ["sixfold", "plan", self.target, *self.changed_flags(prompts, samples)]
            return shlex.join(words)

        def devices(*, accelerator: str, devices: int) -> str:
            words = ["--hardware", self.hardware]
            return shlex.join(words if self.hardware else ["--gpus", f"{devices}x{accelerator}"])

        def mean(*, length: float) -> str:
            given = self.mean_tokens is not None or length != own["length"]
            return f"--length {written(length)}" if given else ""

        def solved(*, pass_rate: float) -> str:
            profiled = self.pass_rate is None and self.inputs.rates
            own_rates = profiled and pass_rate == own["pass_rate"]
            return "" if own_rates else f"--pass-rate {written(pass_rate)}"

        def note(*, devices: int) -> str:
            changed = self.hardware and devices != own["devices"]
            return f" # with count = {devices} in the file" if changed else ""

        return (
            Words(("prompts", "samples"), model),
            Words(("accelerator", "devices"), devices),
            Words(("length",), mean),
            Words(("variation",), lambda variation: f"--variation {written(variation)}"),
            Words(("pass_rate",), solved),
            Words(("devices",), note),
        )

    def devices(self, accelerator: str, count: int) -> Cluster:
        """Devices at these positions of the controls."""
        own = self.cluster.device
        return Cluster(own if accelerator == own.name else TABLE[accelerator], count)


def controls(question: PlanQuestion) -> tuple[Control, ...]:
    """Sliders and choices of the page, with the values that they show.

    The page has every combination of the first five, so there are fewer positions of each if there
    are many accelerators.
    """
    work, device = question.inputs.work, question.cluster.device
    bound = work.longest_tokens
    steps = MORE_STEPS if question.hardware else STEPS
    mean = work.mean_tokens
    lengths = {float(max(1, round(mean / 2))), mean, float(round((mean + bound) / 2))}
    return (
        _accelerators(device, alone=bool(question.hardware)),
        _doubling("devices", question.cluster.count, "number of devices", steps),
        _doubling("prompts", work.prompts, "prompts per step", steps),
        _doubling("samples", work.samples, "samples per prompt", steps),
        Control(
            "length",
            work.mean_tokens,
            f"mean tokens of a completion, at most {bound:,.0f}",
            unit="tokens",
            low=0,
            high=bound,
            sweep=tuple(sorted(lengths)),
        ),
        Control(
            "variation",
            question.variation,
            "standard deviation of the lengths of a group divided by their mean",
            low=0,
            high=1e9,
            sweep=(0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0),
        ),
        Control(
            "pass_rate",
            question.rate,
            "share of correct samples",
            low=0,
            high=1,
            sweep=(0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98),
        ),
    )


def _accelerators(given: Accelerator, *, alone: bool) -> Control:
    """Choice of the accelerator: the given one, and others unless a file describes it."""
    if alone:
        return Control("accelerator", given.name, "the device of the file", choices=(given.name,))

    def distance(name: str) -> float:
        return abs(math.log(TABLE[name].bandwidth_gb_s / given.bandwidth_gb_s))

    # Sixfold does not run on TPUs.
    listed = [name for name, one in TABLE.items() if one.price_per_hour and name[:3] != "TPU"]
    near = sorted((name for name in listed if name != given.name), key=distance)[:OTHERS]
    return Control(
        "accelerator",
        given.name,
        "the given one, and GPUs with a price and the nearest bandwidths of memory",
        choices=tuple(name for name in TABLE if name == given.name or name in near),
    )


def _doubling(name: str, value: int, about: str, steps: int) -> Control:
    """Control over halves and doubles of a value, `steps` in all, and more doubles than halves."""
    lowest = value
    for _ in range((steps - 1) // 2):
        lowest = lowest // 2 if lowest % 2 == 0 else lowest
    sweep = sorted({value, *(lowest << step for step in range(steps))})
    return Control(name, value, about, low=1, high=sweep[-1], sweep=tuple(sweep))


def _without(flags: Sequence[str], key: str) -> list[str]:
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        name, equals, _ = word.partition("=")
        value = [] if equals else [text for text in [next(words, None)] if text is not None]
        if name != f"--{key}":
            kept += [word, *value]
    return kept
