"""`sixfold critique`: preference pairs from drafts, critiques and revisions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environment.judge.constitution import principles_of
from ..environment.judge.critique import Draft, Pairs, preference_pairs
from ..environment.judge.estimate import estimated, in_words
from ..environment.judge.judge import Judge
from ..environment.judge.named_texts import NamedText, named_texts
from ..errors import UserError
from ..files.durable import write_text_atomic
from ..recipe.schema import Recipe
from ..run.recipe_judge import judge_settings
from ..types import Task

QUESTIONS = 3
"""Maximum questions per draft and principle: critique, revision and check."""


@dataclass(frozen=True)
class CritiqueOptions:
    """Command-line options of `sixfold critique`.

    Attributes:
        out: file for the pairs.
        principles: file with the principles. None: use the principles of the recipe.
        drafts: file with prompts and completions. None: sample completions.
        model: checkpoint, run or model that is sampled. "": the recipe's model.
        tasks: number of tasks to sample completions for.
    """

    out: Path
    principles: Path | None
    drafts: Path | None
    model: str
    tasks: int


def critique_command(recipe: Recipe, options: CritiqueOptions) -> int:
    """Make the pairs, write them, and print the outcomes. Returns the exit code, 0.

    Raises:
        UserError: if the output file exists, or an input file cannot be read.
        BudgetSpent: if the judge's budget is used up.
    """
    if options.out.exists():
        raise UserError(f"--out {options.out}: it exists. Choose another file, or delete it")
    judge = Judge(judge_settings(recipe))
    try:
        principles = _principles(options.principles) if options.principles else principles_of(judge)
        if options.drafts:
            drafts = _read_drafts(options.drafts)
        else:
            from .sampled_drafts import sampled_drafts

            drafts = sampled_drafts(recipe, options.model, options.tasks)
        count = QUESTIONS * len(drafts) * len(principles)
        cost = estimated(judge.settings, [draft.task for draft in drafts], count)
        print(f"judge: {in_words(cost, judge.settings)}", flush=True)
        judge.keep_in(options.out.with_name(f"{options.out.name}.judge"))
        made = asyncio.run(preference_pairs(judge, drafts, principles))
        spent = judge.spending.spent
    finally:
        judge.close()
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in made.records]
    write_text_atomic(options.out, "".join(lines))
    print(_shown(made, len(drafts), len(principles)))
    print(f"judge: {spent.calls} requests, ${spent.usd:.4g}. Pairs: {options.out}")
    return 0


def _shown(made: Pairs, drafts: int, principles: int) -> str:
    parts = ", ".join(f"{count} {name}" for name, count in made.outcomes.most_common())
    return f"{len(made.records)} pairs from {drafts} answers and {principles} principles: {parts}"


def _principles(file: Path) -> list[NamedText]:
    """Read the principles in a file.

    Raises:
        UserError: if the file cannot be read or has no principles.
    """
    source = f"--principles {file}"
    lines = [line.strip() for line in _text(file, source).splitlines()]
    given = [line for line in lines if line and not line.startswith("#")]
    try:
        return named_texts(given, "principle", source)
    except ValueError as error:
        raise UserError(f"{error}. Write one principle per line") from error


def _read_drafts(file: Path) -> list[Draft]:
    """Read prompts and completions in a file of JSON lines.

    Raises:
        UserError: if the file cannot be read, or a line does not have the right form.
    """
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
