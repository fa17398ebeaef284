"""Extraction of code from a completion.

The code is a fenced block of the answer part (the text after the last thought). Its fences are
lines of at least three backticks or tildes.

1. If the last fence is not closed, the answer is unfinished: there is no code.
2. Blocks tagged with another language than the task's are ignored.
3. The last block tagged with the task's language counts. Without one, the last untagged block.
4. Without a block there is no code: text around code is not a program.
"""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

from sixfold.environment.answer_part import answer_part

TAGS = {
    "python": frozenset({"python", "python3", "py", "py3", "python2"}),
    "cpp": frozenset({"cpp", "c++", "cc", "cxx", "c++17", "cpp17"}),
    "javascript": frozenset({"javascript", "js", "node", "nodejs", "mjs"}),
    "diff": frozenset({"diff", "patch", "udiff"}),
}
"""Language -> tags of its blocks, in lower case."""

MAX_CODE = 256 * 1024
"""Longest program, in characters."""

_FENCE = re.compile(r"[ \t]*(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)")
_TAG = re.compile(r"[{.\s]*([A-Za-z0-9+#_.-]*)")


class Extracted(NamedTuple):
    """Code of a completion.

    Attributes:
        code: the program, or None.
        problem: why there is no program, or "".
    """

    code: str | None
    problem: str = ""


class _Block(NamedTuple):
    tag: str
    code: str


def extract_code(completion: str, language: str) -> Extracted:
    """The program in a completion.

    Args:
        completion: text of the policy, thoughts included.
        language: key of TAGS.
    """
    answer = answer_part(completion)
    if not answer.strip():
        return Extracted(None, "no answer after the thoughts")
    blocks, is_open = _blocks(answer)
    if is_open:
        return Extracted(None, "the last code block is not closed")
    tagged = [block for block in blocks if block.tag in TAGS[language]]
    chosen = tagged or [block for block in blocks if not block.tag]
    if not chosen:
        return Extracted(None, f"no fenced block of {language} code in the answer")
    code = chosen[-1].code
    if not code.strip():
        return Extracted(None, "the code block is empty")
    if len(code) > MAX_CODE:
        return Extracted(None, f"the program is longer than {MAX_CODE:,} characters")
    return Extracted(code)


def _blocks(text: str) -> tuple[list[_Block], bool]:
    """Fenced blocks of a text, and whether the last one is still open."""
    blocks: list[_Block] = []
    mark, tag, lines = "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        found = _FENCE.fullmatch(line)
        if not mark:
            # A line such as ```x``` is inline code.
            if found and "`" not in found["info"]:
                mark, tag, lines = found["mark"], _tag(found["info"]), []
        elif found and found["mark"].startswith(mark) and not found["info"].strip():
            blocks.append(_Block(tag, textwrap.dedent("\n".join(lines)) + "\n"))
            mark = ""
        else:
            lines.append(line)
    return blocks, bool(mark)


def _tag(info: str) -> str:
    found = _TAG.match(info)
    return found[1].lower() if found else ""
