"""Apply a patch in git's unified format to files in memory.

Refused: paths outside the repository, symbolic links, submodules, binary files, and hunks whose
context does not occur in the file. Nothing is written to disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

LONGEST_PATCH = 1 << 20
"""Maximum number of characters of a patch."""

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_NO_NEWLINE = "\\ No newline at end of file"


class PatchError(ValueError):
    """The patch is malformed, is refused, or does not apply."""


@dataclass
class _Hunk:
    """Lines of one hunk.

    Attributes:
        start: number of the first old line, starting at 1.
        old: old lines, context included.
        new: new lines, context included.
    """

    start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass
class _Change:
    """Changes of one file. `old` is None for a new file, `new` for a deleted one."""

    old: str | None
    new: str | None
    hunks: list[_Hunk] = field(default_factory=list)


def apply_patch(files: Mapping[str, str], patch: str) -> dict[str, str]:
    """Apply a patch and return all files.

    Args:
        files: path to text. Paths are relative and use "/".
        patch: one or several files in git's unified format.

    Raises:
        PatchError: if the patch changes nothing, is refused or does not apply.
    """
    if len(patch) > LONGEST_PATCH:
        raise PatchError(f"the patch is longer than {LONGEST_PATCH:,} characters")
    result = dict(files)
    changes = list(_changes(patch.replace("\r\n", "\n").split("\n")))
    if not changes:
        raise PatchError("the patch changes no file")
    for change in changes:
        before = ""
        if change.old is not None:
            if change.old not in result:
                raise PatchError(f"the patch changes {change.old}, which does not exist")
            before = result.pop(change.old)
        if change.new in result:
            raise PatchError(f"the patch creates {change.new}, which exists")
        after = _apply_hunks(before, change)
        if change.new is not None:
            result[change.new] = after
        elif after:
            raise PatchError(f"the patch deletes {change.old} but leaves lines of it")
    if result == dict(files):
        raise PatchError("the patch changes nothing")
    return result


def safe_path(path: str) -> str:
    """Check a path of a patch and return it unchanged.

    Raises:
        PatchError: if it is absolute, leaves the repository, or is not in plain form.
    """
    parts = PurePosixPath(path).parts
    wrong = not parts or path.startswith("/") or ".." in parts or ".git" in parts
    if wrong or any(c in path for c in '\\\0"') or path != str(PurePosixPath(path)):
        raise PatchError(f"the path {path[:80]!r} is not a plain path inside the repository")
    return path


def _changes(lines: list[str]) -> Iterator[_Change]:
    index = 0
    names: tuple[str | None, str | None] | None = None
    while index < len(lines):
        line = lines[index]
        _refuse(line)
        if line.startswith("diff --git "):
            if names is not None:
                yield _Change(*names)
            names = None
        elif line.startswith("rename from ") and lines[index + 1 : index + 2]:
            target = lines[index + 1]
            if not target.startswith("rename to "):
                raise PatchError("a rename without a new name")
            names = safe_path(line[12:]), safe_path(target[10:])
            index += 1
        elif line.startswith("--- ") and lines[index + 1 : index + 2]:
            if not lines[index + 1].startswith("+++ "):
                raise PatchError("'---' without '+++'")
            names = None
            change = _Change(_name(line[4:], "a/"), _name(lines[index + 1][4:], "b/"))
            if change.old is None and change.new is None:
                raise PatchError("a change from no file to no file")
            index = _read_hunks(lines, index + 2, change)
            yield change
            continue
        elif line.startswith("@@"):
            raise PatchError("a hunk without a file")
        index += 1
    if names is not None:
        yield _Change(*names)


def _refuse(line: str) -> None:
    """Raise PatchError for symbolic links, submodules and binary files."""
    if re.match(r"(?:new|old|deleted)?(?: file)? ?mode (?:120000|160000)", line):
        raise PatchError("the patch makes or changes a symbolic link or a submodule")
    if line.startswith(("GIT binary patch", "Binary files ")):
        raise PatchError("the patch changes a binary file")
    if re.match(r"index [0-9a-f]+\.\.[0-9a-f]+ (?:120000|160000)", line):
        raise PatchError("the patch makes or changes a symbolic link or a submodule")


def _name(text: str, prefix: str) -> str | None:
    """Path in a line `--- a/path` or `+++ b/path`; None for /dev/null."""
    path = text.split("\t")[0].strip()
    if path == "/dev/null":
        return None
    return safe_path(path.removeprefix(prefix))


def _read_hunks(lines: list[str], index: int, change: _Change) -> int:
    """Read the hunks of a file. Returns the index of the first line after them."""
    while index < len(lines) and (found := _HUNK.match(lines[index])):
        start, old, _, new = (1 if text is None else int(text) for text in found.groups())
        hunk = _Hunk(start)
        index += 1
        while len(hunk.old) < old or len(hunk.new) < new:
            if index >= len(lines):
                raise PatchError("the last hunk is cut off")
            _read_line(lines[index], hunk)
            index += 1
        if len(hunk.old) != old or len(hunk.new) != new:
            raise PatchError("the line counts of a hunk differ from its header")
        if lines[index : index + 1] == [_NO_NEWLINE]:
            index += 1
        change.hunks.append(hunk)
    if not change.hunks and change.old is not None and change.new is not None:
        raise PatchError(f"no hunk for {change.new}")
    return index


def _read_line(line: str, hunk: _Hunk) -> None:
    mark, text = line[:1], line[1:]
    if line == _NO_NEWLINE:
        return
    if mark not in ("", " ", "-", "+"):
        raise PatchError(f"a line of a hunk begins with {mark!r}")
    if mark != "+":
        hunk.old.append(text)
    if mark != "-":
        hunk.new.append(text)


def _apply_hunks(before: str, change: _Change) -> str:
    """Text of a file after its hunks are applied."""
    lines = before.split("\n")
    ends = bool(before) and lines[-1] == ""
    if ends or not before:
        lines.pop()
    shift = 0
    for hunk in change.hunks:
        wanted = max(0, hunk.start - (1 if hunk.old else 0)) + shift
        at = _place(lines, hunk.old, wanted)
        if at is None:
            raise PatchError(f"a hunk does not match {change.old or change.new}")
        lines[at : at + len(hunk.old)] = hunk.new
        shift += len(hunk.new) - len(hunk.old) + at - wanted
    return "\n".join(lines) + ("\n" if lines and (ends or not before) else "")


def _place(lines: list[str], old: list[str], wanted: int) -> int | None:
    """Index in `lines` where `old` occurs, nearest to `wanted`. None if it does not occur."""
    if not old:
        return min(wanted, len(lines))
    found = [
        at
        for at in range(len(lines) - len(old) + 1)
        if lines[at] == old[0] and lines[at : at + len(old)] == old
    ]
    return min(found, key=lambda at: abs(at - wanted), default=None)
