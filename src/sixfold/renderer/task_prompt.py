"""Render a task's messages to the text that the model reads, up to where the completion begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..model.chat_template import PROBE, TemplateRefusal, render
from ..types import Task

PLAIN_TEXT = (
    "prompts are plain text: there is no chat template. If the model expects conversations, set"
    " model.chat_template = FILE"
)
"""Note about a tokenizer without a chat template."""


def rendered_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    continued: bool,
) -> str:
    """The prompt as text, up to the start of the reply, or to its continuation.

    In the second case the assistant's turn is rendered and cut behind the message, as transformers
    does with `continue_final_message`. If the template would rewrite the message (some remove
    thoughts), it follows the start of the turn unchanged. White space at its end stays.

    Args:
        tokenizer: must have a chat template.
        messages: turns, as the chat template expects them.
        tools: descriptions of functions.
        arguments: variables of the template.
        continued: the last message is the start of the reply.

    Raises:
        TemplateRefusal: the template raised an error, or does not show the calls of a message.
    """
    before, prefill = list(messages), ""
    if continued:
        prefill = str(before.pop()["content"])
    opened = render(tokenizer, before, tools=tools, arguments=arguments)
    if any(message.get("tool_calls") for message in before):
        silent = [{k: v for k, v in m.items() if k != "tool_calls"} for m in before]
        if _render(tokenizer, silent, tools, arguments) == opened:
            raise TemplateRefusal("it does not show the tool calls of earlier messages")
    if not prefill:
        return opened
    turns = [*before, {"role": "assistant", "content": prefill + PROBE}]
    whole = _render(tokenizer, turns, tools, arguments, generation=False)
    head, found, _ = whole.rpartition(PROBE)
    return head if found and head.endswith(prefill.lstrip()) else opened + prefill


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    generation: bool = True,
) -> str:
    """The rendered conversation; empty if the template refuses it."""
    try:
        return render(tokenizer, messages, tools=tools, generation=generation, arguments=arguments)
    except TemplateRefusal:
        return ""


def refusal_error(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    messages: Sequence[Mapping[str, Any]],
    refusal: TemplateRefusal,
) -> UserError:
    if messages[0]["role"] == "system" and _render(
        tokenizer, messages[1:], task.tools, task.template_args
    ):
        return UserError(
            f"task {task.id}: the model's chat template refuses system messages ({refusal}). Leave"
            " data.system_prompt empty and put the instructions into the prompt"
            " (data.prompt_suffix), or use a template that accepts them (model.chat_template ="
            " FILE)"
        )
    return UserError(
        f"task {task.id}: the model's chat template refuses the prompt ({refusal}). Change the"
        " messages, or use another template (model.chat_template = FILE, or 'none' for plain text"
        " prompts)"
    )


def task_messages(task: Task) -> list[dict[str, Any]]:
    if isinstance(task.prompt, str):
        return [{"role": "user", "content": task.prompt}]
    return [dict(message) for message in task.prompt]


def bare_text(task: Task) -> str:
    """The task's prompt as text, for a tokenizer without a chat template.

    Raises:
        UserError: the prompt is a chat.
    """
    if not isinstance(task.prompt, str):
        start = " and data.prefill (data.prompt_suffix can begin the reply)" if task.prefill else ""
        raise UserError(
            f"task {task.id} is a chat, but the model has no chat template. Use text prompts, a"
            f" chat model, or a template (model.chat_template = FILE). Leave data.system_prompt"
            f"{start} empty"
        )
    return task.prompt


def solution_text(task: Task) -> str:
    """The task's worked solution, or else its answer, without the prefill that it repeats.

    Raises:
        UserError: the solution has several replies, or the answer is no text.
    """
    text = task.worked
    if isinstance(text, tuple):
        raise UserError(
            f"task {task.id} has a solution of several replies, which needs an environment of"
            " several turns. Set environment.episode"
        )
    return without_prefill(text, task)


def without_prefill(text: str, task: Task) -> str:
    """The text of a reply without the task's prefill, if it repeats that."""
    begun = task.prefill.strip()
    if not (begun and text.lstrip().startswith(begun)):
        return text
    rest, space = text.lstrip().removeprefix(begun), task.prefill.lstrip().removeprefix(begun)
    # The prompt has this white space already, of which the text may repeat a part.
    repeated = next(n for n in range(len(space), -1, -1) if rest.startswith(space[:n]))
    return rest[repeated:]
