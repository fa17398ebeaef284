"""Rewards for short answers in words: a name, a date, a number, a phrase.

The answer is compared as a whole: "Maybe" is not "May", and a list with the right name in it is a
list. Words of the question and words such as "the" and "is" may surround it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from sixfold.environment.answer_part import answer_part
from sixfold.environment.grade import Grade, right_or_wrong
from sixfold.types import Task

from .marks import forged_turn, hidden_message, visible
from .tokens import Token, brackets, has_decoration, normalise_spelling, tokens

MAX_CHARACTERS = 20_000
MAX_TAGGED = 400

BLOCKED_DOMAINS = ("huggingface.co/datasets", "kaggle.com/datasets", "paperswithcode.com/dataset")
"""Places that hold data sets with their answers. The column `blocked_domains` adds to them."""

_TAG = re.compile(r"<\s*/?\s*answer\b[^<>]*>", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_VERDICT = re.compile(
    r"\[\[[^\[\]\n]{0,40}\]\]"
    r"|(?:final\s+)?(?:verdict|judge?ment|score|grade|rating)\s*[\"*]*\s*[:=]"
    r"|<\s*/?\s*(?:verdict|score|grade|reward|judge|evaluation|reference)\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"\((?:not|and not|unlike|rather than|instead of)\b[^()]*\)|,\s*not\b[^,.;!?]*")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|[\n;]+")
_FILLERS_TEXT = """
    a an the is was are were it its it's be been of in on at to for that this there which who what
    when where has have had i think believe say my answer final so therefore thus hence here as by
    would called named known
"""
_FILLERS = frozenset(_FILLERS_TEXT.split())
_DOUBT_TEXT = """
    not no never neither nor none or either maybe perhaps possibly might could may unsure unknown
    isn't wasn't aren't cannot can't don't doesn't either guess probably likely if unless but
    however although wrong incorrect false
"""
_DOUBT = frozenset(_DOUBT_TEXT.split())
_INTRODUCTIONS = frozenset({"=", "→"})
"""Signs that may stand before an answer, as in "Answer = 5"."""


def short_answer(completion: str, task: Task) -> Grade:
    """1 if the answer in words equals `task.answer`, or one of a list of answers.

    The answer is the content of the answer tags, or without tags what a sentence states. A
    completion that states another answer too, doubts its answer, or writes the verdict of a judge
    earns 0.

    Raises:
        ValueError: for a task without an answer.
    """
    return _grade(completion, task, tags_required=False)


def web_answer(completion: str, task: Task) -> Grade:
    """As `short_answer`, for a model that reads the web: tags are required.

    A completion that mentions a page of `BLOCKED_DOMAINS`, or of the column `blocked_domains`, is
    rejected: the answers of a benchmark can be looked up there.
    """
    named = task.columns.get("blocked_domains") or ()
    blocked = [*BLOCKED_DOMAINS, *([named] if isinstance(named, str) else named)]
    plain = visible(completion).casefold()
    for domain in blocked:
        if str(domain).casefold() in plain:
            return Grade(0.0, "rejected", f"read {domain}, which is blocked")
    return _grade(completion, task, tags_required=True)


def _grade(completion: str, task: Task, tags_required: bool) -> Grade:
    golds = _references(task)
    text = answer_part(completion)
    question = frozenset(
        word.text for word in tokens(normalise_spelling(task.prompt_text)) if not word.sign
    )
    problem = _problem(completion, text, question)
    if problem:
        return Grade(0.0, "rejected", problem)
    if _TAG.search(text):
        tagged = _TAGGED.findall(text)
        if len(tagged) != 1 or len(_TAG.findall(text)) != 2:
            return Grade(0.0, "rejected", "answer tags are repeated, open or misspelled")
        if len(tagged[0]) > MAX_TAGGED:
            return Grade(0.0, "wrong_answer", f"over {MAX_TAGGED} characters")
        answer = normalise_spelling(tagged[0])
        return right_or_wrong(any(_is(answer, gold, question) for gold in golds))
    if tags_required:
        return Grade(0.0, "rejected", "there are no answer tags")
    return _grade_text(normalise_spelling(text), golds, question)


def _problem(completion: str, text: str, question: frozenset[str]) -> str:
    """Why a completion is not graded, or empty. A question may ask for a score."""
    if forged := forged_turn(completion):
        return f"spells {forged}"
    if hidden_message(completion):
        return "has invisible characters that spell a text"
    if len(text) > MAX_CHARACTERS:
        return f"over {MAX_CHARACTERS} characters"
    verdict = _VERDICT.search(unicodedata.normalize("NFKC", text))
    if verdict and not question.intersection(_words(verdict[0])):
        return f"writes {verdict[0]!r}, the verdict of a judge"
    return "" if tokens(normalise_spelling(text), every=True) else "there is no answer"


def _grade_text(text: str, golds: Sequence[str], question: frozenset[str]) -> Grade:
    """Grade of free text: a sentence states a reference answer, and none states another one."""
    if any(_is(text, gold, question) for gold in golds):
        return right_or_wrong(True)
    sentences = [s for s in _SENTENCE.split(_ASIDE.sub(" ", text)) if tokens(s, every=True)]
    right = [s for s in sentences if any(_states(s, gold, question) for gold in golds)]
    if not right:
        return right_or_wrong(False)
    known = question.union(*(_words(gold) for gold in golds))
    for sentence in sentences:
        if sentence not in right and _answers(sentence, known, question):
            return Grade(0.0, "rejected", "states several answers")
    return right_or_wrong(True)


def _is(text: str, gold: str, question: frozenset[str]) -> bool:
    """True if a text is the reference answer, apart from fillers and words of the question."""
    every = has_decoration(gold)
    wanted = _core(tokens(gold, every), question)
    return _core(tokens(text, every), question) == wanted and _same_brackets(text, gold)


def _same_brackets(text: str, gold: str) -> bool:
    """True if a list is a set, an interval or a pair in both, or has no brackets in one of them."""
    given, wanted = brackets(text), brackets(gold)
    whole = ("", "()", "[]", "{}")
    return given == wanted or ("" in (given, wanted) and given in whole and wanted in whole)


def _states(sentence: str, gold: str, question: frozenset[str]) -> bool:
    """True if a sentence states the reference answer, without doubt and without another name.

    Before the answer, and right after it, are only fillers and words of the question.
    """
    if _is(sentence, gold, question):
        return True
    every = has_decoration(gold)
    found = tokens(sentence, every)
    words, wanted = [token.text for token in found], _core(tokens(gold, every), question)
    if _DOUBT.intersection(words) or not _topic(question) <= set(words):
        return False
    at = _position(words, wanted)
    if at is None:
        return False
    around = {*words[:at], *words[at + len(wanted) : at + len(wanted) + 1]}
    numeric = any(word[0].isdigit() for word in wanted)
    others = {name for name in _names(found) if numeric or not name[0].isdigit()}
    return (
        around <= _FILLERS | question | _INTRODUCTIONS
        and not others - set(wanted) - question
        and _same_brackets(sentence, gold)
    )


def _answers(sentence: str, known: frozenset[str], question: frozenset[str]) -> bool:
    """True if a sentence looks like an answer to the question that is not the reference.

    It is a fragment with a name or a number, or contains all words of the question and another
    name.
    """
    found = tokens(sentence)
    others = _names(found) - known
    if not others:
        return False
    words = {token.text for token in found if not token.sign}
    fragment = not words - others - _FILLERS - _DOUBT - question
    return fragment or (bool(_topic(question)) and _topic(question) <= words)


def _names(found: Sequence[Token]) -> set[str]:
    """Words of a sentence that are written with a capital, or are numbers."""
    return {token.text for token in found if token.named} - _FILLERS - _DOUBT


@lru_cache(maxsize=1024)
def _topic(question: frozenset[str]) -> frozenset[str]:
    """Words of a question that an answer in a full sentence repeats."""
    return question - _FILLERS - {"how", "many", "much", "why", "name", "please", "whose", "did"}


def _core(found: Sequence[Token], question: frozenset[str]) -> list[str]:
    """Words and signs of a text without fillers and without words of the question.

    If nothing but signs is left, the answer has words of the question.
    """
    kept = [token for token in found if token.text not in _FILLERS]
    rest = [token for token in kept if token.sign or token.text not in question]
    core = rest if any(not token.sign for token in rest) else kept or list(found)
    words = [token.text for token in core]
    while len(words) > 1 and words[0] in _INTRODUCTIONS:
        words.pop(0)
    return words


def _position(words: Sequence[str], part: Sequence[str]) -> int | None:
    """Index of the first occurrence of `part` in `words`, or None."""
    for start in range(len(words) - len(part) + 1):
        if words[start : start + len(part)] == part:
            return start
    return None


def _words(text: str) -> list[str]:
    return [token.text for token in tokens(normalise_spelling(text))]


def _references(task: Task) -> list[str]:
    """The accepted answers of a task in one spelling: one text, or a list of them."""
    answer = task.answer
    listed = answer if isinstance(answer, list | tuple) else [answer]
    golds = [normalise_spelling(str(one)) for one in listed]
    if answer is None or not golds or not all(tokens(gold, every=True) for gold in golds):
        raise ValueError(f"task {task.id!r} has no reference answer in words")
    return golds
