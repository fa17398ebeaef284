"""`sixfold algorithms [NAME] [--convert FRAMEWORK | --try]`.

Prints the tables of algorithms and preference losses, one of them in full, or the settings of
another framework that give the same numbers; or runs one on a small task.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from textwrap import fill, indent
from typing import Literal, Protocol

from .. import plugins
from ..algorithm.lineage import NAMING, cells, changes, docstring, home
from ..algorithm.method import ADVANTAGES, LOSSES, Method
from ..algorithm.zoo import ZOO
from ..cli.parsing import RECIPE_HELP, NonNegativeInt, VerbParser, argument, option
from ..errors import UserError, nearest
from ..preference.loss import PreferenceLoss
from ..preference.zoo import LOSSES as PREFERENCES
from ..recipe.algorithm_plan import resolve_algorithm
from ..recipe.dump import toml_literal
from ..recipe.explain.preference_losses import loss_cells, loss_dict, loss_text, named_elsewhere
from ..recipe.knobs import knobs
from ..recipe.schema import Recipe
from ..recipe.stages import Stage
from ..recipe.toml import load_staged, split_stage

FIXED = {
    "tau_negative": "temperature of the soft gate where A < 0",
    "gamma": "discount factor per token",
    "value_clip": "largest change of a critic value from its value at collection",
    "overlong_penalty": "reward subtracted at the end of the overlong buffer",
    "overlong_truncated_only": "apply the overlong buffer only to truncated answers",
}
"""Fields of a method that are not settings of a recipe, with descriptions."""


Row = Method | PreferenceLoss


class Converter(Protocol):
    """Settings of another framework that give the same numbers (`plugins.CONVERTERS`)."""

    def __call__(
        self,
        framework: str,
        rows: Sequence[Row],
        recipe: Recipe | None,
        stages: Sequence[Stage],
        *,
        as_json: bool,
        width: int,
    ) -> str:
        """The settings as text or JSON.

        Args:
            framework: name of the framework.
            rows: algorithms, or preference losses.
            recipe: gives the sizes and the other settings. None: sizes of a recipe that sets none.
            stages: stages of a recipe, which are converted in place of rows.
            as_json: JSON instead of text.
            width: columns of the text.
        """


@dataclass(frozen=True, kw_only=True)
class Options:
    name: str | None = argument(
        "show this algorithm or preference loss: formula, changes, all choices, and recipe lines;"
        " with --convert also a recipe",
        None,
    )
    recipe: str | None = option(
        "with --convert: convert this recipe: its algorithm with its numbers, its sizes, and its"
        f" other settings; {RECIPE_HELP}"
    )
    convert: str = option(
        "print settings for verl, trl or openrlhf that give the same numbers (preference losses:"
        " trl)",
        "",
        choices=plugins.names(plugins.CONVERTERS),
        metavar="FRAMEWORK",
    )
    format: Literal["text", "markdown", "json"] = option(
        "output format: text (default), markdown or json", "text", metavar="FORMAT"
    )
    try_: bool = option(
        "run it", False, group="a run of NAME on sums of two numbers, about a minute"
    )
    steps: NonNegativeInt | None = option("RL steps, or steps of the preference loss")
    sft_steps: NonNegativeInt | None = option("SFT steps before them")
    seed: NonNegativeInt | None = option("seed of everything")


PARSER = VerbParser(
    "algorithms",
    "List the algorithms and preference losses and what each changes in its predecessor, show one"
    " in full, or print the settings of another framework that give the same numbers.",
    Options,
)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    if given.convert and given.recipe is None and _is_recipe(given.name or ""):
        given = replace(given, name=None, recipe=given.name)
    if given.recipe is not None:
        if not given.convert:
            raise UserError("sixfold algorithms: --recipe needs --convert FRAMEWORK")
        print(_converted_recipe(given, given.recipe))
        return 0
    known: dict[str, Row] = {**ZOO, **PREFERENCES}
    if given.name is not None and given.name not in known:
        others = named_elsewhere(given.name)
        hint = f" See {', '.join(others)}." if others else ""
        raise UserError(
            f"no algorithm or preference loss '{given.name}'."
            f"{hint or nearest(given.name, list(known))} Known: {', '.join(known)}"
        )
    asked = {
        name: value
        for name in ("steps", "sft_steps", "seed")
        if (value := getattr(given, name)) is not None
    }
    if asked and not given.try_:
        raise UserError(f"sixfold algorithms: --{next(iter(asked)).replace('_', '-')} needs --try")
    if given.try_:
        if given.name is None or given.convert:
            raise UserError("sixfold algorithms: --try needs a NAME, and no --convert")
        if given.name in PREFERENCES:
            from ..preference.small_task import try_loss

            if "sft_steps" in asked:
                raise UserError("sixfold algorithms: --sft-steps is for algorithms, not for losses")
            try_loss(PREFERENCES[given.name], **asked)
            return 0
        from .shared_task import try_algorithm

        try_algorithm(given.name, **asked)
        return 0
    algorithms, losses = list(ZOO.values()), list(PREFERENCES.values())
    rows: list[Row] = [known[given.name]] if given.name else [*algorithms, *losses]
    if given.format == "markdown" and (given.name or given.convert):
        raise UserError(
            "sixfold algorithms: --format markdown prints the whole table only; with NAME or"
            " --convert use text or json"
        )
    if given.convert:
        print(_converted(given, rows if given.name else algorithms))
    elif given.format == "json":
        print(_json([_as_dict(row) for row in rows]))
    elif given.name:
        print(one(rows[0], _width()))
    elif given.format == "markdown":
        print(markdown_table(algorithms), markdown_table(losses), sep="\n\n")
    else:
        print(text_table(algorithms, _width()), text_table(losses, _width()), sep="\n\n")
    return 0


def _is_recipe(name: str) -> bool:
    return Path(split_stage(name)[0]).suffix == ".toml"


def _converted_recipe(given: Options, path: str) -> str:
    """A recipe's settings: of all its stages, of the one that is named, or of its algorithm."""
    file, name = split_stage(path)
    staged = load_staged(file)
    stages = staged.stages
    if name:
        stages = (stages[staged.position(name, file)],)
    if stages:
        if given.name is not None:
            raise UserError(
                f"sixfold algorithms {given.name}: {path} has stages, which have algorithms and"
                " losses of their own. Give one of them"
            )
        return _converted(given, (), stages=stages)
    method = resolve_algorithm(staged.base.algorithm)
    if given.name not in (None, method.name):
        raise UserError(
            f"sixfold algorithms {given.name}: the algorithm of {path} is {method.name}. Give one"
            " of them"
        )
    return _converted(given, (method,), staged.base)


def _converted(
    given: Options,
    rows: Sequence[Row],
    recipe: Recipe | None = None,
    stages: Sequence[Stage] = (),
) -> str:
    converter: Converter = plugins.load(plugins.CONVERTERS, given.convert)
    return converter(
        given.convert,
        rows,
        recipe,
        stages,
        as_json=given.format == "json",
        width=_width(),
    )


def _width() -> int:
    return shutil.get_terminal_size(fallback=(160, 24)).columns


def _json(value: object) -> str:
    return json.dumps(value, indent=2)


def _as_dict(row: Row) -> dict[str, object]:
    if isinstance(row, PreferenceLoss):
        return loss_dict(row)
    return {
        **cells(row),
        "choices": {name: getattr(row, name) for name in _choices(row)},
        "changes": [c._asdict() for c in changes(row)],
    }


def _cells(row: Row) -> dict[str, str]:
    return loss_cells(row) if isinstance(row, PreferenceLoss) else cells(row)


def text_table(rows: Sequence[Row], width: int) -> str:
    """Table of algorithms or of preference losses, split into blocks that fit the width.

    Each block starts with names.
    """
    table = [_cells(row) for row in rows]
    widths = {
        column: max(len(column), *(len(line[column]) for line in table)) for column in table[0]
    }
    blocks: list[list[str]] = [["name"]]
    for column in list(widths)[1:]:
        if sum(widths[c] + 2 for c in [*blocks[-1], column]) - 2 > width and len(blocks[-1]) > 1:
            blocks.append(["name"])
        blocks[-1].append(column)
    head = {column: column for column in widths}
    rule = {column: "-" * widths[column] for column in widths}
    lines = [
        "\n".join(
            "  ".join(line[c].ljust(widths[c]) for c in block).rstrip()
            for line in (head, rule, *table)
        )
        for block in blocks
    ]
    return "\n\n".join(lines)


def markdown_table(rows: Sequence[Row]) -> str:
    """Table for docs/algorithms/README.md or docs/preference_losses.md. Each name is a link."""
    table = [{name: text.replace("|", r"\|") for name, text in _cells(row).items()} for row in rows]
    lines = [
        list(table[0]),
        ["---"] * len(table[0]),
        *([_linked(line["name"]), *list(line.values())[1:]] for line in table),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _linked(name: str) -> str:
    return f"[{name}]({f'#{name}' if name in PREFERENCES else f'{home(name).stem}.md'})"


def one(row: Row, width: int) -> str:
    """One algorithm or loss in full: what it is, changes, choices with meanings, recipe lines."""
    if isinstance(row, PreferenceLoss):
        return loss_text(row, width)
    parts = [
        docstring(row.name),
        *_patch_text(row),
        _choices_text(row, width),
        "in a recipe\n" + indent("\n".join(recipe_lines(row)), "  "),
    ]
    return "\n\n".join(parts)


def _patch_text(row: Method) -> Iterator[str]:
    if row.patches:
        lines = [
            f"  {c.field:<18}{_literal(c.before)} -> {_literal(c.after)}" for c in changes(row)
        ]
        yield "\n".join([f"changes to {row.patches}", *lines])


def _choices(row: Method) -> list[str]:
    return [field.name for field in fields(row) if field.name not in NAMING]


def meaning(field: str) -> str:
    """Description of a choice: that of the recipe's setting, or of `FIXED`."""
    knob = knobs().get(f"algorithm.{field}")
    return knob.description if knob else f"{FIXED[field]} (no setting)"


def _choices_text(row: Method, width: int) -> str:
    extra = {
        "advantage": "; baseline: {0.baseline}, divided by: {0.scale}".format(
            ADVANTAGES[row.advantage]
        ),
        "loss": f"; ratio: {LOSSES[row.loss].ratio}",
    }
    lines = ["all choices"]
    for name in _choices(row):
        start = f"  {name + ' = ' + _literal(getattr(row, name)):<42}"
        lines.append(
            fill(
                meaning(name) + extra.get(name, ""),
                max(width, 80),
                initial_indent=start,
                subsequent_indent=" " * 44,
            )
        )
    return "\n".join(lines)


def recipe_lines(row: Method) -> list[str]:
    """Recipe lines that select the algorithm."""
    lines = ["[algorithm]", f'name = "{row.name}"']
    if row.group_baseline or row.dynamic_sampling:
        lines += [
            "",
            "[rollout]",
            f"samples_per_prompt = {Recipe().rollout.samples_per_prompt}  # at least 2",
        ]
    if row.needs_critic:
        lines += [
            "",
            "[critic]",
            (
                f'body = "{Recipe().critic.body}"  # or "policy": a value head on the policy\'s'
                " features"
            ),
        ]
    if row.advantage == "normalise_then_sum":
        lines += ["", "[environment]", 'rewards = ["...", "..."]  # several, and their weights']
    if row.needs_teacher:
        lines += ["", "[reference]", 'path = "..."  # the teacher']
    return lines


def _literal(value: object) -> str:
    return "none" if value is None else toml_literal(value)
