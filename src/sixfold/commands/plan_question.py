"""The question of `sixfold plan --html`: what the user asked, and which other values to show."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..labs.lab import Control, Setting
from ..labs.text import written
from ..planning.hardware import TABLE, Cluster
from ..run.planned_work import Inputs
from .plan_inputs import read_inputs

PROMPTS, SAMPLES = "rollout.prompts_per_step", "rollout.samples_per_prompt"
MOST_DEVICES = 1 << 20


@dataclass(frozen=True)
class PlanQuestion:
    """What the user asked, and how an answer is asked for on the command line.

    Attributes:
        target: recipe or model, as for `read_inputs`.
        flags: settings that change the recipe.
        cluster: the devices.
        hardware: file that describes the device, or "".
        mean_tokens: mean length of completions. None: half of the bound.
        pass_rate: share of correct samples.
        variation: coefficient of variation of the lengths in a group.
    """

    target: str
    flags: Sequence[str]
    cluster: Cluster
    hardware: str
    mean_tokens: float | None
    pass_rate: float
    variation: float

    @cached_property
    def inputs(self) -> Inputs:
        """The question as given.

        Raises:
            UserError: if the target is unknown.
        """
        return read_inputs(self.target, self.flags, mean_tokens=self.mean_tokens)

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
            "pass_rate": self.pass_rate,
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

    def command(self, settings: Mapping[str, Setting]) -> str:
        """Command that prints the answer at these positions of the controls."""
        flags = self.changed_flags(int(settings["prompts"]), int(settings["samples"]))
        words = ["sixfold", "plan", self.target, *flags, *self._devices(settings)]
        if self.mean_tokens is not None or settings["length"] != self.settings["length"]:
            words += ["--length", written(settings["length"])]
        words += ["--variation", written(settings["variation"])]
        words += ["--pass-rate", written(settings["pass_rate"])]
        line = " ".join(shlex.quote(word) for word in words)
        if self.hardware and settings["devices"] != self.cluster.count:
            line += f"  # with count = {settings['devices']} in the file"
        return line

    def _devices(self, settings: Mapping[str, Setting]) -> list[str]:
        if self.hardware:
            return ["--hardware", self.hardware]
        return ["--gpus", f"{settings['devices']}x{settings['accelerator']}"]


def controls(question: PlanQuestion) -> tuple[Control, ...]:
    """Sliders and choices of the page, with the values that they show."""
    work, device = question.inputs.work, question.cluster.device
    names = [name for name, listed in TABLE.items() if listed.price_per_hour is not None]
    bound = work.longest_tokens
    lengths = sorted({float(max(1, round(bound * tenth / 10))) for tenth in range(1, 11)})
    accelerators, about = (*names, device.name), "devices with a listed price, and the given one"
    if question.hardware:
        accelerators, about = (device.name,), "the device of the hardware file"
    return (
        Control("accelerator", device.name, about, choices=tuple(dict.fromkeys(accelerators))),
        _doubling("devices", question.cluster.count, "number of devices", MOST_DEVICES, 64),
        _doubling("prompts", work.prompts, "prompts per step", MOST_DEVICES, 8 * work.prompts),
        _doubling("samples", work.samples, "samples per prompt", MOST_DEVICES, 64),
        Control(
            "length",
            work.mean_tokens,
            f"mean tokens of a completion, at most {bound:,.0f}",
            low=0,
            high=bound,
            sweep=tuple(length for length in lengths if length <= bound),
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
            question.pass_rate,
            "share of correct samples",
            low=0,
            high=1,
            sweep=(0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98),
        ),
    )


def _doubling(name: str, value: int, about: str, most: int, reach: int) -> Control:
    """Control over powers of two up to `reach`, or to 4 times the value if that is more."""
    last = min(most, max(reach, 4 * value))
    powers = tuple(1 << power for power in range(last.bit_length()) if 1 << power <= last)
    return Control(name, value, about, low=1, high=max(most, value), sweep=powers[-10:])


def _without(flags: Sequence[str], key: str) -> list[str]:
    """Flags without the one of a setting."""
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        name, equals, _ = word.partition("=")
        value = [] if equals else [text for text in [next(words, None)] if text is not None]
        if name != f"--{key}":
            kept += [word, *value]
    return kept
