"""Rows that contain the prompts of evaluations, or give their own answer away."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from sixfold.errors import UserError

from .evaluation_sets import Evaluation, EvaluationRow, open_evaluation, read_evaluation
from .overlap import LONG_RUN, Phrases, contained, hashes_of, masked
from .paraphrase import Paraphrases
from .similar import CONTENT_ALONE, Texts, compared, cut, is_common
from .stage import Context, Decision, Health, Record, Rows, Stage
from .text import answer_key, tokens_per_word
from .words import DECIDES, NUMBER, Hashes, Words, whole

LEAST_CONTAINED = 4
"""Words of the shortest prompt that is looked for inside other prompts."""
LEAST_PROSE = 5
"""Words beside numbers and signs of the shortest prompt that counts as the same with other numbers:
"what is 3 + 4" has only two.
"""
_STATED = re.compile(
    r"(?:\b(?:answer|ans|solution|result)\b\s*(?:is|are|was|:|=)+\s*|####\s*|\\boxed\s*(?={))",
    re.IGNORECASE,
)

_OPEN = re.compile(r"\b(?:answer|solution|output|result|a)[*\s]*[:=]\W*$", re.IGNORECASE)
"""End of a prompt that waits for its answer, so answers before it are those of examples."""


class Decontaminate(Stage):
    """Drop rows that an evaluation also has, and rows whose prompt states the answer.

    Rules, in this order. Phrases that many rows or several evaluation prompts have do not count.

    - same_text: the same words, beside boilerplate such as "put your answer in a box".
    - n_gram: half of an evaluation prompt's n-grams, a run of 13 words, or a part of the prompt.
    - contained: a whole prompt that is shorter than an n-gram.
    - number_swap: the same words with other numbers.
    - paraphrase: most of the telling words, or the same numbers and many of them.
    - answer_in_prompt: the row's own answer after "answer:" or the like.

    Args:
        evaluations: the evaluations.
        ngram: words of an n-gram, 8 to 13.
        number_swaps: whether rows with other numbers are dropped.
        paraphrases: whether paraphrases are dropped.
        answers: whether rows whose prompt states their answer are dropped.
        replies: whether n-grams are looked for in answers and completions too.
    """

    kind: ClassVar[str] = "decontaminate"

    evaluations: tuple[Evaluation, ...] = Field(min_length=1)
    ngram: int = Field(default=8, ge=4, le=LONG_RUN)
    number_swaps: bool = True
    paraphrases: bool = True
    answers: bool = True
    replies: bool = True

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        prompts = distinct_prompts([row for e in self.evaluations for row in read_evaluation(e)])
        rows_found, common = self.overlaps(prompts, rows, context)
        counts: Counter[str] = Counter()
        evaluated: set[int] = set()
        for at, record in enumerate(rows):
            found = rows_found.get(at)
            if found is None and self.answers and (stated := stated_answer(record)):
                counts["answer_in_prompt"] += 1
                yield Decision(record, False, "answer_in_prompt", f"the prompt says {stated!r}")
            elif found is None:
                yield Decision(record)
            else:
                counts[found.rule] += 1
                evaluated.add(found.prompt)
                name = prompts[found.prompt].name
                yield Decision(record, False, found.rule, f"{name}: {found.note}")
        figures = {
            "evaluation_prompts": len(prompts),
            "evaluation_prompts_found": len(evaluated),
            "common_phrases_left_out": common,
        }
        return _health(counts, len(rows), figures)

    def depends_on(self, context: Context) -> str:
        """Content of the evaluations."""
        return " ".join(open_evaluation(one).content for one in self.evaluations)

    def overlaps(
        self, prompts: list[EvaluationRow], rows: Rows, context: Context
    ) -> tuple[dict[int, Found], int]:
        """Rows, by their place, that contain one of the prompts, and how many phrases are common.

        Args:
            prompts: prompts of evaluations, without copies.
            rows: the rows.
            context: what stages share.
        """
        like = Paraphrases([prompt.prompt for prompt in prompts])
        words = Words(_prompts(rows, context), context.folder, like.vocabulary)
        finder = _Finder(prompts, compared(words))
        finder.same_text()
        common = finder.phrases(self.ngram, mask=False)
        finder.short(self.ngram)
        if self.number_swaps:
            common += finder.phrases(self.ngram, mask=True)
            finder.swapped()
        if self.paraphrases:
            like.weigh(finder.texts.words)
            finder.paraphrased(like)
        if self.replies:
            replies = _Finder(prompts, compared(Words((r.answer for r in rows), context.folder)))
            common += replies.phrases(self.ngram, mask=False)
            for text, found in replies.found.items():
                finder.found.setdefault(text, found._replace(note=f"{found.note}, in a reply"))
        return finder.found, common


def _prompts(rows: Rows, context: Context) -> Iterator[str]:
    for record in rows:
        context.progress(1)
        yield record.prompt


def distinct_prompts(prompts: list[EvaluationRow]) -> list[EvaluationRow]:
    words = Words(prompt.prompt for prompt in prompts)
    hashes = compared(words).whole
    kept = [prompts[at] for at in np.sort(np.unique(hashes, return_index=True)[1]).tolist()]
    if not any(np.diff(words.starts) > 0):
        raise UserError("the evaluations have no words in their prompts")
    return kept


class Found(NamedTuple):
    """The rule by which a row was found, the prompt, and what it rests on."""

    rule: str
    prompt: int
    note: str


class _Finder:
    """Finds rows by one rule after the other. The first rule that finds a row holds."""

    def __init__(self, prompts: list[EvaluationRow], texts: Texts) -> None:
        self.prompts = Words(prompt.prompt for prompt in prompts)
        self.texts = texts
        self.density = np.array([tokens_per_word(prompt.prompt) for prompt in prompts])
        self.found: dict[int, Found] = {}
        self._prompt_texts = compared(self.prompts)
        self._different = texts.different()

    def _add(self, text: int, rule: str, prompt: int, note: str) -> None:
        self.found.setdefault(text, Found(rule, prompt, note))

    def same_text(self) -> None:
        """The whole text, with or without boilerplate."""
        prompts: dict[int, int] = {}
        for hashes in (_content_hashes(self._prompt_texts, False), self._prompt_texts.whole):
            prompts |= hashes_of(self.prompts, hashes)
        for hashes in (self.texts.whole, _content_hashes(self.texts, False)):
            for text in np.flatnonzero(
                np.isin(hashes, np.array(list(prompts), np.uint64))
            ).tolist():
                self._add(text, "same_text", prompts[int(hashes[text])], "the same words")

    def phrases(self, length: int, mask: bool) -> int:
        """n-grams. Returns how many common ones are left out."""
        index = Phrases(self.prompts, length, mask, self.density)
        common = index.leave_out_common(self.texts.words, self._different)
        for match in index.matches(self.texts.words):
            rule = "number_swap" if mask else "n_gram"
            numbers = "with other numbers, " if mask else ""
            note = f"{numbers}{match.share:.0%} of its {length}-grams, {match.run} words in a row"
            self._add(match.text, rule, match.prompt, note)
        return common

    def short(self, length: int) -> None:
        """Prompts that are too short for an n-gram, inside others."""
        sizes = np.diff(self.prompts.starts)
        chosen = np.flatnonzero((sizes >= LEAST_CONTAINED * self.density) & (sizes < length))
        for text, prompt in contained(self.prompts, chosen, self.texts.words):
            self._add(text, "contained", prompt, f"all of its {sizes[prompt]} words")

    def swapped(self) -> None:
        """The whole text with other numbers, if that is not how many rows are made."""
        prompts = hashes_of(self.prompts, _content_hashes(self._prompt_texts, True))
        hashes = _content_hashes(self.texts, True)
        hit = np.flatnonzero(np.isin(hashes, np.array(list(prompts), np.uint64)))
        different = hashes[hit[self._different[hit]]]
        values, counts = np.unique(different, return_counts=True)
        common = values[is_common(counts, int(self._different.sum()))]
        for text in hit[~np.isin(hashes[hit], common)].tolist():
            prompt = prompts[int(hashes[text])]
            prose = ((self.texts.content(text) & (DECIDES | NUMBER)) == 0).sum()
            if prose >= LEAST_PROSE * self.density[prompt]:
                self._add(text, "number_swap", prompt, "the same, other numbers")

    def paraphrased(self, like: Paraphrases) -> None:
        for found in like.found(self.texts.words):
            note = f"cosine {found.cosine:.2f}" + (", same numbers" if found.same_numbers else "")
            self._add(found.text, "paraphrase", found.prompt, note)


def _content_hashes(texts: Texts, mask: bool) -> Hashes:
    """A hash of each text beside boilerplate, or of all of it if little else is left."""
    found = [np.zeros(0, np.uint64)]
    for first, ids, starts in texts.words.blocks():
        here = slice(first, first + len(starts) - 1)
        begins, ends = starts[:-1] + texts.begins[here], starts[:-1] + texts.ends[here]
        short = ends - begins < CONTENT_ALONE
        picked, places = cut(
            ids, np.where(short, starts[:-1], begins), np.where(short, starts[1:], ends)
        )
        found.append(whole(masked(picked) if mask else picked, places))
    return np.concatenate(found)


def stated_answer(record: Record) -> str:
    """The part of a prompt that states the row's answer, or ""."""
    wanted = answer_key(record.answer)
    if wanted is None or _OPEN.search(record.prompt):
        return ""
    for found in _STATED.finditer(record.prompt):
        rest = record.prompt[found.end() : found.end() + 300].split("\n")[0]
        stop = re.search(r"[.,;)\]](?:\s|$)|$", rest)
        stated = rest[: stop.start()] if stop else rest
        if answer_key(stated) == wanted:
            return (found.group() + stated).strip()
    return ""


def _health(counts: Counter[str], total: int, figures: dict[str, int]) -> Health:
    leaks = counts.total() - counts["answer_in_prompt"]
    alarms = []
    if leaks:
        found, prompts = figures["evaluation_prompts_found"], figures["evaluation_prompts"]
        alarms.append(
            f"{leaks:,} rows had prompts of the evaluations ({found} of {prompts}) and were"
            " dropped: a model that was trained on this source before cannot be judged by them"
        )
    if stated := counts["answer_in_prompt"]:
        alarms.append(f"prompts that state their answer: {stated:,}")
    return Health(
        metric="share of evaluation prompts",
        value=counts.total() / total if total else float("nan"),
        alarm="; ".join(alarms),
        figures={**counts, **figures},
    )
