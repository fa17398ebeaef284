"""Settings that may change when a run is resumed, and settings that may not. No torch.

The comparison uses the settings in the checkpoint, because they produced its weights. recipe.toml
may have been edited since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from .dump import flat, toml_literal
from .knobs import knobs
from .schema import Recipe

ADAPTED = "the checkpoint has state that was adapted under this setting"
STATE = "the optimizer state in the checkpoint was written for this setting"
SAMPLER = "it decides whether the checkpoint contains the sampler's weights"
SFT = "the finished SFT steps were made under it"
TOKENS_DECIDE = "the tokens of the prompts are compared: a template that changes them is refused"

FIXED: dict[str, str] = {
    "run.seed": "task order and sampling noise come from it",
    "model": "the weights and the tokenizer come from the checkpoint",
    "algorithm.name": ADAPTED,
    "algorithm.advantage": ADAPTED,
    "algorithm.whiten": ADAPTED,
    "algorithm.kl_target": ADAPTED,
    "algorithm.entropy_target": ADAPTED,
    "data.curriculum.every": "it decides whether the checkpoint has the tasks' pass rates",
    "data.curriculum.profile": "the pass rates of the finished steps started from it",
    "critic.body": "the checkpoint contains the critic that this setting created",
    "trainer.weights": STATE,
    "trainer.rounding": STATE,
    "trainer.optimizer": STATE,
    "reference.precision": "the checkpoint contains a reference in this precision",
    "reference.path": "the finished steps used this reference model",
    "sync": SAMPLER,
    "placement.kind": SAMPLER,
    "rollout.staleness": "it decides whether the checkpoint says which groups are trained",
    "rollout.max_failures": "it decides whether the checkpoint says which prompts are set aside",
    "replay": "the checkpoint contains the buffer that it describes",
    "pretrain": "the windows and learning rates of the finished steps come from it",
    "sft": SFT,
    "preference": "the losses and learning rates of the finished steps come from it",
    "comparisons": "the comparisons of the finished steps come from it",
    "reward_model": "the losses of the finished steps come from it",
    "prm": "the losses of the finished steps come from it",
}
"""Setting or section -> reason why a resumed run cannot change it."""

FREE: dict[str, str] = {
    "run": "when the run ends, its limits and the machine",
    "model.chat_template": TOKENS_DECIDE,
    "model.template_args": TOKENS_DECIDE,
    "data": "the tasks are compared: other tasks are refused",
    "environment": "changed rewards are reported",
    "rollout": "takes effect from the next step",
    "engine": "takes effect from the next step",
    "algorithm": "takes effect from the next step",
    "critic": "takes effect from the next step",
    "reference": "takes effect from the next step",
    "trainer": "takes effect from the next step",
    "moe": "takes effect from the next step",
    "sample": "completions sampled under other settings are refused",
    "eval": "takes effect from the next evaluation",
    "checkpoint": "takes effect from the next step",
    "log": "takes effect from the next step",
    "placement": "takes effect at once: samplers get the checkpoint's weights",
    "parallel": "weights and optimizer state are sharded anew",
}
"""Setting or section -> effect of a change. A setting takes precedence over its section.

Every new section needs a line here or in FIXED. A test checks that the two are complete.
"""

WHILE_WARMING_UP = ("sft.steps", "sft.stop_at_accuracy")
"""Settings that decide when SFT ends. They may change until it has ended."""

NAMES = ("run.name", "run.dir")
"""Settings that a resume ignores: the resumed folder keeps its name."""


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Every setting that identifies a run, by dotted key, as JSON restores it."""
    values: dict[str, Any] = json.loads(json.dumps(flat(recipe)))
    return {key: value for key, value in values.items() if key not in NAMES}


def allowed_changes(saved: Mapping[str, Any], recipe: Recipe, *, warming_up: bool) -> list[str]:
    """Settings that changed since the checkpoint, as `key old -> new`.

    Args:
        saved: `settings_of` the recipe that made the checkpoint. A missing setting is new and had
            its default.
        recipe: recipe requested for the resumed run.
        warming_up: True if the checkpoint was made during SFT.

    Raises:
        UserError: if a setting changed that a resumed run cannot change.
    """
    asked = settings_of(recipe)
    defaults = {key: knob.default for key, knob in knobs().items()}
    changed = [key for key, value in asked.items() if value != saved.get(key, defaults[key])]
    for key in changed:
        reason = why_fixed(key)
        if reason and not (warming_up and key in WHILE_WARMING_UP):
            old = _shown(saved.get(key, defaults[key]))
            raise UserError(
                f"{key} cannot change from {old} to {_shown(asked[key])} on resume: {reason}; leave"
                " it as it was, or start a new run"
            )
    return [
        f"{key} {_shown(saved.get(key, defaults[key]))} -> {_shown(asked[key])}" for key in changed
    ]


def why_fixed(key: str) -> str:
    """Reason why a resumed run cannot change a setting. Empty if it can.

    Raises:
        ValueError: if there is no such setting.
    """
    if key not in knobs():
        raise ValueError(f"{key} is not a setting")
    return "" if key in FREE else FIXED.get(key) or FIXED.get(key.partition(".")[0], "")


def _shown(value: Any) -> str:
    return "unset" if value is None else toml_literal(value)
