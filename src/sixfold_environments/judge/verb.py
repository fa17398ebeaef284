"""`sixfold critique RECIPE --out FILE`: preference pairs from drafts, critiques and revisions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from sixfold.cli.parsing import RECIPE_HELP, PositiveInt, VerbParser, argument, option
from sixfold.errors import UserError
from sixfold.files.durable import write_text_atomic
from sixfold.recipe.toml import load_recipe
from sixfold.types import Task

from .constitution import principles_of
from .critique import Draft, Pairs, preference_pairs
from .estimate import estimate_cost, in_words
from .judge import Judge
from .named_texts import NamedText, named_texts
from .of_recipe import judge_settings

PURPOSE = "make preference pairs by critique and revision of a model's answers"

TEXT = """\
Make preference pairs by critique and revision (constitutional AI).

The judge of environment.judge checks each answer against each principle. It rewrites an answer that
violates a principle. If the revision does not violate it, one JSON line is written:
{"prompt", "chosen": revision, "rejected": answer, "principle", "critique"}.

The answers come from --drafts, or are sampled from the recipe's model. The judge's replies are
stored in FILE.judge/, so a second run after a spent budget asks no question twice.
"""

QUESTIONS = 3
"""Maximum questions per draft and principle: critique, revision and check."""


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = argument(RECIPE_HELP)
    out: Path = option("new file for the pairs", MISSING, metavar="FILE")
    principles: Path | None = option(
        "principles, one per line as TEXT or NAME: TEXT; lines that begin with # are comments"
        " (default: environment.judge.constitution.principles)",
        metavar="FILE",
    )
    drafts: Path | None = option(
        "answers as JSON lines with prompt and completion (default: sample them)", metavar="FILE"
    )
    model: str = option(
        "checkpoint, run or model to sample from (default: the recipe's model)", "", metavar="DIR"
    )
    tasks: PositiveInt = option("number of training tasks to sample answers for (default 64)", 64)
    settings: tuple[str, ...] = ()


PARSER = VerbParser("critique", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    """Make the pairs, write them, and print the outcomes.

    Raises:
        UserError: if the output file exists, or an input file cannot be read.
        BudgetSpent: if the judge's budget is used up.
    """
    given = PARSER.parse(arguments)
    recipe = load_recipe(given.recipe, given.settings)
    if not recipe.environment.judge.model:
        raise UserError(
            "sixfold critique needs a judge: set environment.judge.url and environment.judge.model,"
            " or environment.judge.model alone for a local folder"
        )
    if given.drafts and given.model:
        raise UserError("sixfold critique: --drafts and --model exclude each other. Give one")
    if given.out.exists():
        raise UserError(f"--out {given.out}: it exists. Choose another file, or delete it")
    judge = Judge(judge_settings(recipe))
    try:
        principles = _principles(given.principles) if given.principles else principles_of(judge)
        if given.drafts:
            drafts = _read_drafts(given.drafts)
        else:
            from .sampled_drafts import sampled_drafts

            drafts = sampled_drafts(recipe, given.model, given.tasks)
        count = QUESTIONS * len(drafts) * len(principles)
        cost = estimate_cost(judge.settings, [draft.task for draft in drafts], count)
        print(f"judge: {in_words(cost, judge.settings)}", flush=True)
        judge.keep_in(given.out.with_name(f"{given.out.name}.judge"))
        made = asyncio.run(preference_pairs(judge, drafts, principles))
        spent = judge.spending.spent
    finally:
        judge.close()
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in made.records]
    write_text_atomic(given.out, "".join(lines))
    print(_summary(made, len(drafts), len(principles)))
    print(f"judge: {spent.calls} requests, ${spent.usd:.4g}. Pairs: {given.out}")
    return 0


def _summary(made: Pairs, drafts: int, principles: int) -> str:
    parts = ", ".join(f"{count} {name}" for name, count in made.outcomes.most_common())
    return f"{len(made.records)} pairs from {drafts} answers and {principles} principles: {parts}"


def _principles(file: Path) -> list[NamedText]:
    """Read the principles in a file."""
    source = f"--principles {file}"
    lines = [line.strip() for line in _text(file, source).splitlines()]
    given = [line for line in lines if line and not line.startswith("#")]
    try:
        return named_texts(given, "principle", source)
    except ValueError as error:
        raise UserError(f"{error}. Write one principle per line") from error


def _read_drafts(file: Path) -> list[Draft]:
    """Read prompts and completions in a file of JSON lines."""
    lines = _text(file, f"--drafts {file}").splitlines()
    drafts = [_draft(file, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not drafts:
        raise UserError(
            f"--drafts {file}: the file is empty. Give lines with 'prompt' and 'completion'"
        )
    return drafts


def _text(file: Path, source: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: cannot read the file: {error}") from error


def _draft(file: Path, number: int, line: str) -> Draft:
    """Parse a line of drafts. Lines are numbered from 1."""
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"--drafts {file}: line {number} is not JSON: {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    text = row.get("completion") if isinstance(row, dict) else None
    if isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in prompt
    ):
        prompt = tuple(prompt)
    if not prompt or not isinstance(prompt, str | tuple) or not isinstance(text, str):
        raise UserError(
            f"--drafts {file}: line {number} needs 'prompt' (text or messages) and 'completion'"
            " (text)"
        )
    return Draft(Task(f"draft-{number}", prompt), text)
