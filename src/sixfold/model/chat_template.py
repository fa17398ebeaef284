"""A tokenizer's chat template: settings that choose or change it, rendering, and its errors.

Settings are applied to the tokenizer once, when the model is loaded. All code that renders prompts
then uses the same template, and a saved model has the template that it was trained with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from ..errors import UserError

PROBE = "5819203746"
"""Message for test renderings. It has only digits, which trimming and changes of case preserve."""

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup_5819",
        "description": "Look up a value.",
        "parameters": {
            "type": "object",
            "properties": {"alpha": {"type": "string", "description": "the key"}},
            "required": ["alpha"],
        },
    },
}
"""Tool for test renderings."""

_REMEDY = "use another template (model.chat_template = FILE), or 'none' for plain text prompts"


class TemplateRefusal(ValueError):
    """The template raised an error while it rendered a conversation."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] = (),
    generation: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation to the text that the model reads.

    Args:
        tokenizer: must have a chat template.
        messages: role and content of each turn.
        tools: descriptions of functions that the model may call.
        generation: add the start of the assistant's next turn.

    Raises:
        TemplateRefusal: the template raised an error on these messages.
        UserError: the template does not parse.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation,
            **(arguments or {}),
        )
    except TemplateSyntaxError as error:
        raise UserError(
            f"the model's chat template does not parse (line {error.lineno}: {error.message})."
            f" Remedy: {_REMEDY}"
        ) from error
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        # A template is a program: it may raise any of these errors on an unexpected message.
        raise TemplateRefusal(" ".join(str(error).split()) or type(error).__name__) from error
    return str(rendered)


def set_template(tokenizer: PreTrainedTokenizerBase, choice: str, arguments: Sequence[str]) -> None:
    """Apply `model.chat_template` and `model.template_args` to a tokenizer.

    Arguments become defaults at the top of the template, so they also apply in a saved model.

    A tokenizer may have several templates. They stay, and transformers chooses among them: a
    conversation with tools is rendered by the one named tool_use, others by the one named default.

    Args:
        tokenizer: its `chat_template` is replaced.
        choice: auto (keep the tokenizer's own), none, the name of one of several templates, or a
            file.
        arguments: `name=value` for each argument. A value that is not JSON is taken as text.

    Raises:
        UserError: the file cannot be read, there is no template for the arguments, or the template
            cannot be used.
    """
    template = _choose(tokenizer.chat_template, choice)
    if template is None and arguments:
        raise UserError(
            f"model.template_args = {list(arguments)} has no effect: there is no chat template."
            " Leave it empty"
        )
    defaults = "".join(map(_default, arguments))
    if isinstance(template, dict):
        tokenizer.chat_template = {
            name: _with_defaults(one, defaults) for name, one in template.items()
        }
    else:
        tokenizer.chat_template = template and _with_defaults(template, defaults)
    if template is not None:
        _check(tokenizer)


def _with_defaults(template: str, defaults: str) -> str:
    return template if template.startswith(defaults) else defaults + template


def _choose(own: Any, choice: str) -> str | dict[str, str] | None:
    """The template or templates that `choice` names, or None for no template.

    Args:
        own: the tokenizer's template: a text, a dictionary of named texts, or None.
        choice: `model.chat_template`.
    """
    if choice == "none":
        return None
    if isinstance(own, dict):
        if choice in own:
            return str(own[choice])
        if choice == "auto" and "default" not in own:
            raise UserError(
                "model.chat_template = 'auto': the tokenizer has several templates but no"
                f" default. Choose one of {sorted(own)}"
            )
    if choice == "auto":
        return own or None
    try:
        return Path(choice).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.chat_template = '{choice}': cannot be read ({error}). Use 'auto', 'none' or"
            " the path of a Jinja file"
        ) from error


def _default(argument: str) -> str:
    """Jinja code that sets a variable, unless the caller of the template sets it."""
    name, _, raw = argument.partition("=")
    try:
        value = json.loads({"True": "true", "False": "false"}.get(raw, raw))
    except ValueError:
        value = raw
    literal = (
        re.sub(r"\bnull\b", "none", json.dumps(value))
        if not isinstance(value, str)
        else json.dumps(value)
    )
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"


def _check(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a template that does not parse or that omits the user's message."""
    try:
        text = render(tokenizer, [{"role": "user", "content": PROBE}])
    except TemplateRefusal:
        return  # it may need a system message, which only the tasks can provide
    if PROBE not in text:
        raise UserError(
            f"the model's chat template omits the text of a user's message. Remedy: {_REMEDY}"
        )
