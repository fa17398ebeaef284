"""Convert a method to settings of verl 0.9.1, TRL 1.16 and OpenRLHF 0.11.2. Does not import torch.

The settings reproduce the method's numbers. Where no setting does, the conversion states the
difference. Every choice of a method has an `Answer` in each framework. The keys and their defaults
are data (`Framework.defaults`); tests/differential/test_convert.py checks them against the
frameworks' own code. The numbers of the differences are in docs/algorithms/peers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sixfold.algorithm.method import Method

from . import openrlhf, trl, verl
from .answer import Framework, Sizes
from .settings import table, theirs

__all__ = ["FRAMEWORKS", "Conversion", "Sizes", "convert", "written"]


@dataclass(frozen=True)
class Conversion:
    """A method in another framework.

    Attributes:
        entry: command or class.
        changed: settings to paste.
        kept: settings that already have this value by default.
        also: further lines to paste.
        differs: remaining differences.
        lacks: choices that no setting gives, with the nearest one.
    """

    framework: str
    row: str
    entry: str
    changed: Mapping[str, object]
    kept: Mapping[str, object]
    also: tuple[str, ...]
    differs: tuple[str, ...]
    lacks: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


_OLD = (
    "The framework's ratios use log-probs that its trainer computes again; Sixfold's use the"
    " sampler's log-probs. They are the same if the two agree."
)

FRAMEWORKS: dict[str, Framework] = {
    "verl": Framework(
        "verl 0.9.1",
        (
            _OLD,
            (
                "Batch sizes count prompts. Betas and weight decay are set to Sixfold's AdamW;"
                " learning rate and gradient norm are equal by default."
            ),
        ),
        {"python -m verl.trainer.main_ppo": verl.DEFAULTS},
        lambda m: "python -m verl.trainer.main_ppo",
        verl.answers,
    ),
    "trl": Framework(
        "TRL 1.16",
        (
            _OLD,
            (
                "Batch sizes count samples, for one process without gradient accumulation. Rows"
                " without a scored token count in TRL's means."
            ),
        ),
        trl.DEFAULTS,
        trl.entry,
        trl.answers,
    ),
    "openrlhf": Framework(
        "OpenRLHF 0.11.2",
        (
            _OLD,
            (
                "train.batch_size counts samples. Rewards outside reward.clip_range, (-10, 10)"
                " by default, are clipped; Sixfold never clips rewards."
            ),
        ),
        {"python -m openrlhf.cli.train_ppo_ray": openrlhf.DEFAULTS},
        lambda m: "python -m openrlhf.cli.train_ppo_ray",
        openrlhf.answers,
    ),
}


def convert(
    framework: str, method: Method, sizes: Sizes, recipe: Mapping[str, Any] | None = None
) -> Conversion:
    """Convert a method, and with a recipe also its other settings.

    Raises:
        KeyError: for an unknown framework.
    """
    peer = FRAMEWORKS[framework]
    entry = peer.entry(method)
    answers = list(peer.answers(method, sizes))
    settings = {key: value for answer in answers for key, value in answer.settings.items()}
    defaults = peer.defaults[entry]
    run = {} if recipe is None else theirs(table(framework), recipe, method.needs_critic)
    if recipe is not None and framework == "trl":  # it counts optimizer steps
        run["max_steps"] = recipe["run.steps"] * method.updates
    settings = {key: run.pop(key, value) for key, value in settings.items()}
    changed = {
        key: value
        for key, value in settings.items()
        if key.startswith("+") or defaults[key] != value
    }
    return Conversion(
        framework,
        method.name,
        entry,
        {**changed, **run},
        kept={key: value for key, value in settings.items() if key not in changed},
        also=tuple(line for answer in answers for line in answer.also),
        differs=tuple(note for answer in answers for note in answer.differs),
        lacks=tuple(answer.lacks for answer in answers if answer.lacks),
    )


def written(framework: str) -> set[str]:
    """Keys of a recipe that `convert` writes, besides those of the algorithm and the sizes."""
    known = table(framework)
    found = {same.ours for name, same in known.same.items() if name not in known.only_in}
    return found | ({"run.steps"} if framework == "trl" else set())
