"""Line numbers of keys in a TOML file, for error messages. tomllib does not report them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from math import inf

_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_PATH = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_PATH})\s*\]")
_LIST = re.compile(rf"^\s*\[\[\s*({_PATH})\s*\]\]", re.MULTILINE)
_KEY = re.compile(rf"\s*({_PATH})\s*=(.*)")
_BARE_WORD = re.compile(r"\s*([A-Za-z./~][^\"'#,\[\]{}]*?)\s*(#.*)?$")


class TomlText:
    """Says where the keys of a TOML text were written."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self._lines = key_lines(text)

    def place(self, key: str) -> str:
        """File and line of a dotted key, or the file alone."""
        return self._at(line_of(key, self._lines))

    def places_in(self, table: str, number: int) -> Callable[[str], str]:
        """Function like `place` for the keys of the table `[[table]]` of that number, from 0.

        For an empty key it gives the place of the table.
        """
        starts = self._lines.get(table, [])
        lines: Mapping[str, Sequence[int]] = self._lines
        if number < len(starts):  # otherwise it is written in line: table = [{...}]
            end = starts[number + 1] if number + 1 < len(starts) else inf
            lines = {
                name: found
                for name, numbers in self._lines.items()
                if (found := [n for n in numbers if starts[number] <= n < end])
            }
        return lambda key: self._at(line_of(f"{table}.{key}".rstrip("."), lines))

    def _at(self, line: int | None) -> str:
        return f"{self.where}, line {line}" if line else self.where


def key_lines(text: str) -> dict[str, list[int]]:
    """Lines (from 1) of each dotted key or table header. A duplicate key has several lines."""
    lines: dict[str, list[int]] = {}
    table, fence = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        opened_in = fence
        fence = _fence_after(line, fence)
        if opened_in:
            continue  # inside a multi-line string, where `name = value` is only text
        if header := _HEADER.match(line):
            table = _dotted(header[1])
            lines.setdefault(table, []).append(number)
        elif key := _KEY.match(line):
            lines.setdefault(f"{table}.{_dotted(key[1])}".lstrip("."), []).append(number)
    return lines


def line_of(key: str, lines: Mapping[str, Sequence[int]]) -> int | None:
    """Line of `key`, otherwise of its inline table, otherwise of the first key under it."""
    path = key
    while path not in lines and "." in path:
        path = path.rpartition(".")[0]
    if path in lines:
        return lines[path][0]
    return next((numbers[0] for name, numbers in lines.items() if name.startswith(key + ".")), None)


def syntax_error(text: str, where: str, error: ValueError | RecursionError) -> str:
    """Describe in one line the error that tomllib raised on `text`.

    A duplicate key is shown with both lines, an unquoted word with the missing quotes.
    """
    if isinstance(error, RecursionError):
        return f"{where} is nested too deeply for a recipe"
    if not isinstance(error, tomllib.TOMLDecodeError):
        return f"{where} holds an integer with too many digits"
    message = str(error)
    # Tables of a list repeat their header and their keys.
    lists = tuple(f"{_dotted(name)}." for name in _LIST.findall(text))
    repeated = [
        (key, numbers)
        for key, numbers in key_lines(text).items()
        if len(numbers) > 1 and not f"{key}.".startswith(lists)
    ]
    if message.startswith("Cannot") and repeated:
        key, numbers = repeated[0]
        return f"duplicate key '{key}' ({where}, lines {' and '.join(map(str, numbers))})"
    return f"{where} is not valid TOML: {message}{_quote_hint(text, message)}"


def _quote_hint(text: str, message: str) -> str:
    at = re.search(r"at line (\d+)", message)
    key = _KEY.match(text.splitlines()[int(at[1]) - 1]) if at else None
    word = _BARE_WORD.match(key[2]) if key else None
    if not key or not word:
        return ""
    if word[1].lower() in ("true", "false"):
        return f"; write {key[1]} = {word[1].lower()}"
    return f'; text needs quotes: {key[1]} = "{word[1]}"'


def _dotted(path: str) -> str:
    return ".".join(part.strip("\"'") for part in re.findall(_PART, path))


def _fence_after(line: str, fence: str) -> str:
    """Triple quote that is still open at the end of `line`, or ''."""
    for quote in re.findall(r'"""|\'\'\'', line):
        if not fence:
            fence = quote
        elif quote == fence:
            fence = ""
    return fence
