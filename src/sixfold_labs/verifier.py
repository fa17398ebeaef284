"""A verifier that reads the last integer of a response."""

from __future__ import annotations

import re

from sixfold.pages.lab import Breaking, Control, Lab, Outcome, Table

_INTEGER = re.compile(r"[0-9]+")


def integers(response: str) -> list[str]:
    """All integers of the text, without leading zeros. A sign is not part of an integer."""
    return [found.lstrip("0") or "0" for found in _INTEGER.findall(response)]


def last_integer(response: str) -> str | None:
    """The last integer of the text, or None if there is none."""
    found = integers(response)
    return found[-1] if found else None


def verifier(*, response: str, answer: int) -> Outcome:
    """Score one response."""
    found = integers(response)
    extracted = last_integer(response)
    reward = int(extracted == str(answer))
    return Outcome(
        values={
            "extracted_integer": extracted,
            "reward": reward,
            "answer_appears": str(answer) in found,
        },
        tables=(
            (Table("Integers of the response", ("position", "integer"), list(enumerate(found, 1))),)
            if found
            else ()
        ),
        lines=(
            ("The response contains the answer, but a later integer is read instead.",)
            if str(answer) in found and not reward
            else ()
        ),
    )


VERIFIER = Lab(
    name="verifier",
    title="A verifier that compares the last integer of a response with the answer",
    about=(
        "Extracts the last run of the digits 0 to 9 and compares it with the answer. The reward is"
        " 1 if they are equal, otherwise 0. A response without an integer gets 0."
    ),
    controls=(
        Control(
            "response",
            "let me think... 12#",
            "text of the response",
            sweep=(
                *("12#", "let me think... 12#", "11#", "120#", "no answer#", "012#"),
                *("12, checked in 2 ways#", "3 + 4 = 7, 7 + 5 = 12#"),
            ),
        ),
        Control("answer", 12, "right answer", low=0, high=999),
    ),
    run=verifier,
    breaking=Breaking(
        breaks={"response": "12, checked in 2 ways#"},
        safe={"response": "let me think... 12#"},
        why="The verifier reads only the last integer, so a remark after the answer hides it.",
        failed=lambda outcome: (
            bool(outcome.values["answer_appears"]) and not outcome.values["reward"]
        ),
    ),
)

LABS = (VERIFIER,)
