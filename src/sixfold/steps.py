"""Where the steps of a solution end. One interface for search, step labels and process rewards.

Named ways: `newline`, `blank_line`, `sentence`, `token:TEXT` (after every TEXT), `xml:TAG` (after
every </TAG>), `every:N` (after every N tokens), or a user's function, `path.py:function`, which
gets a text and returns the ends.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, takewhile
from operator import index
from typing import Any, Protocol

from .environment.named import Named
from .errors import UserError, nearest, one_line
from .user_code import calling

Decode = Callable[[Sequence[int]], str]
"""Text of token ids."""
TokenEnds = Callable[[str], Iterable[int]]
"""Number of characters of a text up to the end of each of its tokens."""

_PATTERNS = {
    "newline": r"\n",
    "blank_line": r"\n[^\S\n]*\n\s*",
    "sentence": r"(?<![.!?])[.!?]+[\"')\]]*(?=\s)|[。！？]+",
}
_ARGUMENTS = ("token", "xml", "every")
FORMS = f"{', '.join(_PATTERNS)}, token:TEXT, xml:TAG, every:N or path.py:function"
_OWN = Named("way to end steps", "function", {})
_WINDOW = 64
"""Tokens after which a text that is decoded in pieces is cut, though a character may be open."""


class Steps(Protocol):
    """A way to divide a solution into steps."""

    def ends(self, text: str) -> list[int]:
        """Exclusive character ends of the steps of a text, increasing.

        The last is `len(text)`; a text without characters has no step. A step of white space alone
        belongs to the step before it, or at the start to the one after it. A text of white space
        alone is one step.

        Raises:
            UserError: a user's function fails or returns no ends.
        """
        ...


class _Ends:
    """Steps by a function that finds ends, in any number and perhaps without the last.

    Args:
        find: gets a text.
    """

    def __init__(self, find: Callable[[str], Iterable[int]]) -> None:
        self._find = find

    def ends(self, text: str) -> list[int]:
        found: list[int] = []
        for start, end in pairwise([0, *self._find(text), len(text)]):
            if not text[start:end].strip():
                if found and end > start:
                    found[-1] = end
            else:
                found.append(end)
        if text and not found:
            return [len(text)]
        return found


def check_steps(name: str) -> None:
    """Check the name of a way to end steps. Runs no code of the user.

    Args:
        name: as in the module's docstring.

    Raises:
        UserError: there is no such way, or its argument is wrong.
    """
    kind, colon, argument = name.partition(":")
    if name in _PATTERNS:
        return
    if kind not in _ARGUMENTS:
        if not colon or not argument:
            raise UserError(
                f"unknown way to end steps {name!r}. Use {FORMS}.{nearest(name, [*_PATTERNS])}"
            )
        try:
            _OWN.check(name)
        except UserError as error:
            raise UserError(f"{error}.{nearest(kind, [*_ARGUMENTS])}".removesuffix(".")) from error
    elif kind == "every" and not (argument.isdecimal() and int(argument)):
        raise UserError(f"steps {name!r}: every:N needs a number of tokens of at least 1")
    elif kind == "xml" and not re.fullmatch(r"[A-Za-z_][\w.-]*", argument):
        raise UserError(f"steps {name!r}: xml:TAG needs the name of a tag, without brackets")
    elif not argument:
        raise UserError(f"steps {name!r}: token:TEXT needs the text at which steps end")


def steps_of(name: str, token_ends: TokenEnds | None = None) -> Steps:
    """The way to end steps that has this name.

    Args:
        name: as in the module's docstring.
        token_ends: by the tokenizer, which `every:N` needs.

    Raises:
        UserError: as `check_steps`, or a user's file fails to load.
    """
    check_steps(name)
    kind, _, argument = name.partition(":")
    if name in _PATTERNS:
        return _matched(_PATTERNS[name])
    if kind not in _ARGUMENTS:
        return _Ends(_checked(_OWN.load(name), name))
    if kind == "every":
        if token_ends is None:
            raise UserError(f"steps {name!r} are counted in tokens, and there is no tokenizer here")
        ends, every = token_ends, int(argument)
        return _Ends(lambda text: list(ends(text))[every - 1 :: every])
    return _matched(re.escape(f"</{argument}>" if kind == "xml" else argument))


def tokenized_ends(text: str, encode: Callable[[str], Sequence[int]], decode: Decode) -> list[int]:
    """Number of characters of a text up to the end of each of its tokens, for `steps_of`.

    They do not decrease. Tokens that hold parts of one character all end before it, but for the
    last.
    """
    ids = encode(text)
    return [min(end, len(text)) for end in _token_ends(decode(ids), ids, decode)]


def named_steps(ends: object, setting: str) -> str:
    """A way to end steps that a model's config.json names: it must not run code.

    Args:
        ends: what the config says.
        setting: the setting with which a user says it instead, for the message.

    Raises:
        UserError: if it is not text, names a function, or is unknown.
    """
    known = isinstance(ends, str) and (ends in _PATTERNS or ends.partition(":")[0] in _ARGUMENTS)
    if not known or not isinstance(ends, str):
        raise UserError(
            f"the config.json of the process reward model ends steps by {ends!r:.80}, and no code"
            f" that a model names is run. Set {setting} to where its steps end"
        )
    check_steps(ends)
    return ends


def own_ends_of(name: str) -> list[str]:
    """The name, if it is that of a user's function, else nothing."""
    return [name] if ":" in name and name.partition(":")[0] not in _ARGUMENTS else []


def absolute_name(name: str) -> str:
    """The name with an absolute path, if it names a file: the working folder may change."""
    return name if name.partition(":")[0] in _ARGUMENTS else _OWN.absolute(name)


def _matched(pattern: str) -> Steps:
    """Steps that end with every match of a regular expression."""
    compiled = re.compile(pattern)
    return _Ends(lambda text: [match.end() for match in compiled.finditer(text)])


def _checked(function: Callable[..., Any], name: str) -> Callable[[str], list[int]]:
    """A user's function whose errors and wrong results are UserErrors."""

    def find(text: str) -> list[int]:
        try:
            with calling():
                ends = [index(end) for end in function(text)]
        except Exception as error:
            raise UserError(f"steps {name!r}: the function failed: {one_line(error)}") from error
        if any(b <= a for a, b in pairwise([0, *ends])) or (ends and ends[-1] > len(text)):
            raise UserError(
                f"steps {name!r}: the function returned the ends {ends[:8]} for a text of"
                f" {len(text)} characters. They must increase, from 1 to {len(text)}"
            )
        return ends

    return find


def last_tokens(
    ends: Sequence[int], text: str, tokens: Sequence[int], decode: Decode, opened: str = ""
) -> list[int]:
    """Index of the token with the last character of each step.

    Args:
        ends: exclusive character ends of the steps, in any order.
        text: the completion.
        tokens: its token ids.
        decode: text of the first of them.
        opened: start of `text` that is in none of the tokens.

    Raises:
        ValueError: if there is no such token.
    """

    reached = _token_ends(text, tokens, decode, opened)
    found = []
    for end in ends:
        if not len(opened) < end <= len(text):
            least = f" after the {len(opened)} that the prompt left open" if opened else ""
            raise ValueError(
                f"a step ends at character {end}, but the completion has {len(text)}. Use 1 to"
                f" {len(text)}{least}"
            )
        at = bisect_left(reached, end)
        if at == len(tokens):
            raise ValueError(
                f"no token ends at or after character {end}: the text differs from that of the"
                " tokens"
            )
        found.append(at)
    return found


def _token_ends(text: str, tokens: Sequence[int], decode: Decode, opened: str = "") -> list[int]:
    """For each token the number of characters of a text that it and those before it spell.

    Args:
        text: the text.
        tokens: its token ids.
        decode: text of the first of them.
        opened: start of `text` that is in none of the tokens.
    """
    found, shown = _ends_by_pieces(text, tokens, decode, opened, _WINDOW)
    if shown == decode(tokens):
        return found
    return _ends_by_pieces(text, tokens, decode, opened, 0)[0]  # pieces change each other


def _ends_by_pieces(
    text: str, tokens: Sequence[int], decode: Decode, opened: str, window: int
) -> tuple[list[int], str]:
    """As `_token_ends`, with the joined text of the pieces.

    A piece ends where no character is open. It is decoded after the piece before it, because some
    tokenizers drop the space at the start of a text.

    Args:
        text, tokens, decode, opened: as for `_token_ends`.
        window: longest piece that waits for its character. 0: all tokens are one piece.
    """
    found: list[int] = []
    pieces: list[str] = []
    before: list[int] = []
    piece: list[int] = []
    base, start, end = "", len(opened), len(opened)
    same = text.startswith(opened)
    new = ""
    for token in tokens:
        piece.append(token)
        new = decode([*before, *piece])[len(base) :]
        known = end - start
        if same and text.startswith(new[:known], start) and len(new) > known:
            both = zip(new[known:], text[end : start + len(new)], strict=False)
            end += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        found.append(end)
        if not window or (len(piece) < window and (not new or new[-1] == "\ufffd")):
            continue
        if new:
            pieces.append(new)
            same = same and text.startswith(new, start)
            start += len(new)
            before, base, new = piece, decode(piece), ""
        piece = []
    return found, "".join([*pieces, new])
