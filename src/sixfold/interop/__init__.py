"""What to set in verl 0.9.1, TRL 1.16 and OpenRLHF 0.11.2 to get a row's numbers, and where no setting does, by how much they part. No torch.

Every choice of a row has an `Answer` in each framework. The keys and their defaults are data (`Framework.defaults`), held to the frameworks' own code
by tests/differential/test_convert.py; the numbers behind the differences are those of docs/algorithms/peers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..algorithm.method import Method
from . import openrlhf, trl, verl
from .answer import Framework, Sizes

__all__ = ["FRAMEWORKS", "Conversion", "Sizes", "convert"]


@dataclass(frozen=True)
class Conversion:
    """A row in another framework. entry: command or class. changed: settings to paste. kept: those so by default. The rest as in `Answer`."""

    framework: str
    row: str
    entry: str
    changed: Mapping[str, object]
    kept: Mapping[str, object]
    also: tuple[str, ...]
    differs: tuple[str, ...]
    lacks: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return asdict(self)


_OLD = "Ratios are against log-probs that it computes again with the trainer; ours against the sampler's: the same where the two agree."

FRAMEWORKS: dict[str, Framework] = {
    "verl": Framework(
        "verl 0.9.1",
        (
            _OLD,
            "Batch sizes are counted in prompts. Betas and weight decay make its AdamW ours; learning rate and gradient norm are so by default.",
        ),
        {"python -m verl.trainer.main_ppo": verl.DEFAULTS},
        lambda m: "python -m verl.trainer.main_ppo",
        verl.answers,
    ),
    "trl": Framework(
        "TRL 1.16",
        (_OLD, "Batch sizes are those of one process without gradient accumulation, in samples. A row without a scored token counts in its means."),
        trl.DEFAULTS,
        trl.entry,
        trl.answers,
    ),
    "openrlhf": Framework(
        "OpenRLHF 0.11.2",
        (_OLD, "train.batch_size is counted in samples. Rewards outside reward.clip_range, (-10, 10) by default, are clipped; ours never are."),
        {"python -m openrlhf.cli.train_ppo_ray": openrlhf.DEFAULTS},
        lambda m: "python -m openrlhf.cli.train_ppo_ray",
        openrlhf.answers,
    ),
}


def convert(framework: str, method: Method, sizes: Sizes) -> Conversion:
    """The row in that framework, one of FRAMEWORKS. Raises KeyError for another."""
    peer = FRAMEWORKS[framework]
    entry = peer.entry(method)
    answers = list(peer.answers(method, sizes))
    settings = {key: value for answer in answers for key, value in answer.settings.items()}
    defaults = peer.defaults[entry]
    changed = {key: value for key, value in settings.items() if key.startswith("+") or defaults[key] != value}
    return Conversion(
        framework,
        method.name,
        entry,
        changed,
        kept={key: value for key, value in settings.items() if key not in changed},
        also=tuple(line for answer in answers for line in answer.also),
        differs=tuple(note for answer in answers for note in answer.differs),
        lacks=tuple(answer.lacks for answer in answers if answer.lacks),
    )
