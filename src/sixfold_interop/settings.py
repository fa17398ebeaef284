"""Settings that a recipe and another framework both have: the tables trl.toml, verl.toml and
openrlhf.toml, read in both directions. No torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sixfold.recipe.dump import flat, toml_literal
from sixfold.recipe.schema import Recipe
from sixfold.recipe.stages import KINDS, REFERENCE, Kind

NEVER = ("data.source", "run.dir", "rollout.backend.kind")
"""Settings of a recipe that another framework does not get: they have another meaning there."""
UNSET: tuple[object, ...] = (None, "", (), [])


class Same(NamedTuple):
    """A setting of a framework that a recipe has too.

    Attributes:
        ours: key of the recipe. A number at its end is an index into a list.
        default: the framework's default. None: it has none, or the recipe's own holds.
        values: values by the framework's values as text. Empty: both are equal.
    """

    ours: str
    default: Any = None
    values: Mapping[str, str] = {}

    def converted(self, value: Any) -> Any:
        """The recipe's value. None: there is none."""
        if self.values:
            return self.values.get(_text(value))
        # Frameworks switch off with -1 what a recipe switches off with 0.
        return 0 if value in (-1, -1.0) else value

    def reverted(self, value: Any) -> Any:
        """The framework's value. None: there is none."""
        if not self.values:
            return -1 if self.default == -1 and value == 0 else value
        texts = [theirs for theirs, ours in self.values.items() if ours == value]
        return {"true": True, "false": False}.get(texts[0], texts[0]) if texts else None


@dataclass(frozen=True)
class Table:
    """Settings of a framework.

    Attributes:
        same: those that a recipe has too, by name.
        read: those that decide sizes and numbers of the method.
        older: names of older versions, with today's.
        of_rl: those of `names` that only the trainers of RL have.
        only_in: those of `same` that are read and not written: they are no settings of the
            entry, but of a script or of older versions.
    """

    same: Mapping[str, Same]
    read: frozenset[str]
    older: Mapping[str, str]
    names: frozenset[str]
    only_in: frozenset[str]
    of_rl: frozenset[str] = frozenset()

    def today(self, name: str) -> str:
        """Today's name of a setting. Older versions had some names without what is before a dot."""
        if name in self.names or name in self.older:
            return self.older.get(name, name)
        now = [one for one in self.names if one.rpartition(".")[2] == name]
        return now[0] if len(now) == 1 else name


@cache
def table(framework: str) -> Table:
    """The table of a framework: "trl", "verl" or "openrlhf"."""
    file = Path(__file__).parent / f"{framework}.toml"
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    of_rl = frozenset(read.get("names_of_rl", {}).get("", "").split())
    names = of_rl | {
        f"{before}.{name}" if before else name
        for before, names in read["names"].items()
        for name in names.split()
    }
    same = {name: Same(*given) for name, given in read["same"].items()}
    return Table(
        same,
        frozenset(read["read"].split()),
        read["older"],
        frozenset(names),
        frozenset(read["only_in"].split()),
        of_rl,
    )


def theirs(known: Table, recipe: Mapping[str, Any], critic: bool) -> dict[str, Any]:
    """Settings of a framework that a recipe has too, by the framework's names.

    Args:
        critic: whether the method has a critic.
    """
    found = {}
    without = NEVER + (("critic.",) if not critic else ())
    without += ("model.lora.",) if not recipe["model.lora.rank"] else ()
    without += ("data.max_prompt_tokens",) if not recipe["data.max_prompt_tokens"] else ()
    for name, same in known.same.items():
        value = None if name in known.only_in else recipe.get(same.ours)
        key, _, index = same.ours.rpartition(".")
        if index.isdigit():
            value = recipe[key][int(index)]
        skipped = value in UNSET or same.ours.startswith(without)
        skipped = skipped or str(value).startswith(REFERENCE)  # the result of an earlier stage
        value = None if skipped else same.reverted(value)
        if value is not None and value != same.default:
            found[name] = value
    return found


def ours(known: Table, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings of a recipe that a framework's settings give, by key, and notes.

    Args:
        given: the framework's settings by name. Others have its defaults.
    """
    found: dict[str, Any] = {}
    notes = []
    for name, same in known.same.items():
        value = given.get(name, same.default)
        if value is None:
            continue
        made = same.converted(value)
        if made is None:
            notes.append(f"{name} = {value!r} has no counterpart: {same.ours} keeps its default")
            continue
        key, _, index = same.ours.rpartition(".")
        if index.isdigit():
            found.setdefault(key, []).append(made)
        else:
            found[same.ours] = made
    return found, notes


def left_over(
    recipe: Mapping[str, Any], covered: Set[str], kind: Kind | None = None
) -> tuple[str, ...]:
    """A note with the settings of a recipe that have no counterpart, if there are any.

    Args:
        kind: kind of the stage whose recipe it is. None: a recipe without stages.
    """
    plain = flat(Recipe())
    others = {name for row in KINDS.values() for name in row.sections}
    others -= {*kind.sections} if kind else others
    left = [
        f"{key} = {toml_literal(value)}"
        for key, value in recipe.items()
        if value != plain.get(key)
        and (key not in covered or str(value).startswith(REFERENCE))
        and key.partition(".")[0] not in others
    ]
    return (f"not converted: {', '.join(left)}",) if left else ()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
