"""Suffixes: token ids that continue a conversation after a sampled reply.

The sampled tokens stay as they are. Only the text after the reply is tokenized: the end of the
assistant's turn, the new messages, and the start of the next turn. To find this text, the chat
template renders the conversation with a placeholder in place of the reply.

A template qualifies if it renders the earlier turns unchanged, apart from think blocks. gpt-oss
does not: it replaces the token that ends a reply. Training on such a conversation would show the
model another context than the one it sampled in.

Many templates remove the thoughts of earlier replies (Qwen3, DeepSeek-R1) or add empty ones (GLM).
The conversation keeps what was sampled: a reply has the thoughts that the policy wrote, and no
others. The text after it is what the template writes after a reply without thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..model.chat_template import TemplateRefusal, render
from ..model.turn_end import first_added_token
from .special_texts import SpecialTexts
from .think import opened_block, placeholder_turn, without_thoughts

TEMPLATE, OBSERVATION = "t", "o"
"""Provenance of a suffix's tokens: written by the template, or content of a new message."""

_THOUGHT, _REPLY, _CONTENT = "2957104683", "8360271945", "7513860429"
"""Placeholders. Trimming, changes of case and JSON leave digits as they are."""

_MOVED = "it renders the earlier turns differently once these messages follow"

_MIDDLE = ")"
"""Text that stands for the middle of a turn. Few tokens contain it together with what follows."""

_KEPT = 4096
"""Number of recent suffixes that are kept. Samples of a task often play the same turns."""

_TAIL = 16
"""Tokens at the end of a reply that are decoded together with a text that follows."""


@dataclass(frozen=True)
class Suffix:
    """Tokens that follow a sampled reply.

    Attributes:
        tokens: token ids.
        provenance: one letter per token: "t" if the template wrote it, "o" for the content of the
            new messages. A token that contains both is "o".
        conversation: all messages, including the reply and the new ones. It is the conversation to
            pass after the next reply.
    """

    tokens: list[int]
    provenance: str
    conversation: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Reply:
    """A sampled reply.

    Attributes:
        text: the reply without the token that ended the turn.
        end: id of the end token at its end, or None.
        end_text: text that ended the turn if the template marks turns with plain text, else "".
            `text` does not include it.
    """

    text: str
    end: int | None = None
    end_text: str = ""


class _Unfit(Exception):
    """The template cannot continue the conversation. The message says why."""


@dataclass(frozen=True)
class _Rendered:
    """A rendered conversation with a placeholder as its last reply.

    Attributes:
        text: the text from the end of the reply on.
        spans: start and end in `text` of the content of each new message.
        end: id of the token that ends the reply's turn, or None.
        after_end: index in `text` behind that token. 0 if there is none.
    """

    text: str
    spans: list[tuple[int, int]]
    end: int | None
    after_end: int


class SuffixEncoder:
    """Makes suffixes with the tokenizer of the policy.

    Args:
        tokenizer: must have a chat template.
        special: tokenizes the names of special tokens in messages as text.
        ends: ids of the tokens that end a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, special: SpecialTexts, ends: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ends = tuple(ends)
        self._recent: dict[bytes, tuple[list[int], str, Mapping[str, Any]]] = {}

    def after(
        self,
        conversation: Sequence[Mapping[str, Any]],
        reply: Reply,
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> Suffix:
        """Suffix for new messages after a reply.

        Some templates accept the result of a tool only after a reply with a call. If so, the
        placeholder has a call for each result.

        Args:
            conversation: messages before the reply.
            reply: the sampled reply.
            new: messages that follow it.
            tools: descriptions of functions, as in the first prompt.
            arguments: variables of the template, as in the first prompt.

        Raises:
            UserError: the template cannot continue the conversation.
        """
        key = _key(conversation, reply.text, reply.end, reply.end_text, new, tools, arguments)
        made = self._recent.get(key) or self._compute(conversation, reply, new, tools, arguments)
        if key and key not in self._recent:
            while len(self._recent) >= _KEPT:
                self._recent.pop(next(iter(self._recent)), None)
            self._recent[key] = made
        tokens, provenance, turn = made
        return Suffix(list(tokens), provenance, (*conversation, turn, *new))

    def _compute(
        self,
        conversation: Sequence[Mapping[str, Any]],
        reply: Reply,
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> tuple[list[int], str, Mapping[str, Any]]:
        """Tokens and provenance of the suffix, and the message of the reply. Arguments and errors
        as for `after`.
        """
        calls = [_call(message) for message in new if message["role"] == "tool"]
        reason = ""
        for changes_thoughts, extra in product(
            (False, True), ({}, {"tool_calls": calls}) if calls else ({},)
        ):
            try:
                opened, rendered = self._render(
                    conversation, reply, extra, new, tools, arguments, changes_thoughts
                )
            except (TemplateRefusal, _Unfit) as refusal:
                reason = reason or str(refusal)
                continue
            turn = {"role": "assistant", "content": opened + reply.text, **extra}
            return *self._tokens(rendered, reply), turn
        roles = ", ".join(sorted({repr(message["role"]) for message in new}))
        name = self._tokenizer.name_or_path or "this model"
        raise UserError(
            f"model.chat_template: the chat template of {name} cannot continue a conversation with"
            f" messages of role {roles}: {reason}. Use a template that renders earlier turns"
            " unchanged (model.chat_template = FILE), other roles, or an environment that"
            " continues the policy's turn with text"
        )

    def _render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        reply: Reply,
        extra: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        changes_thoughts: bool,
    ) -> tuple[str, _Rendered]:
        """Render the conversation with a placeholder for the reply.

        Returns:
            The think tag that the reply continues, or "", and the rendered text.

        Raises:
            TemplateRefusal: the template raised an error.
            _Unfit: the template changes earlier turns, or omits a message.
        """
        before, new = self._special.mark_all(conversation), self._special.mark_all(new)
        tools, arguments = map(self._special.mark_all, (tools, arguments))

        def rendering(following: Sequence[Mapping[str, Any]]) -> str:
            turns = [*before, turn, *following]
            return render(self._tokenizer, turns, tools=tools, arguments=arguments)

        prompt = render(self._tokenizer, before, tools=tools, arguments=arguments)
        opened = opened_block(prompt)
        content = placeholder_turn(opened, reply.text, _THOUGHT, _REPLY)
        if changes_thoughts:
            # In later renderings, an unfinished thought would reach to the next closing tag.
            opened = opened if _THOUGHT in content else ""
            content = "" if extra else _REPLY
        turn = {"role": "assistant", "content": content, **extra}
        whole = rendering(new)
        kept = without_thoughts(prompt) if changes_thoughts else prompt
        start = next((len(part) for part in (prompt, kept) if whole.startswith(part)), 0)
        if extra and not start:
            raise _Unfit(_MOVED)
        start = _end_of_reply(whole, start, content, bool(extra))
        lead = without_thoughts(whole[:start]) if changes_thoughts else whole[:start]
        if not lead.startswith(kept):
            raise _Unfit(_MOVED)
        spans = [_span(whole, new, at, rendering) for at in range(len(new))]
        if any(at < start for at, _ in spans):  # an empty message that it writes above the reply
            raise _Unfit(_MOVED)
        end, after_end = self._turn_end(whole[start : spans[0][0]])
        if not extra:
            _check_lead(lead[len(kept) :], reply.text)
        elif end is None:
            raise _Unfit("it does not end a turn with a call by a token")
        else:
            # The calls of the placeholder stand for calls in the sampled text: skip them.
            skipped = after_end - len(self._text(end))
            start, after_end = start + skipped, after_end - skipped
        shifted = [(a - start, b - start) for a, b in spans]
        return opened, _Rendered(whole[start:], shifted, end, after_end)

    def _turn_end(self, text: str) -> tuple[int | None, int]:
        """The token that ends the reply's turn, and the index behind it.

        Args:
            text: the text between the reply and the first new content.
        """
        found = [
            (at, -len(name), end)
            for end in self._ends
            if (at := text.find(name := self._text(end))) >= 0
        ]
        if found:
            at, length, end = min(found)
            return end, at - length
        other = first_added_token(self._tokenizer, text)
        if other is not None:
            raise _Unfit(
                f"it ends earlier replies with {self._text(other)!r}, at which sampling does not"
                " stop (rollout.stop_tokens)"
            )
        return None, 0

    def _text(self, token: int) -> str:
        return self._decode([token])

    def _tokens(self, rendered: _Rendered, reply: Reply) -> tuple[list[int], str]:
        """Token ids and provenance of the part that was not sampled."""
        anchor, skipped = "", 0
        if rendered.end is not None and rendered.end == reply.end:
            anchor, skipped = self._text(rendered.end), rendered.after_end
        elif reply.end_text and rendered.text.startswith(reply.end_text):
            skipped = len(reply.end_text)
        text = rendered.text[skipped:]
        edges = sorted(max(0, edge - skipped) for span in rendered.spans for edge in span)
        parts = self._encode_after(anchor, [text, *(text[:edge] for edge in edges)])
        tokens, counts = parts[0], [_common(parts[0], part) for part in parts[1:]]
        letters, last = "", 0
        for index, count in enumerate([*counts, len(tokens)]):
            letters += (TEMPLATE, OBSERVATION)[index % 2] * max(0, count - last)
            last = max(last, count)
        return tokens, letters

    def text(self, reply: Sequence[int], text: str) -> Suffix:
        """Suffix of plain text inside the policy's turn. Special tokens that it spells stay text.

        Args:
            reply: the turn's tokens so far.
            text: the text.
        """
        said = list(reply[-_TAIL:])
        before = self._decode(said)
        candidates = []
        for anchor in ("", _MIDDLE):
            # Some tokenizers add a space before the first word of a text.
            first, whole = (self._special.encode_plain(part) for part in (anchor, anchor + text))
            if whole[: len(first)] == first:
                candidates.append(whole[len(first) :])
        exact = (ids for ids in candidates if self._decode(said + ids) == before + text)
        tokens = next(exact, candidates[0])
        return Suffix(tokens, OBSERVATION * len(tokens))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _encode_after(self, anchor: str, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered texts that follow an anchor.

        They are tokenized together with the anchor, because some tokenizers add a space before the
        first word of a text.

        Args:
            anchor: text before each of the texts. "" means the middle of a turn.
            texts: the texts.
        """
        anchor = anchor or _MIDDLE
        first, *rest = self._special.encode_rendered([anchor, *(anchor + text for text in texts)])
        if all(ids[: len(first)] == first for ids in rest):
            return [ids[len(first) :] for ids in rest]
        return self._special.encode_rendered(texts)


def _key(*parts: Any) -> bytes:
    """Digest of the arguments of a suffix. Empty if they are not plain JSON, such as images."""
    try:
        text = json.dumps(parts)
    except (TypeError, ValueError):
        return b""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _call(result: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": result.get("name", "tool"), "arguments": {}}
    return {
        "id": result.get("tool_call_id", "call00000"),
        "type": "function",
        "function": function,
    }


def _end_of_reply(whole: str, start: int, content: str, may_omit: bool) -> int:
    """Index behind the placeholders of a reply.

    Args:
        whole: the rendered conversation.
        start: index at which the reply may begin.
        content: the placeholder turn.
        may_omit: the template may leave out the reply's text, because it has calls.

    Raises:
        _Unfit: a placeholder is missing.
    """
    for placeholder, problem in (
        (_THOUGHT, "it removes the thoughts of earlier replies"),
        (_REPLY, "it omits earlier replies"),
    ):
        if placeholder not in content:
            continue
        at = whole.find(placeholder, start)
        if at < 0 and may_omit:
            continue
        if at < 0:
            raise _Unfit(problem)
        start = at + len(placeholder)
    return start


def _check_lead(lead: str, reply: str) -> None:
    """Check what the template writes between the prompt and the end of the reply.

    Args:
        lead: that text, with the placeholders.
        reply: text of the sampled reply.

    Raises:
        _Unfit: it writes something before the reply that was not sampled.
    """
    written = lead.partition(_THOUGHT if _THOUGHT in lead else _REPLY)[0].strip()
    if not reply.lstrip().startswith(written):
        raise _Unfit(f"it writes {written!r} before earlier replies, which was not sampled")


def _span(
    whole: str,
    new: Sequence[Mapping[str, Any]],
    index: int,
    rendering: Callable[[Sequence[Mapping[str, Any]]], str],
) -> tuple[int, int]:
    """Start and end of a new message's content in the rendered conversation.

    Args:
        whole: the rendered conversation.
        new: the new messages.
        index: which message.
        rendering: renders the conversation with other new messages.

    Raises:
        _Unfit: the template omits messages of this role.
    """
    probe = [*new[:index], {**new[index], "content": _CONTENT}, *new[index + 1 :]]
    before, found, after = rendering(probe).partition(_CONTENT)
    if not found:
        raise _Unfit(f"it omits messages of role {new[index]['role']!r}")
    if not (whole.startswith(before) and whole.endswith(after)):
        # The template depends on the content. Its whole text counts as written by the template.
        return len(before), len(before)
    return len(before), max(len(before), len(whole) - len(after))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
