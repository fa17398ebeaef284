"""Resolve the algorithm of a recipe, and refuse settings that cannot work. No torch."""

from __future__ import annotations

from dataclasses import replace

from ..algorithm.method import ADVANTAGES, CORRECTION_BANDS, LOSSES, PASS_AT_K, Method
from ..algorithm.zoo import ZOO
from ..errors import UserError, nearest
from .schema import AlgorithmConfig, Recipe

_WEIGHTED_BY_VTRACE = frozenset(CORRECTION_BANDS) - {"none", "negative-sequence"}
_WITHOUT_LOW = ("truncated", "truncated-sequence", "decoupled", "negative-sequence")
_WHOLE = (
    "takes a reward above 0 for a right answer and 0 for a wrong one, as the verifier gives them"
)
_UNSHAPED = {
    "maxrl": _WHOLE,
    "pass_at_k": _WHOLE,
    "normalise_then_sum": "reads each reward by itself, as the environment gives it",
    "greedy_baseline": "subtracts the reward of the greedy completion, which is not shaped",
}
"""Advantages that need unmodified rewards, with the reason."""


def resolve_algorithm(config: AlgorithmConfig) -> Method:
    """Method of the named algorithm, with the recipe's overrides applied.

    Raises:
        UserError: for an unknown name, or settings that contradict each other.
    """
    _check_name("algorithm.name", config.name, list(ZOO))
    overrides = {
        key: value
        for key, value in config.model_dump(exclude={"name"}).items()
        if value is not None
    }
    for key, known in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        if key in overrides:
            _check_name(f"algorithm.{key}", overrides[key], list(known))
    row = replace(ZOO[config.name], **overrides)
    _check_clip(row, overrides)
    _check_kl(row, overrides)
    _check_idle(row, overrides)
    _check_rewards(row)
    _check_band(row)
    if row.advantage == "vtrace" and row.correction in _WEIGHTED_BY_VTRACE:
        raise UserError(
            f"algorithm.correction = '{row.correction}' would weigh each token twice: vtrace's"
            " advantages hold the weight; use 'none'"
        )
    if row.entropy_rule != "none" and LOSSES[row.loss].ratio == "sequence":
        raise UserError(
            f"algorithm.entropy_rule = '{row.entropy_rule}' picks tokens, and {row.loss} has one"
            " loss for a whole sequence: use 'none'"
        )
    if row.updates > 1 and LOSSES[row.loss].ratio == "none":
        raise UserError(
            f"algorithm.epochs x minibatches = {row.updates} updates a step, but {row.loss} has no"
            " ratio: after the first its samples are another policy's; use 1 and 1, or a loss with"
            " a ratio, e.g. algorithm.loss = 'clipped_surrogate'"
        )
    return row


def check_algorithm(recipe: Recipe, row: Method) -> None:
    """Check the rest of the recipe against the algorithm.

    Raises:
        UserError: if a setting contradicts the algorithm.
    """
    samples, prompts = recipe.rollout.samples_per_prompt, recipe.rollout.prompts_per_step
    if row.group_baseline and samples < 2:
        raise UserError(
            f"rollout.samples_per_prompt = 1 gives every sample zero advantage under {row.name};"
            " use >= 2"
        )
    if row.advantage == "pass_at_k" and samples < PASS_AT_K:
        raise UserError(
            f"algorithm.advantage = 'pass_at_k' looks at {PASS_AT_K} samples of a prompt;"
            f" rollout.samples_per_prompt = {samples}"
        )
    if recipe.rollout.oversample and samples < 2:
        raise UserError(
            "rollout.oversample keeps samples whose rewards differ, and rollout.samples_per_prompt"
            " = 1 keeps one; use >= 2"
        )
    if 0 < recipe.rollout.oversample <= samples:
        raise UserError(
            f"rollout.oversample = {recipe.rollout.oversample} starts no more samples of a task"
            f" than the {samples} that are kept; use more than rollout.samples_per_prompt, or 0"
        )
    if recipe.rollout.oversample and row.needs_teacher:
        raise UserError(
            f"rollout.oversample chooses samples by their rewards, which {row.name} does not train"
            " on; use 0"
        )
    if row.dynamic_sampling and samples < 2:
        raise UserError(
            "algorithm.dynamic_sampling keeps groups whose rewards differ, and"
            " rollout.samples_per_prompt = 1 has none; use >= 2"
        )
    if row.dynamic_sampling and row.needs_teacher:
        raise UserError(
            f"algorithm.dynamic_sampling chooses groups by their rewards, which {row.name} does not"
            " train on; use 0"
        )
    if row.advantage == "process":
        raise UserError(
            "algorithm.advantage = 'process' reads rewards of steps (Reward.steps), and a recipe's"
            " rewards speak of whole answers; it is for an environment of your own, from Python"
        )
    if row.entropy_rule == "kl-cov" and row.updates == 1 and recipe.sync.kind == "shared":
        raise UserError(
            "algorithm.entropy_rule = 'kl-cov' charges for moving away from the sampler, and with"
            " one update a step nothing has moved; use algorithm.minibatches or epochs > 1, or"
            " 'clip-cov'"
        )
    if recipe.critic.warmup_steps and not row.needs_critic:
        raise UserError(f"critic.warmup_steps: {row.name} has no critic; remove it")
    if row.minibatches > prompts:
        raise UserError(
            f"algorithm.minibatches = {row.minibatches} splits whole prompts:"
            f" rollout.prompts_per_step = {prompts} is too few"
        )
    if row.needs_critic and recipe.critic.body == "none":
        raise UserError(
            f"{row.name} takes its advantage ({row.advantage}) from a critic, and critic.body ="
            " 'none'; use 'own' or 'policy'"
        )
    _check_correction(recipe, row)
    check_recomputed(recipe, row)
    _check_reference(recipe, row)


def _check_band(row: Method) -> None:
    low, high = row.band
    if row.correction in ("none", "negative-sequence"):
        return
    if (low is not None and low > 1) or (high is not None and high < 1):
        raise UserError(
            f"algorithm.correction_low = {low} and correction_high = {high} must lie on both sides"
            " of 1, the weight of an on-policy sample"
        )


def _check_name(key: str, value: str, known: list[str]) -> None:
    if value not in known:
        what = key.rpartition(".")[2].replace("name", "algorithm")
        raise UserError(
            f"{key}: no {what} '{value}'.{nearest(value, known)} Known: {', '.join(known)}"
        )


def _check_clip(row: Method, overrides: dict[str, object]) -> None:
    clips = LOSSES[row.loss].clips
    for key in ("clip_low", "clip_high"):
        if key in overrides and clips is None:
            raise UserError(
                f"algorithm.{key}: {row.loss} has no ratio to clip; remove it, or use e.g."
                " algorithm.loss = 'clipped_surrogate'"
            )
        if clips is not None and getattr(row, key) is None and row.loss != "clipped_weight":
            raise UserError(
                f"algorithm.{key}: {row.loss} needs it, and {row.name} has none of its own;"
                " e.g. 0.2"
            )
    if (
        clips is not None
        and row.loss != "geometric_surrogate"
        and row.clip_low is not None
        and row.clip_low >= 1
    ):
        raise UserError(
            f"algorithm.clip_low = {row.clip_low:g} lets the ratio fall to {1 - row.clip_low:g},"
            " where it never is; use less than 1"
        )
    if row.dual_clip and row.loss != "clipped_surrogate":
        raise UserError(
            f"algorithm.dual_clip belongs to clipped_surrogate, not to {row.loss}; remove it"
        )
    if row.dual_clip and row.dual_clip <= 1 + (row.clip_high or 0):
        raise UserError(
            f"algorithm.dual_clip = {row.dual_clip:g} must be above the clip's upper end,"
            f" {1 + (row.clip_high or 0):g}; e.g. 3"
        )


def _check_kl(row: Method, overrides: dict[str, object]) -> None:
    if row.beta > 0 and row.kl == "k1" and row.kl_in == "loss":
        raise UserError(
            "algorithm.kl = 'k1' with kl_in = 'loss' has zero expected gradient: use 'k2' (or 'k3')"
            " in the loss, or kl_in = 'reward'"
        )
    if row.beta > 0 and row.kl in ("k3+", "k3-unbiased") and row.kl_in == "reward":
        raise UserError(
            f"algorithm.kl = '{row.kl}' only changes a gradient, and a reward has none: use 'k1' in"
            " the reward"
        )
    if row.kl_target and not row.beta > 0:
        raise UserError(
            "algorithm.kl_target adapts beta, which is 0 here: give algorithm.beta to start from,"
            " e.g. 0.02"
        )
    if row.needs_teacher and row.beta > 0:
        raise UserError(
            f"{row.name} measures against its teacher already: algorithm.beta = {row.beta:g} has no"
            " model of its own; use 0"
        )


def _check_idle(row: Method, overrides: dict[str, object]) -> None:
    """Refuse settings that the resolved algorithm would never read."""
    if "tau" in overrides and row.loss not in ("soft_gate", "mirror_descent"):
        raise UserError(
            f"algorithm.tau belongs to soft_gate and mirror_descent; {row.loss} has none: remove it"
        )
    if "lam" in overrides and not row.needs_critic:
        raise UserError(
            f"algorithm.lam belongs to a critic's advantages; {row.advantage} has none: remove it,"
            " or use algorithm.advantage = 'gae'"
        )
    for key in ("kl", "kl_in"):
        if key in overrides and not row.beta > 0:
            raise UserError(f"algorithm.{key} without a KL: set algorithm.beta, or remove it")
    if "correction_low" in overrides and row.correction in _WITHOUT_LOW:
        raise UserError(
            f"algorithm.correction_low: '{row.correction}' has no lower bound; remove it"
        )
    for key in ("correction_low", "correction_high"):
        if key in overrides and row.correction == "none":
            raise UserError(
                f"algorithm.{key} without a rule: set algorithm.correction, one of"
                f" {', '.join(list(CORRECTION_BANDS)[1:])}"
            )


def _check_rewards(row: Method) -> None:
    """Refuse reward shaping if the advantage needs unmodified rewards or ignores rewards."""
    why = _UNSHAPED.get(row.advantage, "")
    if not why and not row.needs_teacher:
        return
    shaping = {
        "overlong_buffer": row.overlong_buffer or "",
        "length_penalty": row.length_penalty,
        "whiten": row.whiten,
    }
    for key, value in shaping.items():
        if value not in ("", "none") and row.needs_teacher:
            raise UserError(
                f"algorithm.{key} = {value!r} shapes rewards, and {row.name} reads none: its"
                " advantage is the teacher's; remove it"
            )
        if value not in ("", "none"):
            raise UserError(
                f"algorithm.{key} = {value!r} shapes rewards, and advantage '{row.advantage}'"
                f" {why}; remove it"
            )
    # A baseline may be any number that does not depend on the sample: the KL may be in the reward.
    if why and not row.needs_greedy and row.beta > 0 and row.kl_in == "reward":
        raise UserError(
            f"algorithm.beta = {row.beta:g} with kl_in = 'reward' takes the KL off the reward, and"
            f" advantage '{row.advantage}' {why}; use kl_in = 'loss'"
        )


def _check_correction(recipe: Recipe, row: Method) -> None:
    rule = (
        row.correction
        if row.correction != "none"
        else "vtrace"
        if row.advantage == "vtrace"
        else ""
    )
    # The only rule that uses the policy's current log-probs.
    moves = row.updates > 1 and rule == "negative-sequence"
    exact = recipe.run.precision == "float32" and not recipe.quantised_sampling
    if rule and recipe.sync.kind == "shared" and exact and not moves:
        raise UserError(
            f"algorithm.correction = '{rule}' corrects for samples of older or rounded weights, but"
            " engine and trainer share their weights (sync.kind = 'shared') in float32. Use"
            " sync.kind = 'copy' with sync.every > 1, or remove it"
        )


def check_recomputed(recipe: Recipe, row: Method) -> None:
    """Check that ratios use the trainer's own log-probs if weights or KV cache are quantised.

    The log-probs of samples from a quantised engine are not the policy's.

    Raises:
        UserError: if they do not.
    """
    if recipe.quantised_sampling and not row.ratio_from_trainer:
        setting = (
            f"sync.kind = '{recipe.sync.kind}'"
            if recipe.sync.quantised
            else f"engine.kv_dtype = '{recipe.engine.kv_dtype}'"
        )
        raise UserError(
            f"{setting} changes the log-probs of the samples, but '{row.name}' would take them for"
            " the policy's own. Set algorithm.correction, e.g. 'truncated': it scores the samples"
            " again with the trainer's weights and weights them by the difference"
        )


def _check_reference(recipe: Recipe, row: Method) -> None:
    config = recipe.reference
    if row.needs_teacher and not config.path:
        raise UserError(
            f"{row.name} distils from a teacher: name one with reference.path, a model with the"
            " policy's tokenizer"
        )
    if config.path and not row.needs_reference:
        raise UserError(
            f"reference.path: {row.name} with beta = {row.beta:g} measures against no other model;"
            " set algorithm.beta > 0, or remove it"
        )
    if config.path and (config.reset_every or config.reset_patience):
        raise UserError(
            "reference.path names a model of its own, and reset_every or reset_patience would"
            " overwrite it with the policy; use one"
        )
    early = (
        "a teacher's opinion"
        if row.needs_teacher
        else "a KL in the reward"
        if row.beta > 0 and row.kl_in == "reward"
        else ""
    )
    early = early or (
        "an adaptive beta (algorithm.kl_target)" if row.beta > 0 and row.kl_target else ""
    )
    if config.placement == "fused" and early:
        raise UserError(
            "reference.placement = 'fused' gives the reference's log-probs to the loss alone;"
            f" {early} needs them before: use 'inline' or 'worker'"
        )
    if (config.reset_every or config.placement != "inline") and not row.needs_reference:
        raise UserError(
            f"reference.reset_every and placement speak of a reference, and {row.name} with beta ="
            " 0 keeps none; set algorithm.beta > 0"
        )
    if config.reset_patience and not (recipe.eval.every and row.needs_reference):
        raise UserError(
            "reference.reset_patience counts held-out evaluations and resets a reference: set"
            " eval.every > 0 and algorithm.beta > 0"
        )
