"""`sixfold algorithms [NAME] [--convert FRAMEWORK]`.

Prints the table of algorithms, one algorithm in full, or the settings of another framework that
give the same numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from textwrap import fill, indent

from ..algorithm.lineage import NAMING, cells, changes, docstring, home
from ..algorithm.method import ADVANTAGES, LOSSES, Method
from ..algorithm.zoo import ZOO
from ..errors import UserError, nearest
from ..interop import FRAMEWORKS, Conversion, Sizes, convert
from ..recipe.dump import toml_literal
from ..recipe.knobs import knobs
from ..recipe.schema import Recipe
from .parsing import VerbParser

FIXED = {
    "tau_negative": "temperature of the soft gate where A < 0",
    "gamma": "discount factor per token",
    "value_clip": "largest change of a critic value from its value at collection",
    "overlong_penalty": "reward subtracted at the end of the overlong buffer",
    "overlong_truncated_only": "apply the overlong buffer only to truncated answers",
}
"""Fields of a method that are not settings of a recipe, with descriptions."""

_SHELL = set(" $[]{}()\"'*?&|<>;")


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser(
        "algorithms",
        "List the algorithms and what each changes in its predecessor, show one in full, or print"
        " the settings of another framework that give the same numbers.",
    )
    arguments.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="show this algorithm: formula, changes, all choices, and recipe lines",
    )
    arguments.add_argument(
        "--convert",
        metavar="FRAMEWORK",
        choices=list(FRAMEWORKS),
        help="print settings for verl, trl or openrlhf that give the same numbers",
    )
    arguments.add_argument(
        "--format",
        metavar="FORMAT",
        choices=["text", "markdown", "json"],
        default="text",
        help="output format: text (default), markdown or json",
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Parse the arguments and print."""
    given, _ = parser().parse(argv)
    if given.name is not None and given.name not in ZOO:
        raise UserError(
            f"no algorithm '{given.name}'.{nearest(given.name, list(ZOO))} Known: {', '.join(ZOO)}"
        )
    rows = [ZOO[given.name]] if given.name else list(ZOO.values())
    if given.format == "markdown" and (given.name or given.convert):
        raise UserError(
            "sixfold algorithms: --format markdown prints the whole table only; with NAME or"
            " --convert use text or json"
        )
    if given.convert:
        conversions = [convert(given.convert, row, default_sizes()) for row in rows]
        print(
            _json([c.as_dict() for c in conversions])
            if given.format == "json"
            else conversion_text(given.convert, conversions, _width())
        )
    elif given.format == "json":
        print(_json([_as_dict(row) for row in rows]))
    elif given.name:
        print(one(rows[0], _width()))
    else:
        print(markdown_table(rows) if given.format == "markdown" else text_table(rows, _width()))
    return 0


def _width() -> int:
    return shutil.get_terminal_size(fallback=(160, 24)).columns


def _json(value: object) -> str:
    return json.dumps(value, indent=2)


def _as_dict(row: Method) -> dict[str, object]:
    return {
        **cells(row),
        "choices": {name: getattr(row, name) for name in _choices(row)},
        "changes": [c._asdict() for c in changes(row)],
    }


def text_table(rows: Sequence[Method], width: int) -> str:
    """Table of algorithms, split into blocks that fit the width. Each block starts with names."""
    table = [cells(row) for row in rows]
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


def markdown_table(rows: Sequence[Method]) -> str:
    """Table for docs/algorithms/README.md. Each name links to the algorithm's page."""
    table = [cells(row) for row in rows]
    lines = [
        list(table[0]),
        ["---"] * len(table[0]),
        *([_linked(line["name"]), *list(line.values())[1:]] for line in table),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _linked(name: str) -> str:
    return f"[{name}]({home(name).stem}.md)"


def one(row: Method, width: int) -> str:
    """One algorithm in full: module docstring, changes, all choices with meanings, recipe lines."""
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
        lines += ["", "[rollout]", f"samples_per_prompt = {default_sizes().samples}  # at least 2"]
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


def default_sizes() -> Sizes:
    """Batch sizes of a recipe that sets none."""
    rollout = Recipe().rollout
    return Sizes(rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_new_tokens)


def conversion_text(framework: str, conversions: Sequence[Conversion], width: int) -> str:
    """Notes that hold for all rows, then for each row its settings and what they do not cover."""
    peer, sizes = FRAMEWORKS[framework], default_sizes()
    size = f"{sizes.prompts} prompts x {sizes.samples} samples a step, {sizes.horizon} tokens"
    head = [f"{peer.title}, for a recipe with {size}.", *peer.notes]
    return "\n\n".join(
        [
            "\n".join(fill(line, width, subsequent_indent="  ") for line in head),
            *(_conversion(c, width) for c in conversions),
        ]
    )


def _conversion(c: Conversion, width: int) -> str:
    write = {"verl": _hydra_lines, "trl": _python_lines, "openrlhf": _flag_lines}[c.framework]
    lines = [f"{c.row} in {c.framework}", "", *write(c.entry, c.changed), *c.also]
    if c.kept:
        kept = ", ".join(f"{key} = {value!r}" for key, value in c.kept.items())
        lines += [
            "",
            fill(
                f"defaults that must stay: {kept}",
                width,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            ),
        ]
    for title, notes in (("difference", c.differs), ("not available", c.lacks)):
        lines += [fill(f"{title}: {note}", width, subsequent_indent="  ") for note in notes]
    return "\n".join(lines)


def _hydra_lines(entry: str, settings: Mapping[str, object]) -> list[str]:
    return _command(entry, [_quoted(f"{key}={_hydra(value)}") for key, value in settings.items()])


def _hydra(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return f'"{value}"' if isinstance(value, str) and value[:1].isdigit() else str(value)


def _flag_lines(entry: str, settings: Mapping[str, object]) -> list[str]:
    words = {
        key: value if isinstance(value, tuple) else () if value is True else (value,)
        for key, value in settings.items()
    }
    return _command(
        entry, [" ".join([f"--{key}", *map(str, values)]) for key, values in words.items()]
    )


def _python_lines(entry: str, settings: Mapping[str, object]) -> list[str]:
    return [f"{entry}(", *(f"    {key}={value!r}," for key, value in settings.items()), ")"]


def _command(entry: str, words: Sequence[str]) -> list[str]:
    return [f"{line} \\" for line in [entry, *(f"  {word}" for word in words)][:-1]] + [
        f"  {words[-1]}"
    ]


def _quoted(word: str) -> str:
    return f"'{word}'" if _SHELL & set(word) else word
