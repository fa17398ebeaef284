r"""Find the answer in a completion, in time linear in the length of the text.

Only the text after the last thought is graded (`answer_part`); an unfinished thought leaves nothing
to grade. The answer is the content of the last complete `\boxed{}` or `\fbox{}`, even if later
prose retracts it or opens another box: `\boxed{5} then \boxed{` says 5, as for math-verify. The
strict policy refuses it, as Minerva's and verl's rewards do. If no box was opened, the answer is
the content of the answer tags, and without tags the text after the last "the answer is", "answer:"
or "####", up to the end of its sentence or line.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from sixfold.environment.answer_part import answer_part

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BARE_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z{])["
    r" \t]*(?=[-+(\[$\d.√π½]|\\(?!boxed|fbox|[)\]])|[A-Za-z](?:\s*(?:[=^_+*/(\\.,$-]|$)))",
    re.MULTILINE,
)
_BARE_END = re.compile(
    r"(?<!\\)\$|\n|\\[)\]]|[.!?](?=\s|$)|[。！？；]|,?\s(?:is|as|which|because|since|so|where|for|by)\b"
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}")
_ANSWER_TAG = re.compile(r"</?answer>")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_STATED = re.compile(r"answer\s*(?:is\b|[:=：＝])\s*[:：]?|####|＃{4}", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|\.\s|\.$|[!?]\s|[。！？；]|，(?!\d)")


@dataclass(frozen=True)
class Policy:
    """What counts as a final answer.

    Attributes:
        one_answer: all boxes must have the same content, and the last one must close.
        ascii_digits: digits of other scripts, such as the Arabic ones, are refused.
    """

    box_required: bool = False
    one_answer: bool = False
    ascii_digits: bool = False


class Found(NamedTuple):
    """The answer of a completion as written, or None and the reason."""

    answer: str | None
    problem: str = ""


def final_answer(completion: str, policy: Policy = Policy()) -> Found:
    """The answer of `completion`. If there are boxes but none closes, there is none."""
    text = answer_part(completion)
    if not text.strip():
        return Found(None, "there is no text after the last thought" if completion else "empty")
    if _BOX.search(text):
        answer = _in_last_box(text)
    elif policy.box_required:
        return Found(None, "there is no box")
    else:
        tags = _ANSWER_TAG.findall(text)
        answer = _in_tags(text) if tags else _stated_answer(text)
    if answer is None or not answer.strip():
        return Found(None, "there is no final answer, or an empty one")
    if policy.one_answer and _opens_another(text):
        return Found(None, "the last box does not close")
    if policy.one_answer and len({_bare(box) for box in _BOXED.findall(text)} - {""}) > 1:
        return Found(None, "boxes with different answers")
    if policy.ascii_digits and any(c.isdecimal() and not c.isascii() for c in answer):
        return Found(None, "digits of another script")
    return Found(answer)


def _opens_another(text: str) -> bool:
    """True if a box opens after the last complete one."""
    opened = list(_OPEN_BOX.finditer(text))
    return bool(opened) and opened[-1].end() > _last_braces(text)[0]


def _in_tags(text: str) -> str | None:
    """Content of the only answer tags, or None."""
    found = _TAGGED.findall(text)
    return found[0] if len(found) == 1 and len(_ANSWER_TAG.findall(text)) == 2 else None


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _in_last_box(text: str) -> str | None:
    r"""Content of the last box, with braces or without (`\boxed 5`).

    Prose after a bare box is not content.
    """
    bare = next(iter(deque(_BARE_BOX.finditer(text), maxlen=1)), None)
    start, end = _last_braces(text)
    if bare is None or bare.start() < start:
        return text[start:end] if start >= 0 else None
    rest = text[bare.end() :].removeprefix("$")
    stop = _BARE_END.search(rest)
    return rest[: stop.start()] if stop else rest


def last_box(text: str) -> str | None:
    """Content of the balanced box that opens last (of nested boxes, the inner one), or None."""
    start, end = _last_braces(text)
    return text[start:end] if start >= 0 else None


def _last_braces(text: str) -> tuple[int, int]:
    r"""Start and end of the content of the balanced box that opens last, or (-1, -1).

    `\{` and `\}` do not count as braces.
    """
    # Start of each open box's content, -1 for a brace that is not a box.
    open_braces: list[int] = []
    start, end = -1, -1
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            opened = open_braces.pop() if open_braces else -1
            if opened > start:
                start, end = opened, match.start()
        elif token[-1] == "{" and token != "\\{":
            open_braces.append(-1 if token == "{" else match.end())
    return start, end


def _stated_answer(text: str) -> str | None:
    begins = [stated.end() for stated in _STATED.finditer(text)]
    if not begins:
        return None
    rest = text[begins[-1] :].lstrip()
    stop = _SENTENCE_END.search(rest)
    return rest[: stop.start()] if stop else rest
