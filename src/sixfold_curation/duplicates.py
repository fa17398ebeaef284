"""Duplicate prompts, and prompts with more than one answer."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Generator, Iterator
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .similar import Similarity, Texts, compared, proposed
from .stage import Context, Decision, Health, Record, Rows, Stage
from .text import UNTELLING, answer_key
from .words import Hashes, Words, text_hash

COPIES_ALARM = 0.5
"""Share of rows that are copies from which on the source itself is doubtful."""
CONFLICTS_ALARM = 0.01
"""Share of rows with conflicting answers from which on the answers are doubtful."""
_SHOWN = 60

Conflicts = Literal["drop", "majority", "first"]
Places = NDArray[np.int64]


class Duplicates(Stage):
    """Keep one row of those that ask the same.

    Exact duplicates are equal after Unicode, case, white space, punctuation and LaTeX layout are
    put into one form (`text.tokens`). Near duplicates have a Jaccard similarity of word shingles of
    at least `threshold`, the same numbers, operators and deciding words in the same order, and no
    other answer. If the answers are equal, it is enough that single words are so similar, or that
    one prompt holds so much of the other. Unless equal answers vouch for it, prompts that begin or
    end with other words, beside grammar and instructions, ask for something else. The first row is
    kept.

    Args:
        threshold: Jaccard similarity of near duplicates. 1: exact duplicates only.
        shingle: words per shingle.
        scope: compare rows by prompt, or by prompt and answer: for replies to learn from, of which
            one prompt may have several.
        conflicts: what to do with the rows of a prompt that has more than one answer: drop them
            all; keep the answer of most rows (drop all in a tie); or keep the first row.
    """

    kind: ClassVar[str] = "duplicates"

    threshold: float = Field(default=0.8, ge=0.4, le=1.0)
    shingle: int = Field(default=2, ge=1, le=8)
    scope: Literal["prompt", "prompt_and_answer"] = "prompt"
    conflicts: Conflicts = "drop"

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        answers = array("Q")
        texts = compared(Words(self._texts(rows, answers, context), context.folder))
        marks = _exact(texts.whole, np.frombuffer(answers, dtype=np.uint64), self.conflicts)
        if self.threshold < 1:
            self._find_near(texts, np.frombuffer(answers, dtype=np.uint64), marks)
        named = _named(rows, marks)
        counts: Counter[str] = Counter()
        for at, record in enumerate(rows):
            decision = _decision(record, at, marks, named)
            counts[decision.reason] += 1
            counts["dropped"] += not decision.kept
            yield decision
        return _health(counts, marks)

    def _texts(self, rows: Rows, answers: array[int], context: Context) -> Iterator[str]:
        for record in rows:
            together = self.scope == "prompt_and_answer"
            key = None if together else answer_key(record.answer)
            answers.append(0 if key is None else text_hash(key))
            context.progress(1)
            yield f"{record.prompt}\n{record.answer}" if together else record.prompt

    def _find_near(self, texts: Texts, answers: Hashes, marks: Marks) -> None:
        """Mark near duplicates of earlier rows among those that are kept so far."""
        kept = marks.reason == KEPT
        similarity = Similarity(texts, self.shingle)
        vouches = ~np.isin(answers, [0, *map(text_hash, UNTELLING)]) & texts.has_numbers()
        pairs = proposed(texts, kept, self.shingle, self.threshold, answers)
        for later, earlier in pairs.tolist():
            first = int(marks.other[earlier]) if marks.reason[earlier] == NEAR else earlier
            if marks.reason[later] == NEAR or first == later:
                continue
            known = bool(answers[later] and answers[first])
            same = known and answers[later] == answers[first]
            value = similarity.jaccard(later, first)
            alike = same and texts.asked[later] == texts.asked[first]
            if value < self.threshold and (alike or texts.telling[later] == texts.telling[first]):
                value = similarity.shared(later, first)
            if value < self.threshold:
                continue
            vouched = known and (not same or vouches[later])
            if not vouched and not similarity.agree(later, first):
                continue
            marks.reason[later] = SIMILAR if known and not same else NEAR
            marks.other[later], marks.value[later] = first, value


KEPT, EXACT, NEAR, CONFLICT, SIMILAR = range(5)
REASONS = ("", "duplicate", "near_duplicate", "conflicting_answers", "similar_other_answer")
_DROPPED = (EXACT, NEAR, CONFLICT)


class Marks(NamedTuple):
    """What was found, one value per row.

    Args:
        reason: index into REASONS.
        other: number of the row that the note names.
        value: similarity to that row.
        first: number of the first row with the same text.
    """

    reason: NDArray[np.int8]
    other: Places
    value: NDArray[np.float32]
    first: Places


def _exact(whole: Hashes, answers: Hashes, conflicts: Conflicts) -> Marks:
    """Marks of exact duplicates and of conflicting answers."""
    _, firsts, group = np.unique(whole, return_index=True, return_inverse=True)
    first = firsts[group].astype(np.int64)
    marks = Marks(
        reason=np.where(first == np.arange(len(whole)), KEPT, EXACT).astype(np.int8),
        other=first.copy(),
        value=np.ones(len(whole), dtype=np.float32),
        first=first,
    )
    order = np.lexsort((answers, group))
    ordered = group[order]
    bounds = np.flatnonzero(np.diff(ordered)) + 1
    starts, ends = np.append(0, bounds), np.append(bounds, len(order))
    many = ends - starts > 1
    for start, end in zip(starts[many].tolist(), ends[many].tolist(), strict=True):
        members = order[start:end]
        known = answers[members[answers[members] > 0]]
        if len(known) and known[0] != known[-1]:
            _settle(np.sort(members), answers, conflicts, marks)
    return marks


def _settle(members: Places, answers: Hashes, conflicts: Conflicts, marks: Marks) -> None:
    """Mark the rows of one prompt whose answers conflict."""
    known = members[answers[members] > 0]
    votes = Counter(answers[known].tolist()).most_common(2)
    winner = int(answers[known[0]]) if conflicts == "first" else votes[0][0]
    if conflicts == "drop" or (conflicts == "majority" and votes[0][1] == votes[1][1]):
        winner = -1
    keeper = next((m for m in known.tolist() if int(answers[m]) == winner), -1)
    for member in members.tolist():
        answer = int(answers[member])
        if member == keeper:
            marks.reason[member] = KEPT
        elif keeper >= 0:
            marks.reason[member] = EXACT if answer in (0, winner) else CONFLICT
            marks.other[member] = keeper
        else:
            marks.reason[member] = CONFLICT
            marks.other[member] = known[answers[known] != answer][0]


def _named(rows: Rows, marks: Marks) -> dict[int, tuple[str, str]]:
    """Id and answer of each row that a note names."""
    wanted = np.zeros(len(marks.reason), dtype=bool)
    wanted[marks.other[marks.reason != KEPT]] = True
    if not wanted.any():
        return {}
    return {
        at: (record.id, record.answer[-_SHOWN:]) for at, record in enumerate(rows) if wanted[at]
    }


def _decision(record: Record, at: int, marks: Marks, named: dict[int, tuple[str, str]]) -> Decision:
    reason = int(marks.reason[at])
    if reason == KEPT:
        return Decision(record)
    name, answer = named[int(marks.other[at])]
    if reason == EXACT:
        note = f"same as {name}"
    elif reason == CONFLICT:
        note = f"answer {record.answer[-_SHOWN:]!r}, but {answer!r} in {name}"
    else:
        note = f"shares {marks.value[at]:.0%} with {name}"
        note += f", whose answer is {answer!r}" if reason == SIMILAR else ""
    return Decision(record, reason not in _DROPPED, REASONS[reason], note)


def _health(counts: Counter[str], marks: Marks) -> Health:
    total = len(marks.reason)
    share = counts["dropped"] / total if total else 0.0
    conflicts = counts["conflicting_answers"]
    alarms = []
    if share >= COPIES_ALARM:
        alarms.append(
            f"{share:.0%} of the rows are copies or conflict: look at the source before you trust"
            " it"
        )
    if total and conflicts / total >= CONFLICTS_ALARM:
        alarms.append(
            f"rows with another answer than a row with the same prompt: {conflicts}. Check the"
            " answers of this source"
        )
    copies = np.unique(marks.first, return_counts=True)[1]
    return Health(
        metric="share of copies and conflicts",
        value=share,
        alarm="; ".join(alarms),
        figures={
            **{reason: counts[reason] for reason in REASONS[1:]},
            "most_copies_of_a_prompt": int(copies.max(initial=0)),
        },
    )
