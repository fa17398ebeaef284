"""The body of /v1/chat/completions, with its messages and tools."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .api_error import bad_request
from .bounds import shortened
from .form import STRICT
from .requests import Ask, Count
from .structured import Form


class TextPart(BaseModel):
    """A part of a message. Only text is supported."""

    model_config = STRICT

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """A function call. `arguments` is a JSON object, as text."""

    model_config = STRICT

    name: str
    arguments: str


class PastCall(BaseModel):
    """A tool call of an earlier turn."""

    model_config = STRICT

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One message of the conversation.

    Fields of this server's answers are accepted, because clients send answers back.
    `reasoning_content` is passed to the template, which may show it.
    """

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[PastCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content or ())
        )


class Function(BaseModel):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    model_config = STRICT

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """JSON schema of the arguments. A function without parameters takes only {}."""
        given = self.parameters or {}
        described = {"type", "properties", "required", "title", "description", "$schema"}
        if given.get("properties") or set(given) - described:
            return given
        return {**given, "type": "object", "properties": {}, "additionalProperties": False}


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = STRICT

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """The function that must be called."""

    model_config = STRICT

    name: str


class NamedTool(BaseModel):
    """The tool that must be called."""

    model_config = STRICT

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(BaseModel):
    """A named JSON schema. `strict` has no effect: the answer always follows the schema."""

    model_config = ConfigDict(**STRICT, populate_by_name=True)

    name: str = "answer"
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Format of the answer: text, a JSON object, or JSON that follows a schema."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ChatAsk(Ask):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` or `max_tokens`: two names of the same limit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer includes log-probs."""
        return self.logprobs

    @property
    def alternatives(self) -> int:
        """Number of likeliest tokens shown at each position."""
        return self.top_logprobs

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompt."""
        return "messages"

    @property
    def uses_tools(self) -> bool:
        """True if the template gets the tools and the answer is parsed for tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def check(self) -> None:
        """Raise ApiError for fields that contradict one another."""
        super().check()
        if (
            self.max_tokens
            and self.max_completion_tokens
            and self.max_tokens != self.max_completion_tokens
        ):
            raise bad_request(
                "max_tokens and max_completion_tokens are two names of one limit, but their"
                " values differ. Give one of them",
                "max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs = true", "top_logprobs")

    def form(self) -> Form:
        """The required form of the answer.

        Raises:
            ApiError: a required tool does not exist, or the schema is missing.
        """
        must = self.tool_choice not in ("auto", "none")
        tools = (
            {tool.function.name: tool.function.arguments for tool in self.tools or ()}
            if self.uses_tools
            else {}
        )
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in tools:
                raise bad_request(
                    f"tool_choice: '{shortened(name)}' is not in tools. Add it or choose another",
                    "tool_choice",
                )
            tools = {name: tools[name]}
        if must and not tools:
            raise bad_request(
                "tool_choice: a call is required, but tools is empty. Give at least one tool",
                "tool_choice",
            )
        many = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
        return Form(self._schema(), tuple(tools.items()), must, many)

    def _schema(self) -> dict[str, Any] | None:
        given = self.response_format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return {"type": "object"}
        if given.json_schema is None:
            raise bad_request(
                "response_format.json_schema is missing",
                "response_format.json_schema",
                "missing_required_parameter",
            )
        return given.json_schema.json_schema or {"type": "object"}

    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as arguments of a chat template."""
        return (
            [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
            if self.uses_tools
            else []
        )

    def shown_messages(self) -> list[dict[str, Any]]:
        """The messages as arguments of a chat template.

        The content becomes one text, and the arguments of a call become an object.

        Raises:
            ApiError: a message lacks a field or has a field that does not fit its role.
        """
        return [_shown(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


def _shown(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise bad_request(
            f"{where}.content is missing", f"{where}.content", "missing_required_parameter"
        )
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_request(
            f"{where}.tool_call_id is missing",
            f"{where}.tool_call_id",
            "missing_required_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise bad_request(
            f"{where}.tool_calls is only allowed with role 'assistant'. Remove it",
            f"{where}.tool_calls",
        )
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    if message.tool_calls:
        shown["tool_calls"] = [
            _shown_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    return shown | {key: value for key, value in more.items() if value is not None}


def _shown_call(call: PastCall, where: str) -> dict[str, Any]:
    try:
        # Clients send "" for a call without arguments.
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(
            f"{where}.function.arguments must be a JSON object, as text",
            f"{where}.function.arguments",
        )
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
