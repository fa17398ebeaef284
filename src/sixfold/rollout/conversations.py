"""Match the requests of a session with the replies that they continue.

A client sends the whole conversation with every request. If a request continues a reply that was
sampled here, its prompt consists of the sampled tokens and a suffix (`renderer.suffix`). So a reply
of the policy is never tokenized again. A request begins a new conversation in three cases:

- Its messages do not continue a reply, for example because the client has shortened the history.
- Another request has already continued the reply, or is continuing it now (a branch). The prompt
  then begins with the sampled tokens up to the end of the reply.
- The chat template cannot continue the conversation, for example because it removes thoughts.

**Noise.** The noise of a token depends on the seed, the conversation's name, the index of the
sample and the position. The conversation with the task's prompt is named after the task, like an
episode of the player. The name of any other conversation contains a hash of its prompt. So the
tokens do not depend on the order in which concurrent requests arrive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, count
from typing import Any

from ..errors import UserError
from ..renderer.renderer import Renderer, RenderError
from ..renderer.suffix import Suffix
from ..types import PROMPT, Task
from .generator import Sampled, SampleKey
from .transcript import Transcript, observation_text

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Mark:
    """The end of a reply, where a request may continue the conversation.

    Attributes:
        seen: messages up to and including the reply, as the client knows them. Empty for plain
            text.
        text: prompt and completion of plain text. None for a chat.
        before: messages before the reply, in the form that the renderer needs.
        tools: descriptions of functions.
        length: number of tokens up to the end of the reply.
        turn: index of the first token of the policy's turn.
        rest: end of the reply that the client did not get: the stop string and what follows it.
    """

    seen: Messages
    text: str | None
    before: Messages
    tools: Messages
    length: int
    turn: int
    rest: str


@dataclass(eq=False)
class Conversation:
    """Requests that continue one another. They become one trajectory.

    Attributes:
        name: name of its sampling noise.
        origin: length of its first prompt, in tokens.
        busy: True while one of its requests waits for the reply.
        transcript: tokens so far. Empty before the first reply.
        marks: one per reply.
        events: tool calls with the results that the client sent, in the form of environment events.
    """

    name: str
    origin: int
    busy: bool = True
    transcript: Transcript = field(default_factory=Transcript)
    marks: list[Mark] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Prompt:
    """Prompt of one request.

    Attributes:
        conversation: the conversation of the request.
        tokens: all token ids.
        key: names the sampling noise.
        suffix: tokens after the conversation's last reply. None for its first prompt.
        said: text of the suffix.
        seen: messages of the request, in the form of `Mark.seen`.
        text: the prompt as text, for plain text. None for a chat.
        before: messages of the request, in the form that the renderer needs.
        tools: descriptions of functions.
        turn: index of the first token of the policy's turn.
    """

    conversation: Conversation
    tokens: list[int]
    key: SampleKey
    suffix: Suffix | None
    said: str
    seen: Messages
    text: str | None
    before: Messages
    tools: Messages
    turn: int


class Conversations:
    """The conversations of one session.

    Args:
        renderer: converts messages to tokens.
        task: task of the session. The conversation that begins with its prompt is the main one.
        sample: index of the sample within the task.

    Attributes:
        all: conversations with at least one reply, or with a request in progress.
    """

    def __init__(self, renderer: Renderer, task: Task, sample: int) -> None:
        self.all: list[Conversation] = []
        self._renderer = renderer
        self._task = task
        self._sample = sample

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Prompt:
        """Make the prompt of a chat request.

        Args:
            messages: the whole conversation, in the form that the chat template expects.
            tools: descriptions of functions.

        Raises:
            RenderError: the messages cannot be converted to tokens.
        """
        named, tools = _with_names(messages), tuple(tools)
        seen = _merge_replies(named)
        found = [
            (conversation, mark)
            for conversation in self.all
            for mark in conversation.marks
            if mark.tools == tools and mark.text is None and _continues(seen, mark.seen)
        ]
        if found:
            conversation, mark = self._longest(found)
            new = seen[len(mark.seen) :]
            said = conversation.transcript.tokens[mark.turn : mark.length]
            try:
                arguments = self._task.template_args
                suffix = self._renderer.suffix(mark.before, said, new, tools, arguments)
            except UserError:  # the template cannot continue it: begin a new conversation
                pass
            else:
                text = mark.rest + observation_text(new)
                return self._continue(conversation, mark, suffix, text, seen, None)
        tokens = self._renderer.encode_messages(named, tools, self._task.template_args)
        main = named[-1].get("content") == self._task.prompt_text
        return self._begin(tokens, main, seen, None, named, tools)

    def plain(self, given: str | list[int]) -> Prompt:
        """Make the prompt of a request without a chat template.

        Args:
            given: text or token ids to continue.

        Raises:
            RenderError: the text cannot be converted to tokens, or has none.
        """
        renderer, text = self._renderer, given if isinstance(given, str) else None
        found = [
            (conversation, mark)
            for conversation in self.all
            for mark in conversation.marks
            if mark.text is not None and self._extends(given, conversation, mark)
        ]
        if found:
            conversation, mark = self._longest(found)
            before = conversation.transcript.tokens[: mark.length]
            said = "" if text is None else text[len(mark.text or "") :]
            try:
                suffix = renderer.suffix_text(before[mark.turn :], said)
            except RenderError:  # the policy's turn has ended: begin a new conversation
                pass
            else:
                if not isinstance(given, str):
                    ids = given[mark.length :]
                    suffix, said = Suffix(ids, "o" * len(ids)), renderer.decode(ids)
                whole = (mark.text or "") + said
                return self._continue(conversation, mark, suffix, mark.rest + said, (), whole)
        tokens = renderer.encode_text(given) if isinstance(given, str) else list(given)
        if not tokens:
            raise RenderError("the prompt has no tokens. Give at least one to continue", "prompt")
        shown = text if text is not None else renderer.shown(tokens)
        return self._begin(tokens, shown == self._task.prompt_text, (), shown, (), ())

    def reply(
        self, prompt: Prompt, sampled: Sampled, text: str, message: Mapping[str, Any]
    ) -> None:
        """Write a sampled reply to its conversation.

        Args:
            prompt: the prompt of the request.
            sampled: the reply.
            text: text of the reply, up to the stop string that ended it.
            message: the reply as the client gets it. Ignored for plain text.
        """
        conversation, done = prompt.conversation, prompt.conversation.transcript
        if prompt.suffix is None:
            done.write(prompt.tokens, PROMPT * len(prompt.tokens))
        else:
            done.write(prompt.suffix.tokens, prompt.suffix.provenance, prompt.said)
            results = _results(prompt.seen)
            done.credit(0.0, 0, len(results))
            conversation.events += results
        done.reply(sampled, text)
        whole = self._renderer.decode(sampled.tokens)
        conversation.busy = False
        conversation.marks.append(
            Mark(
                _merge_replies([*prompt.seen, message]) if prompt.text is None else (),
                None if prompt.text is None else prompt.text + whole,
                prompt.before,
                prompt.tools,
                len(done.tokens),
                prompt.turn,
                whole[len(text) :],
            )
        )

    def drop(self, prompt: Prompt) -> None:
        """Remove a request that gets no reply."""
        prompt.conversation.busy = False
        if not prompt.conversation.marks:
            self.all.remove(prompt.conversation)

    @property
    def played(self) -> list[Conversation]:
        """Conversations with replies, the main one first and the others by name.

        Without a main one, the conversation that began first comes first.
        """
        done = [conversation for conversation in self.all if conversation.marks]
        first = next((c for c in done if c.name == self._task.id), done[0] if done else None)
        others = sorted((c for c in done if c is not first), key=lambda c: c.name)
        return [first, *others] if first else []

    def _longest(self, found: Sequence[tuple[Conversation, Mark]]) -> tuple[Conversation, Mark]:
        """The longest match. Among equal ones, one that no other request has continued."""

        def order(pair: tuple[Conversation, Mark]) -> tuple[int, int, bool]:
            conversation, mark = pair
            return len(mark.seen), len(mark.text or ""), _is_free(conversation, mark)

        return max(found, key=order)

    def _extends(self, given: str | list[int], conversation: Conversation, mark: Mark) -> bool:
        """True if a plain prompt continues the conversation at a mark."""
        if isinstance(given, str):
            return given.startswith(mark.text or "")
        return given[: mark.length] == conversation.transcript.tokens[: mark.length]

    def _continue(
        self,
        conversation: Conversation,
        mark: Mark,
        suffix: Suffix,
        said: str,
        seen: Messages,
        text: str | None,
    ) -> Prompt:
        """Prompt that continues a conversation at a mark, or begins a branch there."""
        tokens = [*conversation.transcript.tokens[: mark.length], *suffix.tokens]
        if not _is_free(conversation, mark):
            branch = self._begin(tokens, False, seen, text, suffix.conversation, mark.tools)
            # The turn of plain text began before the branch.
            return branch if text is None else replace(branch, turn=mark.turn)
        conversation.busy = True
        return Prompt(
            conversation,
            tokens,
            self._key(conversation),
            suffix,
            said,
            seen,
            text,
            suffix.conversation,
            mark.tools,
            len(tokens) if text is None else mark.turn,
        )

    def _begin(
        self,
        tokens: list[int],
        main: bool,
        seen: Messages,
        text: str | None,
        before: Messages,
        tools: Messages,
    ) -> Prompt:
        """Prompt of a new conversation."""
        conversation = Conversation(self._name(tokens, main), len(tokens))
        self.all.append(conversation)
        key = self._key(conversation)
        return Prompt(conversation, tokens, key, None, "", seen, text, before, tools, len(tokens))

    def _name(self, tokens: Sequence[int], main: bool) -> str:
        """Name for the noise of a new conversation, which no other conversation has."""
        taken = {conversation.name for conversation in self.all}
        name = self._task.id
        if not main or name in taken:
            name += f"/{blake2b(repr(list(tokens)).encode(), digest_size=8).hexdigest()}"
        equal = (f"{name}/{number}" for number in count(2))
        return next(n for n in chain([name], equal) if n not in taken)

    def _key(self, conversation: Conversation) -> SampleKey:
        return SampleKey(conversation.name, self._sample, conversation.origin)


def _is_free(conversation: Conversation, mark: Mark) -> bool:
    """True if no request has continued, or is continuing, the conversation after this mark."""
    return mark is conversation.marks[-1] and not conversation.busy


def _continues(seen: Messages, known: Messages) -> bool:
    """True if messages are a known conversation plus new messages, none of the assistant."""
    new = seen[len(known) :]
    return (
        bool(new)
        and all(message["role"] != "assistant" for message in new)
        and all(map(_same, seen, known))
    )


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """True if two messages are equal.

    For replies, ids of calls, white space around the text and the order of keys in arguments are
    ignored, because clients may change them.
    """
    if a["role"] != "assistant" or b["role"] != "assistant":
        return a == b
    return (a.get("content") or "").strip() == (b.get("content") or "").strip() and _calls(
        a
    ) == _calls(b)


def _calls(message: Mapping[str, Any]) -> list[str]:
    """Names and arguments of a message's tool calls, in a form that can be compared."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        found.append(json.dumps([function["name"], function["arguments"]], sort_keys=True))
    return found


def _merge_replies(messages: Sequence[Mapping[str, Any]]) -> Messages:
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if not (found and message["role"] == found[-1]["role"] == "assistant"):
            found.append(message)
            continue
        last = found.pop()
        calls = [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
        text = (last.get("content") or "") + (message.get("content") or "")
        found.append({**last, "content": text, **({"tool_calls": calls} if calls else {})})
    return tuple(found)


def _results(seen: Messages) -> list[dict[str, Any]]:
    """Events for the results of tools after the last message of the assistant."""
    made: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for message in seen:
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            made[call.get("id", "")] = arguments
        if message["role"] == "assistant":
            found = []
        if message["role"] == "tool":
            arguments = made.get(message.get("tool_call_id", ""), "")
            call = {"kind": "tool_call", "tool": message.get("name", ""), "arguments": arguments}
            found.append({**call, "result": message["content"]})
    return found


def _with_names(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Add the tool's name to each result of a tool, because chat templates may need it."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name"):
            name = names.get(message.get("tool_call_id", ""))
            message = {**message, **({"name": name} if name else {})}
        found.append(message)
    return tuple(found)
