"""Conversations as training examples: token ids, and the spans of the replies.

Every trained reply follows exactly the prompt that sampling would give it (`encode_messages`). If
the template renders earlier replies as they were written, all replies of a conversation are in one
example. If it rewrites them once other messages follow (Qwen3 removes thoughts, gpt-oss replaces
the end token), the conversation is split: a reply whose prompt does not continue the example before
it begins another example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import UserError
from ..types import Task, is_trained
from .renderer import Renderer, RenderError
from .task_prompt import solution_text

TrainOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class Example:
    """Tokens of one example.

    Attributes:
        tokens: token ids.
        spans: start and stop of each trained part, in order.
    """

    tokens: list[int]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoded:
    """Examples of one conversation.

    Attributes:
        examples: at least one.
        rewritten: number of replies that the template would write differently after their prompt.
        hidden: number of replies whose `reasoning_content` the template does not show.
        spelled: number of replies that spell a special token other than a think tag.
    """

    examples: list[Example]
    rewritten: int = 0
    hidden: int = 0
    spelled: int = 0

    @property
    def changed(self) -> dict[str, int]:
        """The numbers of replies by name."""
        return {"rewritten": self.rewritten, "hidden": self.hidden, "spelled": self.spelled}


def reply_notes(encoded: Counter[str], of: str) -> list[str]:
    """Messages about replies that are trained differently from how they are written.

    Args:
        encoded: sum of `Encoded.changed`.
        of: what has the replies, in the plural.
    """
    whys = {
        "rewritten": f"replies of {of} follow their prompt as they are: the chat template would"
        " write them differently",
        "hidden": f"replies of {of} have reasoning_content that the chat template does not show: it"
        " is not trained",
        "spelled": f"replies of {of} spell special tokens, which are trained as plain text. If they"
        " are end tokens, remove them: one is added to every reply",
    }
    return [f"{encoded[name]} {why}" for name, why in whys.items() if encoded[name]]


def encode_conversation(renderer: Renderer, task: Task, train_on: TrainOn) -> Encoded:
    """Training examples of a conversation, or of a prompt with a worked solution.

    Args:
        renderer: with the tokenizer of the policy.
        task: its prompt is a whole conversation that ends with a reply, or a prompt with a trace.
        train_on: assistant: all replies with a weight. last: the last of them. all: every token
            but the first.

    Raises:
        UserError: there is no chat template, or it refuses the messages, or the tokenizer does not
            know some characters.
    """
    if isinstance(task.prompt, str) or task.prompt[-1]["role"] != "assistant" or task.prefill:
        prompt = renderer.encode(task)
        tokens = prompt + renderer.solution(task)
        spelled = renderer.has_special(solution_text(task))
        encoded = Encoded([Example(tokens, ((len(prompt), len(tokens)),))], spelled=spelled)
    elif not renderer.has_template:
        raise UserError(
            f"task {task.id} is a conversation, but the model has no chat template"
            " (model.chat_template = 'none'). Set model.chat_template = FILE, use a chat model, or"
            " pairs of texts (prompt and completion)"
        )
    else:
        try:
            encoded = _encode_turns(renderer, task, task.prompt, last=train_on != "assistant")
        except RenderError as error:
            raise UserError(
                f"task {task.id}: {error}. Change the messages, or use another template"
                " (model.chat_template = FILE)"
            ) from error
    if train_on != "all":
        return encoded
    (example,) = encoded.examples
    whole = Example(example.tokens, ((1, len(example.tokens)),))
    return replace(encoded, examples=[whole])


def _encode_turns(
    renderer: Renderer, task: Task, messages: Sequence[Mapping[str, Any]], last: bool
) -> Encoded:
    """Examples of the trained replies, or of the last one."""
    trained = [at for at, message in enumerate(messages) if is_trained(message)]
    examples: list[Example] = []
    rewritten = hidden = spelled = 0
    for at in trained[-1:] if last else trained:
        before = messages[:at]
        prompt = renderer.encode_messages(before, task.tools, task.template_args)
        reply = renderer.encode_reply(
            before, messages[at], task.tools, task.template_args, _until_reply(messages[at + 1 :])
        )
        rewritten += not reply.as_template
        hidden += reply.hidden
        spelled += renderer.has_special(messages[at].get("content") or "")
        tokens = prompt + reply.tokens
        spans: tuple[tuple[int, int], ...] = ((len(prompt), len(tokens)),)
        if examples and examples[-1].tokens == prompt[: len(examples[-1].tokens)]:
            spans = (*examples.pop().spans, *spans)
        examples.append(Example(tokens, spans))
    return Encoded(examples, rewritten, hidden, spelled)


def _until_reply(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages before the next reply."""
    count = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    return messages[:count]
