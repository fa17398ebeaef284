"""Resolve the algorithm of a recipe, and refuse settings that cannot work. No torch."""

from __future__ import annotations

from dataclasses import replace

from ..algorithm.method import ADVANTAGES, CORRECTION_BANDS, LOSSES, PASS_AT_K, Method
from ..algorithm.zoo import ZOO
from ..environment.episodes import library_of
from ..environment.registry import EPISODES, LIBRARIES, reward_row
from ..errors import UserError, nearest
from ..preference.zoo import LOSSES as PREFERENCES
from .preference_plan import trains_preferences
from .reward_models import PRM, reward_model_paths
from .schema import AlgorithmConfig, EnvironmentConfig, Recipe, ReferenceConfig

_WEIGHTED_BY_VTRACE = frozenset(CORRECTION_BANDS) - {"none", "negative-sequence"}
_WITHOUT_LOW = ("truncated", "truncated-sequence", "decoupled", "negative-sequence")
_WHOLE = "needs unshaped rewards: above 0 for a right answer and 0 for a wrong one"
_UNSHAPED = {
    "maxrl": _WHOLE,
    "pass_at_k": _WHOLE,
    "normalise_then_sum": "needs each reward as the environment gives it",
    "greedy_baseline": "subtracts the unshaped reward of the greedy completion",
}
"""Advantages that need unmodified rewards, with the reason."""


def resolve_algorithm(config: AlgorithmConfig) -> Method:
    """Method of the named algorithm, with the recipe's overrides applied.

    Raises:
        UserError: for an unknown name, or settings that contradict each other.
    """
    if config.name in PREFERENCES:
        raise UserError(
            f"algorithm.name = '{config.name}' is a preference loss: use a stage of kind preference"
            f" with preference.losses = ['{config.name}']"
        )
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
            f"algorithm.correction = '{row.correction}' would weight each token twice: the"
            " advantages of 'vtrace' already contain the importance weight. Use 'none'"
        )
    if row.entropy_rule != "none" and LOSSES[row.loss].ratio == "sequence":
        raise UserError(
            f"algorithm.entropy_rule = '{row.entropy_rule}' selects tokens, but algorithm.loss ="
            f" '{row.loss}' has one ratio per sequence. Use algorithm.entropy_rule = 'none'"
        )
    if row.updates > 1 and LOSSES[row.loss].ratio == "none":
        raise UserError(
            f"algorithm.epochs x algorithm.minibatches = {row.updates} updates per step, but"
            f" algorithm.loss = '{row.loss}' has no ratio: after the first update the samples are"
            " off-policy. Set both to 1, or use a loss with a ratio, e.g. algorithm.loss ="
            " 'clipped_surrogate'"
        )
    return row


def check_algorithm(recipe: Recipe, row: Method, *, own_reward: bool = False) -> None:
    """Check the rest of the recipe against the algorithm.

    Args:
        recipe: the whole run.
        own_reward: True if a function given from Python replaces the recipe's rewards.

    Raises:
        UserError: if a setting contradicts the algorithm.
    """
    samples, prompts = recipe.rollout.samples_per_prompt, recipe.rollout.prompts_per_step
    if row.group_baseline and samples < 2:
        raise UserError(
            "rollout.samples_per_prompt = 1 gives every sample an advantage of 0 with"
            f" '{row.name}'. Use at least 2"
        )
    if row.advantage == "pass_at_k" and samples < PASS_AT_K:
        raise UserError(
            f"algorithm.advantage = 'pass_at_k' needs at least {PASS_AT_K} samples per prompt,"
            f" but rollout.samples_per_prompt = {samples}. Raise it"
        )
    if recipe.rollout.oversample and samples < 2:
        raise UserError(
            "rollout.oversample keeps samples whose rewards differ, but"
            " rollout.samples_per_prompt = 1 keeps only one. Use at least 2"
        )
    if 0 < recipe.rollout.oversample <= samples:
        raise UserError(
            f"rollout.oversample = {recipe.rollout.oversample} must be greater than"
            f" rollout.samples_per_prompt = {samples}, the number of samples that are kept. Raise"
            " it, or use 0"
        )
    if recipe.rollout.oversample and row.needs_teacher:
        raise UserError(
            f"rollout.oversample selects samples by their rewards, but '{row.name}' does not"
            " train on rewards. Use 0"
        )
    if row.dynamic_sampling and samples < 2:
        raise UserError(
            "algorithm.dynamic_sampling keeps groups whose rewards differ, but"
            " rollout.samples_per_prompt = 1 gives groups of one reward. Use at least 2"
        )
    if row.dynamic_sampling and row.needs_teacher:
        raise UserError(
            f"algorithm.dynamic_sampling selects groups by their rewards, but '{row.name}' does"
            " not train on rewards. Use 0"
        )
    if row.advantage == "process" and not own_reward:
        _check_step_rewards(recipe.environment)
    if row.entropy_rule == "kl-cov" and row.updates == 1 and recipe.samples_current:
        raise UserError(
            "algorithm.entropy_rule = 'kl-cov' has no effect with one update per step: the"
            " policy still equals the sampler. Set algorithm.minibatches or algorithm.epochs"
            " above 1, or use 'clip-cov'"
        )
    if row.minibatches > prompts:
        raise UserError(
            f"algorithm.minibatches = {row.minibatches} is greater than rollout.prompts_per_step"
            f" = {prompts}, but a prompt is never split. Lower algorithm.minibatches"
        )
    if row.needs_critic and recipe.critic.body == "none":
        raise UserError(
            f"critic.body = 'none', but '{row.name}' needs a critic for its advantage"
            f" ({row.advantage}). Use 'own' or 'policy'"
        )
    exact = recipe.run.precision == "float32" and not recipe.quantised_sampling
    _check_correction(row, same_weights=exact and recipe.samples_current)
    check_recomputed(recipe, row)
    if not trains_preferences(recipe.preference):  # which have a reference without an algorithm
        _check_reference(recipe.reference, row, evaluates=recipe.eval.every > 0)


def _check_step_rewards(config: EnvironmentConfig) -> None:
    """Refuse rewards and environments that are known to give no rewards of steps or turns."""
    episode, library = config.episode, library_of(config.episode)
    names = () if episode and config.rewards == EnvironmentConfig().rewards else config.rewards
    givers = [
        n.startswith(PRM) if reward_model_paths(n) else reward_row(n).step_rewards for n in names
    ]
    if library:
        givers.append(LIBRARIES.row(library).step_rewards)
    elif episode:
        givers.append(EPISODES.row(episode).step_rewards if episode in EPISODES else None)
    if any(giver is not False for giver in givers):
        return
    whose = f"environment.episode = {episode!r}" if episode else f"environment.rewards = {[*names]}"
    raise UserError(
        f"algorithm.advantage = 'process' needs rewards of steps or turns, but {whose} gives none."
        " Use a process reward model, environment.rewards = ['prm:PATH'], a function of your own"
        " that returns a Grade with steps, ['path.py:function'], an environment that rewards turns,"
        " such as gymnasium:ID, or another advantage"
    )


def _check_band(row: Method) -> None:
    low, high = row.band
    if row.correction in ("none", "negative-sequence"):
        return
    if (low is not None and low > 1) or (high is not None and high < 1):
        raise UserError(
            f"algorithm.correction_low = {low} and algorithm.correction_high = {high} must"
            " enclose 1, the weight of an on-policy sample. Lower the first or raise the second"
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
                f"algorithm.{key} has no effect: algorithm.loss = '{row.loss}' has no ratio to"
                " clip. Remove it, or use e.g. algorithm.loss = 'clipped_surrogate'"
            )
        if clips is not None and getattr(row, key) is None and row.loss != "clipped_weight":
            raise UserError(
                f"algorithm.{key} is not set: algorithm.loss = '{row.loss}' needs it, and"
                f" '{row.name}' has no default for it. Use e.g. 0.2"
            )
    if (
        clips is not None
        and row.loss != "geometric_surrogate"
        and row.clip_low is not None
        and row.clip_low >= 1
    ):
        raise UserError(
            f"algorithm.clip_low = {row.clip_low:g} has no effect: a ratio is never below"
            f" {1 - row.clip_low:g}. Use less than 1"
        )
    if row.dual_clip and row.loss != "clipped_surrogate":
        raise UserError(
            f"algorithm.dual_clip has no effect with algorithm.loss = '{row.loss}', only with"
            " 'clipped_surrogate'. Remove it"
        )
    if row.dual_clip and row.dual_clip <= 1 + (row.clip_high or 0):
        raise UserError(
            f"algorithm.dual_clip = {row.dual_clip:g} must be above 1 + algorithm.clip_high ="
            f" {1 + (row.clip_high or 0):g}. Use e.g. 3"
        )


def _check_kl(row: Method, overrides: dict[str, object]) -> None:
    if row.beta > 0 and row.kl == "k1" and row.kl_in == "loss":
        raise UserError(
            "algorithm.kl = 'k1' with algorithm.kl_in = 'loss' has an expected gradient of 0."
            " Use 'k2' or 'k3', or algorithm.kl_in = 'reward'"
        )
    if row.beta > 0 and row.kl in ("k3+", "k3-unbiased") and row.kl_in == "reward":
        raise UserError(
            f"algorithm.kl = '{row.kl}' has no effect with algorithm.kl_in = 'reward': it changes"
            " only the gradient of the KL. Use 'k1'"
        )
    if row.kl_target and not row.beta > 0:
        raise UserError(
            "algorithm.kl_target adapts algorithm.beta, but beta is 0. Set algorithm.beta to an"
            " initial value, e.g. 0.02"
        )
    if row.needs_teacher and row.beta > 0:
        raise UserError(
            f"algorithm.beta = {row.beta:g} needs a reference model, but the reference of"
            f" '{row.name}' is the teacher. Use 0"
        )


def _check_idle(row: Method, overrides: dict[str, object]) -> None:
    """Refuse settings that the resolved algorithm would never read."""
    if "tau" in overrides and row.loss not in ("soft_gate", "mirror_descent"):
        raise UserError(
            f"algorithm.tau has no effect with algorithm.loss = '{row.loss}', only with"
            " 'soft_gate' and 'mirror_descent'. Remove it"
        )
    if "lam" in overrides and not row.needs_critic:
        raise UserError(
            f"algorithm.lam has no effect with algorithm.advantage = '{row.advantage}', which"
            " needs no critic. Remove it, or use algorithm.advantage = 'gae'"
        )
    for key in ("kl", "kl_in"):
        if key in overrides and not row.beta > 0:
            raise UserError(
                f"algorithm.{key} has no effect without a KL: algorithm.beta is 0. Set"
                f" algorithm.beta, or remove algorithm.{key}"
            )
    if "correction_low" in overrides and row.correction in _WITHOUT_LOW:
        raise UserError(
            f"algorithm.correction_low has no effect: algorithm.correction = '{row.correction}'"
            " has no lower bound. Remove it"
        )
    for key in ("correction_low", "correction_high"):
        if key in overrides and row.correction == "none":
            raise UserError(
                f"algorithm.{key} has no effect without algorithm.correction. Set it to one of"
                f" {', '.join(list(CORRECTION_BANDS)[1:])}, or remove algorithm.{key}"
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
                f"algorithm.{key} = {value!r} changes rewards, but '{row.name}' reads no rewards."
                " Remove it"
            )
        if value not in ("", "none"):
            raise UserError(
                f"algorithm.{key} = {value!r} changes rewards, but algorithm.advantage ="
                f" '{row.advantage}' {why}. Remove it"
            )
    # A baseline may be any number that does not depend on the sample: the KL may be in the reward.
    if why and not row.needs_greedy and row.beta > 0 and row.kl_in == "reward":
        raise UserError(
            f"algorithm.beta = {row.beta:g} with algorithm.kl_in = 'reward' changes rewards, but"
            f" algorithm.advantage = '{row.advantage}' {why}. Use algorithm.kl_in = 'loss'"
        )


def _check_correction(row: Method, *, same_weights: bool) -> None:
    """Refuse a correction of samples that come from the trainer's own weights.

    Args:
        same_weights: engine and trainer compute with the same weights in float32.
    """
    rule = (
        row.correction
        if row.correction != "none"
        else "vtrace"
        if row.advantage == "vtrace"
        else ""
    )
    # The only rule that uses the policy's current log-probs.
    moves = row.updates > 1 and rule == "negative-sequence"
    if rule and same_weights and not moves:
        raise UserError(
            f"algorithm.correction = '{rule}' has no effect: it corrects for samples from older"
            " or quantised weights, but engine and trainer share their weights in float32"
            " (sync.kind = 'shared'). Use rollout.staleness > 0, or sync.kind = 'copy' with"
            " sync.every > 1, or remove it"
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
            f"{setting} changes the log-probs of the samples, but '{row.name}' would use them as"
            " the policy's log-probs. Set algorithm.correction, e.g. 'truncated': it scores the"
            " samples again with the trainer's weights and weights them by the ratio"
        )


def _check_reference(config: ReferenceConfig, row: Method, *, evaluates: bool) -> None:
    if row.needs_teacher and not config.path:
        raise UserError(
            f"reference.path is empty, but '{row.name}' needs a teacher. Set it to a model with"
            " the policy's tokenizer"
        )
    if config.path and not row.needs_reference:
        raise UserError(
            f"reference.path has no effect: '{row.name}' with algorithm.beta = {row.beta:g} uses"
            " no reference model. Set algorithm.beta > 0, or remove it"
        )
    if config.path and (config.reset_every or config.reset_patience):
        raise UserError(
            "reference.path names a model, but reference.reset_every and"
            " reference.reset_patience would overwrite it with the policy. Remove one of the two"
        )
    early = (
        "distillation from a teacher"
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
            "reference.placement = 'fused' computes the reference's log-probs in the loss, but"
            f" {early} needs them earlier. Use 'inline' or 'worker'"
        )
    if (config.reset_every or config.placement != "inline") and not row.needs_reference:
        raise UserError(
            f"reference.reset_every and reference.placement have no effect: '{row.name}' with"
            " algorithm.beta = 0 uses no reference model. Set algorithm.beta > 0, or remove them"
        )
    if config.reset_patience and not (evaluates and row.needs_reference):
        raise UserError(
            "reference.reset_patience counts held-out evaluations and resets the reference"
            " model. Set eval.every > 0 and algorithm.beta > 0, or remove it"
        )
