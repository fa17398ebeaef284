"""Check the keys of a recipe: every leaf is a setting, every table a section. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from ..errors import UserError, nearest
from .knobs import Knob, kind_knobs, knobs, sections

_SECRET = re.compile(
    r"(^|[_-])(token|api[_-]?key|secret|password|passwd|credentials?)$", re.IGNORECASE
)


REMOVED: Mapping[str, tuple[object, str]] = {
    "engine.continuous": (True, "waiting sequences always start as others finish"),
}
"""Earlier setting -> the value that always holds now, and what that means."""


def drop_removed(tree: Mapping[str, Any]) -> None:
    """Drop earlier settings from a recorded recipe, if it has the values that always hold now.

    A run folder records every setting, also those of an earlier version.
    """
    for key, (value, _) in REMOVED.items():
        section, name = key.split(".")
        table = tree.get(section)
        if isinstance(table, dict) and table.get(name) == value:
            del table[name]


def check_keys(tree: Mapping[str, Any], place: Callable[[str], str], prefix: str = "") -> None:
    """Check that every leaf is a setting and every table a section.

    Values are not shown in these errors, because a misplaced key may be a secret.

    Raises:
        UserError: with the nearest valid name.
    """
    for name, value in tree.items():
        key = prefix + name
        if key in sections():
            if not isinstance(value, dict):
                raise UserError(f"{_value_for_section(key, value)} ({place(key)})")
            check_keys(value, place, key + ".")
        elif key not in knobs():
            raise UserError(f"{_unknown_key(key, value)} ({place(key)})")
        elif isinstance(value, dict):
            wanted = knobs()[key].accepts
            raise UserError(f"{key}: expected {wanted}, got a table ({place(key)})")
        elif knobs()[key].fields and isinstance(value, list):
            _check_tables(knobs()[key], value, place)


def _value_for_section(key: str, value: Any) -> str:
    """Error message for a section that is written like a setting."""
    kind = kind_knobs().get(key)
    if kind is None:
        named = ("model.path", "algorithm.name", "data.source")
        keys = [k for k in (*named, *knobs()) if k.startswith(key + ".")]
        example = keys[0]
        return f"'{key}' is a section, not a setting. Set one of its settings, e.g. {example}"
    meant = next((c for c in kind.choices if str(value).partition(":")[0] == c), "")
    fields = [k.key for k in knobs().values() if k.section == key and meant in k.kinds]
    more = f" and, for example, {fields[0]}" if fields else ""
    example = f"{kind.key} = '{meant or kind.choices[0]}'{more}"
    return f"'{key}' is a section, not a setting. Set {example}"


def _check_tables(knob: Knob, tables: Sequence[Any], place: Callable[[str], str]) -> None:
    """Check that each item of a list of tables is a table with known names."""
    for number, table in enumerate(tables, start=1):
        if not isinstance(table, dict):
            raise UserError(
                f"{knob.key}: entry {number} is {shown(table)}, expected a table such as"
                f" [[{knob.key}]] ({place(knob.key)})"
            )
        for name in table:
            if name not in knob.fields:
                raise UserError(
                    f"unknown key '{name}' in {knob.key}, entry"
                    f" {number}.{nearest(name, list(knob.fields))} ({place(f'{knob.key}.{name}')})"
                )


MEANT = {
    "lr": "trainer.learning_rate",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "max_steps": "run.steps",
    "total_steps": "run.steps",
    "train_steps": "run.steps",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "folder": "run.dir",
    "output": "run.dir",
    "out": "run.dir",
    "batch_size": "rollout.prompts_per_step",
    "train_batch_size": "rollout.prompts_per_step",
    "num_generations": "rollout.samples_per_prompt",
    "group_size": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "reward": "environment.rewards",
    "reward_funcs": "environment.rewards",
    "kl_coef": "algorithm.beta",
    "kl_loss_coef": "algorithm.beta",
    "num_epochs": "algorithm.epochs",
    "num_iterations": "algorithm.epochs",
    "max_grad_norm": "trainer.grad_clip",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "bf16": "run.precision",
    "dtype": "run.precision",
}
"""Names that other trainers use -> setting."""
_OF_STAGES = {
    "lr": "learning_rate",
    "batch_size": "examples_per_step",
    "train_batch_size": "examples_per_step",
    "max_steps": "steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
}
"""The same in the section of a stage that trains on examples."""
_OF_COMPARISONS = {
    "loss": "preference.losses",
    "loss_type": "preference.losses",
    "loss_weights": "preference.weights",
    "gamma": "preference.target_margin",
    "precompute_ref_log_probs": "preference.reference",
    "max_length": "comparisons.max_tokens",
    "max_len": "comparisons.max_tokens",
}
"""The same in [preference], [reward_model] and [comparisons]."""


def _unknown_key(key: str, value: Any) -> str:
    """Error message for an unknown key."""
    if key in REMOVED:
        return f"{key} is no longer a setting: {REMOVED[key][1]}. Remove it"
    name = key.rpartition(".")[2].replace("-", "_").casefold()
    if isinstance(value, str) and _SECRET.search(name):
        variable = name.upper().replace("-", "_")
        return (
            f"'{key}' looks like a secret, and a recipe must not contain secrets (value not"
            f" shown). Set the environment variable {variable}"
        )
    section = key.rpartition(".")[0]
    if (own := f"{section}.{_OF_STAGES.get(name, '')}") in knobs():
        return f"unknown key '{key}'. Did you mean '{own}'?"
    if section in ("preference", "reward_model", "comparisons") and name in _OF_COMPARISONS:
        meant = _OF_COMPARISONS[name]
        if section == "reward_model" and meant.startswith("preference."):
            meant = "reward_model.loss" if name == "loss_type" else ""
        if meant:
            return f"unknown key '{key}'. Did you mean '{meant}'?"
    if name in MEANT:
        return f"unknown key '{key}'. Did you mean '{MEANT[name]}'?"
    homes = [knob for knob in knobs().values() if knob.name == name]
    if homes:
        return f"'{key}' belongs under " + " or ".join(
            f"'{knob.section}' ({knob.key})" for knob in homes
        )
    parents = [s.rpartition(".")[0] for s in sorted(sections()) if s.rpartition(".")[2] == name]
    if parents and all(parents):
        return f"section '{key}' belongs under " + " or ".join(
            f"'{parent}' ({parent}.{name})" for parent in parents
        )
    kind = kind_knobs().get(section)
    if kind is not None and value in kind.choices:
        return f"unknown key '{key}'. Write {kind.key} = '{value}'"
    takers = [
        knob.key
        for knob in knobs().values()
        if name in knob.choices
        and (
            knob.section == section
            or (knob.name == "kind" and knob.section.rpartition(".")[0] == section)
        )
    ]
    if takers:
        return f"unknown key '{key}': '{name}' is a value of {takers[0]}"
    # Compare names without their section: a long shared prefix would make all keys look similar.
    everywhere = {knob.name: knob.key for knob in reversed(list(knobs().values()))}
    siblings = {
        child.rpartition(".")[2]: child
        for child in [*knobs(), *sorted(sections())]
        if child.rpartition(".")[0] == key.rpartition(".")[0]
    }
    near = [siblings[n] for n in get_close_matches(name, siblings, n=1)]
    near += [everywhere[n] for n in get_close_matches(name, everywhere, n=1, cutoff=0.75)]
    if near:
        return f"unknown key '{key}'. Did you mean '{near[0]}'?"
    what = f"The settings of '{section}'" if section else "The sections of a recipe"
    return f"unknown key '{key}'. {what} are {', '.join(siblings)}"


def shown(value: Any) -> str:
    """A value in one short line."""
    if isinstance(value, dict):
        return "a table"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def bad_value(knob: Knob, asked: Mapping[str, Any]) -> str:
    """Error message for a value that a setting does not accept."""
    value: Any = asked
    for part in knob.key.split("."):
        value = value[part]
    wrong = [
        item
        for item in (value if isinstance(value, list) else [value])
        if isinstance(item, str) and item not in knob.choices
    ]
    near = nearest(wrong[0], list(knob.choices)) if wrong else ""
    return f"{knob.key}: expected {knob.accepts}, got {shown(value)}{near and '.' + near}"
