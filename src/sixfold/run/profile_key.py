"""What the stored pass rates of a model depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..data.profile import ProfileKey
from ..recipe.dump import flat
from ..seeds import seed_bytes
from .fingerprint import rewards_fingerprint

if TYPE_CHECKING:
    from .assemble import Assembly

SAMPLING = (
    "max_new_tokens", "max_turns", "max_episode_tokens", "temperature", "top_p", "top_k", "min_p",
    "stop_tokens", "stop", "backend.kind",
)  # fmt: skip
"""Settings of [rollout] on which pass rates depend."""
NEUTRAL = ("workers", "preflight", "error_budget")
"""Settings of [environment] on which no reward depends."""


def profile_key(world: Assembly) -> ProfileKey:
    """What the pass rates of a model depend on, as `Assembly` samples and scores.

    Args:
        world: model, sampling and verifier.
    """
    from ..model.weights_hash import weights_hash

    values = {name: _plain(value) for name, value in flat(world.recipe).items()}
    rewards = world.recipe.environment
    verifier = {
        name.removeprefix("environment."): value
        for name, value in values.items()
        if name.startswith("environment.") and name.removeprefix("environment.") not in NEUTRAL
    }
    verifier |= {name: values[f"eval.{name}"] for name in ("metric", "solved_at")}
    verifier["code"] = _plain(rewards_fingerprint(rewards.rewards, rewards.reward_model))
    sampling = {name: values[f"rollout.{name}"] for name in SAMPLING}
    sampling["precision"] = values["run.precision"]
    policy = world.policy
    template = f"{policy.vocabulary_hash}\0{policy.tokenizer.chat_template}"
    return ProfileKey(
        weights_hash(world.whole_policy.weights()),
        seed_bytes(template, 16, "profile").hex(),
        sampling,
        verifier,
    )


def _plain(value: Any) -> Any:
    """A setting as JSON gives it back."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
