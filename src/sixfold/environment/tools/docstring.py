"""Read the description of a function and of its arguments from its docstring."""

from __future__ import annotations

import re

_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE
)
_FIELD = re.compile(r"^:\w+[^:\n]*:", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s+\*{0,2}(?P<name>\w+)\s*(?:\([^)\n]*\))?\s*:\s*(?P<text>.*)$")
_SPHINX = re.compile(
    r"^:param(?:eter)?\s+(?:[^:\n]*\s)?(?P<name>\w+):\s*(?P<text>(?:.|\n(?!\s*:))*)", re.MULTILINE
)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Read a docstring.

    Args:
        text: a docstring without indentation. Arguments are described in Google's `Args:` section
            or in lines of the form `:param NAME: TEXT`.

    Returns:
        The description of the function, and the descriptions of its arguments by name.
    """
    sections = list(_SECTION.finditer(text))
    fields = _FIELD.search(text)
    starts = [found.start() for found in (*sections, fields) if found]
    arguments: dict[str, str] = {}
    for at, section in enumerate(sections):
        if section[1] in ("Args", "Arguments", "Parameters"):
            end = sections[at + 1].start() if at + 1 < len(sections) else len(text)
            arguments |= _arguments(text[section.end() : end])
    for found in _SPHINX.finditer(text):
        arguments.setdefault(found["name"], _joined(found["text"]))
    return text[: min(starts, default=len(text))].strip(), arguments


def _arguments(section: str) -> dict[str, str]:
    """Descriptions of an `Args:` section. A line with more indentation continues the last one."""
    found: dict[str, str] = {}
    name, indent = "", -1
    for line in section.splitlines():
        if not line.strip():
            continue
        width = len(line) - len(line.lstrip())
        if width == 0:
            break
        argument = _ARGUMENT.match(line)
        if argument and (indent < 0 or width <= indent):
            name, indent = argument["name"], width
            found[name] = argument["text"].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _joined(text: str) -> str:
    return " ".join(text.split())
