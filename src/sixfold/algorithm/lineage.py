"""The zoo as a table: the choices of each row, and what it changes of its predecessor.

Everything is read from the rows and their files. No torch.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from .method import ADVANTAGES, LOSSES, Method
from .zoo import ZOO

NAMING = ("name", "patches", "paper")
"""Fields that identify a row and are not choices."""


class Change(NamedTuple):
    """A choice of a row that differs from its predecessor's."""

    field: str
    before: object
    after: object


def cells(m: Method) -> dict[str, str]:
    """One line of the lineage table, by column."""
    advantage = ADVANTAGES[m.advantage]
    return {
        "name": m.name,
        "patches": m.patches or "-",
        "baseline": advantage.baseline,
        "std/scale": advantage.scale,
        "ratio and clip": _ratio(m),
        "aggregation": m.aggregation,
        "KL": (
            f"{m.kl} in the {m.kl_in}, beta {m.beta:g}" if not m.needs_teacher else "to the teacher"
        ),
        "critic": "yes" if m.needs_critic else "no",
        "models in memory": m.models,
        "samples": _samples(m),
        "paper": m.paper,
    }


def _samples(m: Method) -> str:
    least = "K >= 2" if m.group_baseline or m.dynamic_sampling else "1"
    return f"{least} + greedy" if m.needs_greedy else least


def _ratio(m: Method) -> str:
    kind = LOSSES[m.loss]
    if kind.ratio == "none":
        return "none"
    if kind.clips is None:
        taus = [f"{tau:g}" for tau in (m.tau, m.tau_negative) if tau is not None]
        return f"{kind.ratio}, tau {' / '.join(taus)}" if taus else kind.ratio
    high = m.clip_high or 0.0
    if m.loss == "geometric_surrogate":
        return f"{kind.ratio}, log-ratios -{m.clip_low:g} to {high:g}"
    dual = f", dual {m.dual_clip:g}" if m.dual_clip else ""
    if m.clip_low is None:
        return f"{kind.ratio}, weight <= {1 + high:g}{dual}"
    return f"{kind.ratio}, {1 - m.clip_low:g} to {1 + high:g}{dual}"


def changes(m: Method) -> list[Change]:
    """Choices that differ from the predecessor's, in the order of `Method`. Empty for a root."""
    if not m.patches:
        return []
    before = ZOO[m.patches]
    choices = [field.name for field in fields(m) if field.name not in NAMING]
    return [
        Change(name, getattr(before, name), getattr(m, name))
        for name in choices
        if getattr(before, name) != getattr(m, name)
    ]


def home(name: str) -> Path:
    """The file that holds the row: `reinforce_pp_baseline` is in `reinforce_pp.py`."""
    folder = Path(__file__).parent
    return next(
        folder / f"{stem}.py" for stem in _shorter(name) if (folder / f"{stem}.py").is_file()
    )


def docstring(name: str) -> str:
    """The module docstring of the row's file, read without running it."""
    return ast.get_docstring(ast.parse(home(name).read_text(encoding="utf-8"))) or ""


def _shorter(name: str) -> list[str]:
    """The name, then the name without its last word, and so on."""
    words = name.split("_")
    return ["_".join(words[:count]) for count in range(len(words), 0, -1)]
