"""`sixfold algorithms --convert`, as a `sixfold.commands.algorithms.Converter`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import Any

from sixfold.algorithm.method import Method
from sixfold.errors import UserError
from sixfold.preference.loss import PreferenceLoss
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.dump import flat
from sixfold.recipe.schema import Recipe, RolloutConfig
from sixfold.recipe.stages import Kind, Stage

from . import FRAMEWORKS, Conversion, Sizes, convert, written
from .settings import left_over
from .trl_preference import converted_loss, only_trl
from .trl_stages import SIZES, converted_stage, yaml_lines

_SIZES = ("prompts_per_step", "samples_per_prompt", "max_new_tokens")
_SHELL = set(" $[]{}()\"'*?&|<>;")


def converted(
    framework: str,
    rows: Sequence[Method | PreferenceLoss],
    recipe: Recipe | None,
    stages: Sequence[Stage],
    *,
    as_json: bool,
    width: int,
) -> str:
    if stages:
        return _stages(framework, stages, as_json=as_json, width=width)
    losses = [row for row in rows if isinstance(row, PreferenceLoss)]
    if losses:
        only_trl(framework, losses[0])
        made = [converted_loss(row) for row in losses]
        if as_json:
            return json.dumps([conversion.as_dict() for conversion in made], indent=2)
        return "\n\n".join([f"{FRAMEWORKS['trl'].title}.", *(_conversion(c, width) for c in made)])
    methods = [row for row in rows if isinstance(row, Method)]
    sizes = _sizes((recipe or Recipe()).rollout)
    if recipe is None:
        found = [convert(framework, row, sizes) for row in methods]
    else:
        values = flat(recipe)
        found = [_of_recipe(framework, row, values, sizes) for row in methods]
    if as_json:
        return json.dumps([conversion.as_dict() for conversion in found], indent=2)
    return conversion_text(framework, found, width, sizes)


def _stages(framework: str, stages: Sequence[Stage], *, as_json: bool, width: int) -> str:
    """The settings of each stage that the framework can run.

    Raises:
        UserError: if it can run none.
    """
    made: list[Conversion] = []
    left: list[Conversion] = []
    for stage in stages:
        recipe = stage.recipe
        if stage.kind in ("preference", "reward_model") and framework == "trl":
            made.append(converted_stage(stage))
        elif stage.kind == "rl":
            row = resolve_algorithm(recipe.algorithm)
            conversion = _of_recipe(framework, row, flat(recipe), _sizes(recipe.rollout), stage.row)
            made.append(replace(conversion, row=stage.name))
        else:
            said = f"stage {stage.name} of kind {stage.kind} is not converted to {framework}"
            left.append(Conversion(framework, stage.name, "", {}, {}, (), (), (said,)))
    unconverted = [c.lacks[0] for c in left]
    if not made:
        raise UserError(
            f"{unconverted[0]}. Name a stage of kind rl, or for trl preference, reward_model"
        )
    if as_json:
        return json.dumps([conversion.as_dict() for conversion in (*made, *left)], indent=2)
    peer = FRAMEWORKS[framework]
    notes = [*(peer.notes if any(stage.kind == "rl" for stage in stages) else ())]
    notes += [SIZES] if any(c.entry.endswith("FILE") for c in made) else []
    head = [fill(line, width, subsequent_indent="  ") for line in (f"{peer.title}.", *notes)]
    return "\n\n".join(["\n".join(head), *(_conversion(c, width) for c in made), *unconverted])


def _sizes(rollout: RolloutConfig) -> Sizes:
    return Sizes(*(getattr(rollout, name) for name in _SIZES))


def _of_recipe(
    framework: str,
    method: Method,
    values: Mapping[str, Any],
    sizes: Sizes,
    kind: Kind | None = None,
) -> Conversion:
    """The settings of a recipe, from its values by dotted key. A note has what is not converted."""
    made = convert(framework, method, sizes, values)
    covered = written(framework) | {f"rollout.{name}" for name in _SIZES} | {"trainer.betas"}
    covered |= {key for key in values if key.startswith("algorithm.")}
    return replace(made, differs=(*made.differs, *left_over(values, covered, kind)))


def conversion_text(
    framework: str, conversions: Sequence[Conversion], width: int, sizes: Sizes
) -> str:
    """Notes that hold for all rows, then for each row its settings and what they do not cover."""
    peer = FRAMEWORKS[framework]
    size = f"{sizes.prompts} prompts x {sizes.samples} samples a step, {sizes.horizon} tokens"
    head = [f"{peer.title}, for a recipe with {size}.", *peer.notes]
    return "\n\n".join(
        [
            "\n".join(fill(line, width, subsequent_indent="  ") for line in head),
            *(_conversion(c, width) for c in conversions),
        ]
    )


def _conversion(c: Conversion, width: int) -> str:
    writers = {"verl": _hydra_lines, "trl": _python_lines, "openrlhf": _flag_lines}
    write = yaml_lines if c.entry.endswith("FILE") else writers[c.framework]
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
    return _command(entry, [_quote(f"{key}={_hydra(value)}") for key, value in settings.items()])


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
    if not settings:
        return [f"{entry}()"]
    return [f"{entry}(", *(f"    {key}={value!r}," for key, value in settings.items()), ")"]


def _command(entry: str, words: Sequence[str]) -> list[str]:
    return [f"{line} \\" for line in [entry, *(f"  {word}" for word in words)][:-1]] + [
        f"  {words[-1]}"
    ]


def _quote(word: str) -> str:
    return f"'{word}'" if _SHELL & set(word) else word
