"""Convert settings of TRL, verl or OpenRLHF into those of a recipe. No torch.

Numbers and sizes come from the tables (`settings.py`). The algorithm is the one whose own settings
in the framework (`Framework.answers`) differ least from the given ones, so both directions have one
mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sixfold.algorithm.method import ADVANTAGES, CORRECTION_BANDS, LOSSES, Method
from sixfold.algorithm.zoo import ZOO
from sixfold.errors import UserError, nearest

from . import FRAMEWORKS, openrlhf, trl, verl_overrides
from .answer import AT_ONE, Run, Sizes
from .settings import ours, table
from .trl_preference import DEFAULTS
from .trl_stages import Trainer, named_trainer, read_adapter, read_stage, trainers

_COUNTS = frozenset(
    (
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"),
        *("max_length", "max_completion_length", "num_generations", "num_iterations"),
        *("steps_per_generation", "generation_batch_size"),
    )
)
_NUMBERS = _COUNTS | frozenset(
    (
        *("num_train_epochs", "warmup_steps", "warmup_ratio", "label_smoothing", "rpo_alpha"),
        *("lora_dropout", "beta", "epsilon", "epsilon_high", "delta", "entropy_coef"),
    )
)
_MAY_BE_NULL = ("max_length", "epsilon_high", "delta")
"""Numbers that null switches off."""
READERS = {"verl": verl_overrides.read, "openrlhf": openrlhf.read}

CHOICES: dict[str, tuple[object, ...]] = {
    "advantage": tuple(ADVANTAGES),
    "loss": tuple(LOSSES),
    "aggregation": ("token", "sequence", "sequence-sum", "constant", "prompt"),
    "kl": ("k1", "k2", "k3", "k3+", "k3-unbiased"),
    "kl_in": ("loss", "reward"),
    "correction": tuple(CORRECTION_BANDS),
    "entropy_rule": ("none", "clip-cov", "kl-cov", "top-entropy"),
    "length_penalty": ("none", "stop-properly"),
    "dynamic_sampling": (0, ZOO["dapo"].dynamic_sampling),
}
"""Choices of a method that are varied to match the given settings."""


@dataclass(frozen=True)
class Imported:
    """A recipe made from another framework's settings.

    Attributes:
        settings: values by the recipe's keys.
        notes: what has no counterpart, or another meaning.
        kind: kind of the stage that they are for. Empty: RL, in a recipe without stages.
    """

    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    kind: str = ""


def import_settings(
    framework: str, given: Mapping[str, Any], processes: int = 1, trainer: str = ""
) -> Imported:
    """Convert a framework's settings.

    Args:
        framework: "trl", "verl" or "openrlhf".
        given: settings by name. The framework's defaults hold for the others.
        processes: processes of the training, for batch sizes that count per process.
        trainer: trainer of TRL, by the name of its command. Empty: that which has such settings.

    Raises:
        UserError: if several trainers may have these settings, or a value is not a number.
    """
    if framework == "trl":
        given = _checked(given)
        trainer = trainer or named_trainer(given)
        if trainer in trainers():
            return _stage(trainers()[trainer], given, processes)
        if trainer not in ("", *trl.ENTRIES):
            raise UserError(
                f"'{trainer}' has no conversion. Write a stage of kind {trainer}; those of"
                f" {', '.join((*trl.ENTRIES, *trainers()))} are converted"
            )
    known = table(framework)
    given = {known.today(name): value for name, value in given.items()}
    found, notes = ours(known, given)
    if framework == "trl":
        run = trl.read(given, processes, trl.ENTRIES.get(trainer, ""))
    else:
        run = READERS[framework](given, processes)
    found |= run.settings
    sizes = Sizes(
        int(found["rollout.prompts_per_step"]),
        int(found["rollout.samples_per_prompt"]),
        int(found["rollout.max_new_tokens"]),
    )
    matched = _Match(framework, run, sizes)
    method = matched.method()
    own = ZOO[method.name]
    found["algorithm.name"] = method.name
    found |= {
        f"algorithm.{one.name}": getattr(method, one.name)
        for one in fields(method)
        if getattr(method, one.name) != getattr(own, one.name)
    }
    if not method.needs_critic:
        found = {key: value for key, value in found.items() if not key.startswith("critic.")}
    if framework == "trl":
        adapter, more = read_adapter(given)
        found |= adapter if adapter else {"model.lora.rank": 0}
        notes += more
    if not found.get("model.lora.rank"):
        found = {key: value for key, value in found.items() if not key.startswith("model.lora.")}
    notes += [*run.notes, *matched.notes(method)]
    read = known.same.keys() | known.read | matched.keys
    notes += [_left(name, value, known.names) for name, value in given.items() if name not in read]
    return Imported(found, tuple(notes))


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of TRL without numbers that are null, which stand for defaults."""
    found = dict(given)
    for name in _NUMBERS & given.keys():
        value = given[name]
        if value is None and name not in _MAY_BE_NULL:
            del found[name]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name} = {value!r}: expected a number")
        if name in _COUNTS and value != int(value):
            raise UserError(f"{name} = {value!r}: expected a whole number")
        found[name] = int(value) if name in _COUNTS else value
    return found


def _stage(trainer: Trainer, given: Mapping[str, Any], processes: int) -> Imported:
    known = trainer.table
    given = {
        known.today(name): value
        for name, value in given.items()
        if value is not None or name == "max_length"  # without a limit
    }
    found, notes = read_stage(trainer, given, processes)
    own = DEFAULTS.get(trainer.config, {})
    notes += [
        _left(key, value, known.names)
        for key, value in given.items()
        if key not in known.same.keys() | known.read and (key not in own or value != own[key])
    ]
    return Imported(found, tuple(notes), trainer.section)


def _left(name: str, value: Any, names: frozenset[str]) -> str:
    if name.lstrip("+~") in names:
        return f"{name} = {value!r} has no counterpart"
    return f"{name} = {value!r} is unknown.{nearest(name, sorted(names))}"


class _Match:
    """Finds the method whose settings in a framework are nearest to the given ones."""

    def __init__(self, framework: str, run: Run, sizes: Sizes) -> None:
        self._peer = FRAMEWORKS[framework]
        self._read = table(framework).read
        self._run = run
        self._sizes = sizes
        self._given = {**self._peer.defaults[run.entry], **run.choices}
        self._rows = [row for row in ZOO.values() if self._peer.entry(row) == run.entry]
        self.keys = {key for row in self._rows for key in self._settings(row)[0]}
        self.keys |= self._given.keys()

    def method(self) -> Method:
        """The nearest method, with the given numbers. Among equals, the nearest to its row."""
        return min(map(self._improve, self._rows), key=lambda m: (self._misses(m), _changes(m)))

    def _improve(self, row: Method) -> Method:
        """The row with the given numbers, and with choices changed where that is nearer."""
        best = self._with_numbers(row)
        for name, options in CHOICES.items():
            changed: list[dict[str, Any]] = [{name: option} for option in options]
            others = [self._with_numbers(replace(best, **choice)) for choice in changed]
            other = min(others, key=self._misses)
            best = other if self._misses(other) < self._misses(best) else best
        return best

    def notes(self, method: Method) -> Iterator[str]:
        """What the nearest method leaves different, and what its conversion back reports."""
        settings, lacks = self._settings(method)
        for key in self._differences(settings):
            has = settings.get(key, self._peer.defaults[self._run.entry].get(key))
            yield (
                f"{key} = {self._given[key]!r} has no counterpart: the nearest algorithm"
                f" ({method.name}) has {has!r}"
            )
        yield from lacks

    def _with_numbers(self, method: Method) -> Method:
        """The method with the given numbers, where its choices have such a number."""
        kept = self._run.numbers
        if LOSSES[method.loss].clips is None:
            kept = {k: v for k, v in kept.items() if not k.startswith("clip_")}
        if method.loss != "clipped_surrogate":
            kept = {k: v for k, v in kept.items() if k != "dual_clip"}
        if not method.needs_critic:
            kept = {k: v for k, v in kept.items() if k not in ("lam", "value_clip")}
        if method.correction == "none":
            kept = {k: v for k, v in kept.items() if not k.startswith("correction_")}
        return replace(method, **kept)

    def _settings(self, method: Method) -> tuple[dict[str, object], list[str]]:
        """Settings of a method's choices, without sizes, and what they do not give."""
        answers = list(self._peer.answers(method, self._sizes))[1:]
        settings = {
            key.lstrip("+"): value for one in answers for key, value in one.settings.items()
        }
        lacks = [one.lacks for one in answers if one.lacks]
        # A loss without a clip is not what a framework's clipped loss was meant to be.
        return settings, lacks + [AT_ONE for one in answers if AT_ONE in one.differs]

    def _differences(self, settings: Mapping[str, object]) -> list[str]:
        defaults = self._peer.defaults[self._run.entry]
        return [
            key
            for key, value in self._given.items()
            if key in self.keys
            and key not in self._read
            and (key in settings or isinstance(value, str | bool))
            and not _equal(settings.get(key, defaults.get(key)), value)
        ]

    def _misses(self, method: Method) -> float:
        exact = method.kl in ("k3+", "k3-unbiased") and method.kl_in == "reward"
        if exact or self._peer.entry(method) != self._run.entry:  # no such method
            return float("inf")
        settings, lacks = self._settings(method)
        return len(self._differences(settings)) + 1.5 * len(lacks)


def _changes(method: Method) -> int:
    """Number of choices in which a method differs from its row."""
    row = ZOO[method.name]
    return sum(getattr(method, one.name) != getattr(row, one.name) for one in fields(method))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return one == other or (not one and not other)
