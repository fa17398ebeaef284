"""Given replies as text that the policy could have sampled after the prompt.

The chat template renders the conversation with the reply as its last message. If that begins with
the prompt, the rest is the reply. Otherwise the template writes replies in another way than it asks
for them: DeepSeek-R1 opens a think block in the prompt and writes none in a reply. Then the reply
continues the prompt as its own text, and the open block is closed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..model.chat_template import PROBE, TemplateRefusal, render
from ..model.turn_end import first_added_token
from .special_texts import SpecialTexts
from .think import closing_tag, continued_block, opened_block, split_thought

_ASKED = {"role": "user", "content": PROBE}


@dataclass(frozen=True)
class WrittenReply:
    """A given reply in tokens.

    Attributes:
        tokens: token ids, with the one that ends the reply.
        as_template: False if the template would write the reply differently after this prompt.
        hidden: the template does not show `reasoning_content` of the reply, so it is left out.
    """

    tokens: list[int]
    as_template: bool
    hidden: bool


@dataclass(frozen=True)
class ReplyText:
    """A given reply as text, with marks for special tokens that it spells.

    Attributes:
        prompt: the rendered prompt.
        text: the text after the prompt.
        stop: length of the reply in `text`, with its end token if it has one.
        ended: True if the reply ends with an end token.
        as_template, hidden: as in `WrittenReply`.
    """

    prompt: str
    text: str
    stop: int
    ended: bool
    as_template: bool
    hidden: bool


class ReplyWriter:
    """Renders given replies with the tokenizer of the policy.

    Args:
        tokenizer: must have a chat template.
        special: marks the names of special tokens in messages.
        ends: ids of the tokens at which sampling stops.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, special: SpecialTexts, ends: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ends = {str(tokenizer.decode([token])): token for token in ends}

    def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        reply: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        following: Sequence[Mapping[str, Any]],
    ) -> ReplyText:
        """The reply as text after its prompt. Arguments as for `Renderer.encode_reply`.

        Raises:
            TemplateRefusal: the template refuses the messages, or omits a call of the reply.
        """
        before, after = self._special.mark_all(messages), self._special.mark_all(following)
        tools, arguments = map(self._special.mark_all, (tools, arguments))
        said = {
            **self._special.mark_all(reply),
            "content": self._special.mark_prefill(str(reply.get("content") or "")),
        }

        def rendering(turns: Sequence[Mapping[str, Any]], generation: bool) -> str:
            return render(
                self._tokenizer, turns, tools=tools, generation=generation, arguments=arguments
            )

        prompt = rendering(before, True)
        whole = rendering([*before, said], False)
        if not whole.startswith(prompt):
            # Mistral shows the system message only if a user's message is the last one.
            asked = [_ASKED]
            alone, begun = rendering([*asked, said], False), rendering(asked, True)
            start = begun.removeprefix(rendering(asked, False))
            if alone.startswith(begun) and prompt.endswith(start):
                whole = prompt + alone[len(begun) :]
        written, as_template, hidden = _after_prompt(prompt, whole, said)
        end = self._end(written, _start_of(written, said))
        if not end and after and as_template:
            longer, stem = rendering([*before, said, *after], True), prompt + written.rstrip()
            follows = longer[len(stem) :] if longer.startswith(stem) else ""
            if first_added_token(self._tokenizer, follows) in self._ends.values():
                written = longer[len(prompt) :]
                end = self._end(written, len(stem) - len(prompt))
        stop = end or _stop_of(written, said)
        return ReplyText(prompt, written, stop, bool(end), as_template, hidden)

    def _end(self, written: str, start: int) -> int:
        """Index behind the first end token after `start`. 0 if there is none."""
        found = [
            (at, -len(end)) for end in self._ends if end and (at := written.find(end, start)) >= 0
        ]
        return min(found)[0] - min(found)[1] if found else 0


def _after_prompt(prompt: str, whole: str, said: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """The reply after its prompt, whether the template wrote it, and whether reasoning is hidden.

    Args:
        prompt: the rendered prompt.
        whole: the conversation with the reply, rendered.
        said: the reply.

    Raises:
        TemplateRefusal: the calls of the reply cannot be shown after the prompt.
    """
    opened = opened_block(prompt)
    content, reasoning = str(said["content"]), str(said.get("reasoning_content") or "")
    thought, answer = split_thought(content)
    if whole.startswith(prompt):
        written, as_template = whole[len(prompt) :], True
    elif opened and whole.startswith(prompt.removesuffix(opened)):
        rest = whole[len(prompt) - len(opened) :]
        written, as_template = continued_block(opened, rest), False
    else:
        written, as_template = "", False
    calls = said.get("tool_calls") or []
    shown = all(call["function"]["name"] in written for call in calls)
    if calls and not shown:
        raise TemplateRefusal("it does not show a call of the reply after the reply's prompt")
    if thought.strip() in written and answer.strip() in written and written:
        hidden = bool(reasoning.strip()) and reasoning.strip() not in written
    elif not calls:
        written, as_template, hidden = continued_block(opened, content), False, bool(reasoning)
    else:
        raise TemplateRefusal("it does not show the text of a reply with calls")
    if hidden and opened and (tag := closing_tag(opened.strip())) in written:
        rest = written.partition(tag)[2]
        return f"{reasoning.strip()}\n{tag}{rest}", False, False
    return written, as_template, hidden


def _start_of(written: str, said: Mapping[str, Any]) -> int:
    """Index from which an end token ends the reply. Text before it may have other end tokens."""
    thought, answer = split_thought(str(said["content"]))
    start = max(0, written.find(thought.strip()))
    names = [call["function"]["name"] for call in said.get("tool_calls") or ()]
    # The first place: an answer such as "|" also occurs in the end token.
    return max([start, *(written.find(text, start) for text in (answer.strip(), *names))])


def _stop_of(written: str, said: Mapping[str, Any]) -> int:
    """Index behind the reply, if no end token follows it."""
    if said.get("tool_calls"):
        return len(written.rstrip())
    answer = split_thought(str(said["content"]))[1].strip()
    return written.rfind(answer) + len(answer)
