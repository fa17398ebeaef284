"""The preference losses in `sixfold algorithms`, and in docs/preference_losses.md. No torch."""

from __future__ import annotations

import re
from dataclasses import asdict
from textwrap import fill, indent

from ...preference.loss import PreferenceLoss
from ...preference.zoo import LOSSES
from ..dump import toml_literal
from ..knobs import knobs


def loss_cells(row: PreferenceLoss) -> dict[str, str]:
    """One line of the table of losses, by column."""
    return {
        "name": row.name,
        "patches": row.patches or "-",
        "data": "labels" if row.unpaired else "pairs",
        "models in memory": "policy + reference" if row.needs_reference else "policy",
        "of the whole step": row.statistics or ("tokens" if row.defaults.sft_weight else "-"),
        "formula": row.formula,
        "paper": row.paper,
    }


def loss_dict(row: PreferenceLoss) -> dict[str, object]:
    """The row and its settings, for JSON."""
    settings = {name: getattr(row.defaults, name) for name in row.reads}
    return {
        **loss_cells(row),
        "change": row.change,
        "use": row.use,
        "peers": row.peers,
        "choices": settings,
        "defaults": asdict(row.defaults),
    }


def loss_recipe_lines(row: PreferenceLoss) -> list[str]:
    """Recipe lines of a stage with the loss."""
    return [
        "[[stages]]",
        'kind = "preference"',
        f'data.source = "..."  # {"completion, label" if row.unpaired else "chosen, rejected"}',
        "preference.epochs = 1",
        f'preference.losses = ["{row.name}"]',
    ]


def named_elsewhere(name: str) -> list[str]:
    """Losses whose paper or names in other frameworks have a name."""
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)
    return [row.name for row in LOSSES.values() if word.search(f"{row.peers} {row.paper}")]


def loss_facts(row: PreferenceLoss) -> list[tuple[str, str]]:
    """(title, text) of what is known of the loss."""
    change = ("what it changes", row.change)
    return [
        ("formula", row.formula),
        (f"what it changes in {row.patches}", row.change) if row.patches else change,
        ("when", row.use),
        ("cost", row.cost),
        ("elsewhere", row.peers),
    ]


def loss_settings(row: PreferenceLoss) -> list[tuple[str, str, str]]:
    """(key, the loss's own value, description) of each setting that it reads."""
    return [
        (
            f"preference.{name}",
            toml_literal(getattr(row.defaults, name)),
            knobs()[f"preference.{name}"].description,
        )
        for name in row.reads
    ]


def loss_text(row: PreferenceLoss, width: int) -> str:
    """One loss in full, for the terminal."""
    facts = [
        fill(f"{title}: {text}", max(width, 80), subsequent_indent="  ")
        for title, text in loss_facts(row)
    ]
    settings = [
        fill(
            text,
            max(width, 80),
            initial_indent=f"  {key.partition('.')[2] + ' = ' + value:<32}",
            subsequent_indent=" " * 34,
        )
        for key, value, text in loss_settings(row)
    ]
    return "\n\n".join(
        [
            f"{row.name}, a preference loss: {row.paper}",
            "\n".join(facts),
            "\n".join(["settings", *settings]),
            "in a recipe\n" + indent("\n".join(loss_recipe_lines(row)), "  "),
        ]
    )
