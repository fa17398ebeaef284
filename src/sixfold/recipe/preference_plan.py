"""Resolve the losses of [preference], and refuse settings that cannot work. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..environment.registry import reward_row
from ..errors import UserError, nearest
from ..preference.loss import PreferenceLoss, Settings
from ..preference.zoo import LOSSES
from .schema import ComparisonsConfig, PreferenceConfig, ReferenceConfig, SampleConfig

READ_BY = {
    "chosen_field": ("pair", "labelled"),
    "rejected_field": ("pair", "labelled"),
    "margin_field": ("pair",),
    "completion_field": ("best_of", "ranked", "unpaired", "scored"),
    "completions_field": ("best_of", "ranked"),
    "label_field": ("labelled", "unpaired"),
    "score_field": ("ranked", "scored"),
    "pairs": ("pair", "labelled", "best_of", "ranked", "scored"),
}
"""Setting of [comparisons] -> forms whose rows read it."""


def resolve_losses(config: PreferenceConfig) -> list[tuple[PreferenceLoss, Settings, float]]:
    """The rows of a recipe's losses, their settings with the recipe's overrides, their weights.

    Raises:
        UserError: for an unknown loss, or settings that contradict each other.
    """
    rows = [_row(name) for name in config.losses]
    if twice := [name for name in config.losses if config.losses.count(name) > 1]:
        raise UserError(
            f"preference.losses names '{twice[0]}' twice. Name it once, with the sum of the weights"
        )
    weights = config.weights or [1.0] * len(rows)
    if len(weights) != len(rows):
        raise UserError(
            f"preference.weights has {len(weights)} numbers, but preference.losses has {len(rows)}"
            " losses. Give one weight for each loss, or none"
        )
    if any(weight < 0 for weight in weights) or not any(weights):
        raise UserError(f"preference.weights = {weights}: use weights >= 0, not all 0")
    if len({row.unpaired for row in rows}) > 1:
        single = next(row.name for row in rows if row.unpaired)
        raise UserError(
            f"preference.losses: '{single}' takes single completions with a label, and"
            f" '{next(row.name for row in rows if not row.unpaired)}' takes pairs. Use losses of"
            " one kind"
        )
    given = {
        name: value
        for name in Settings.__dataclass_fields__
        if (value := getattr(config, name, None)) is not None
    }
    _check_read(rows, given)
    _check_reference(config, rows)
    return [(row, _settings(row, given), weight) for row, weight in zip(rows, weights, strict=True)]


def trains_preferences(config: PreferenceConfig) -> bool:
    """True for the settings of a stage of kind preference. Other stages have none of its length."""
    return bool(config.steps or config.epochs)


def keeps_reference(config: PreferenceConfig) -> bool:
    """True if a stage with these settings keeps a reference model in memory."""
    return trains_preferences(config) and config.reference == "frozen" and _compares(config)


def check_reference(config: PreferenceConfig, reference: ReferenceConfig) -> None:
    """Refuse settings of the reference that a stage of kind preference does not read.

    Raises:
        UserError: names the setting and the remedy.
    """
    if reference.placement != "inline":
        raise UserError(
            f"reference.placement = '{reference.placement}' is for RL. Set reference.placement ="
            " 'inline' in this stage; preference.reference = 'cached' needs no reference in memory"
        )
    if reference.reset_every or reference.reset_patience:
        raise UserError(
            "reference.reset_every and reference.reset_patience are for RL. Set them to 0 in this"
            " stage: each round of kind online begins with a new reference"
        )
    held = config.reference == "frozen" and _compares(config)
    why = "preference.reference = 'cached' keeps no model" if config.reference == "cached" else ""
    why = why or f"{', '.join(config.losses)} needs no reference"
    for key, given, read in (
        ("path", bool(reference.path), _compares(config)),
        ("precision", reference.precision != "policy", held),
        ("offload", reference.offload, held),
    ):
        if given and not read:
            raise UserError(f"reference.{key} has no effect: {why}. Remove it in this stage")


def check_sampled(
    sample: SampleConfig,
    rewards: Sequence[str],
    solved_at: float,
    comparisons: ComparisonsConfig,
) -> None:
    """Refuse samples that cannot be compared, before anything is sampled.

    Args:
        rewards: its rewards. Solved completions may differ in one of several, in one that is no
            verifier, and below the full reward of a verifier.
        solved_at: reward from which they count as solved.

    Raises:
        UserError: names the setting and the remedy.
    """
    if comparisons.form not in ("auto", "scored"):
        raise UserError(
            f"comparisons.form = '{comparisons.form}': the rows of a sample stage have the form"
            " 'scored'. Remove it"
        )
    if sample.mix:  # rows of others may be compared
        return
    if sample.samples == 1:
        raise UserError(
            "sample.samples = 1 leaves nothing to compare: each task has one completion. Set 2 or"
            " more in the stage that samples"
        )
    full = solved_at >= 1 and len(rewards) == 1 and reward_row(rewards[0]).verifier
    if sample.keep == "best" or (sample.keep == "solved" and full):
        raise UserError(
            f"sample.keep = '{sample.keep}' leaves nothing to compare: the completions of a task"
            " that are kept are equally good. Set sample.keep = 'all' in the stage that samples"
        )


def _compares(config: PreferenceConfig) -> bool:
    """True if a loss compares with a reference."""
    return any(_row(name).needs_reference for name in config.losses)


def _check_reference(config: PreferenceConfig, rows: list[PreferenceLoss]) -> None:
    if config.cache and config.reference != "cached":
        raise UserError("preference.cache needs preference.reference = 'cached'")
    if config.reference != "cached":
        return
    if not _compares(config):
        raise UserError(
            f"preference.reference = 'cached' has no effect: {', '.join(config.losses)} needs no"
            " reference. Remove it"
        )
    if fresh := next((row.name for row in rows if row.statistics == "reference point"), ""):
        raise UserError(
            f"preference.reference = 'cached' does not work with the loss {fresh}, which compares"
            " each prompt with other completions in every step. Use 'frozen', or bco"
        )


def _row(name: str) -> PreferenceLoss:
    if name not in LOSSES:
        raise UserError(
            f"preference.losses: no loss '{name}'.{nearest(name, list(LOSSES))} Known:"
            f" {', '.join(LOSSES)}"
        )
    return LOSSES[name]


def _check_read(rows: list[PreferenceLoss], given: dict[str, object]) -> None:
    names = ", ".join(row.name for row in rows)
    for name in given:
        if not any(name in row.reads for row in rows):
            readers = ", ".join(row.name for row in LOSSES.values() if name in row.reads)
            raise UserError(
                f"preference.{name} has no effect on the loss {names}. Remove it, or use one of"
                f" {readers}"
            )
    if "sft_weight" in given and len(rows) > 1:
        raise UserError(
            "preference.sft_weight would add its term to each of the losses. Add 'sft' to"
            " preference.losses, and its weight to preference.weights"
        )
    if "divergence_alpha" in given and given.get("divergence") != "alpha":
        raise UserError("preference.divergence_alpha needs preference.divergence = 'alpha'")


def _settings(row: PreferenceLoss, given: dict[str, object]) -> Settings:
    read = {name: value for name, value in given.items() if name in row.reads}
    settings = replace(row.defaults, **read)  # type: ignore[arg-type]
    if row.link == "exo" and not settings.label_smoothing:
        raise UserError(
            "preference.label_smoothing = 0 makes the loss exo infinite. Use a small value, such"
            f" as {row.defaults.label_smoothing:g}"
        )
    return settings
