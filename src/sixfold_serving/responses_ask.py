"""The body of /v1/responses, converted to a chat request. Nothing is stored between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .api_error import bad_request
from .bounds import shortened
from .chat_ask import (
    CalledFunction,
    ChatAsk,
    ChatMessage,
    Function,
    NamedFunction,
    NamedSchema,
    NamedTool,
    PastCall,
    ResponseFormat,
    Tool,
)
from .form import STRICT, check_form
from .neutral import NEUTRAL, without_neutral
from .requests import Count, MetadataKey, MetadataText, Priority

NEUTRAL_RESPONSES: dict[str, list[Any]] = {
    "background": [False],
    "context_management": [[]],
    "conversation": [],
    "max_tool_calls": [],
    "previous_response_id": [],
    "prompt": [],
    "stream_options": [{}, {"include_obfuscation": False}, {"include_obfuscation": True}],
    "truncation": ["disabled"],
}
"""Field of this endpoint -> accepted values. An empty list accepts only null."""


class Loose(BaseModel):
    """Items that clients send back as they received them. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class InputPart(Loose):
    """A part of a message. Only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Loose):
    """One turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(fail_fast=True)]

    def as_chat(self) -> ChatMessage:
        """This item as a chat message."""
        text = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        return ChatMessage(role=self.role, content=text)


class InputCall(Loose):
    """A function call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def as_chat(self) -> ChatMessage:
        """This item as a chat message."""
        call = PastCall(
            id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments)
        )
        return ChatMessage(role="assistant", tool_calls=[call])


class InputOutput(Loose):
    """The result of a called function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputPart], Field(fail_fast=True)]

    def as_chat(self) -> ChatMessage:
        """This item as a chat message."""
        text = (
            self.output
            if isinstance(self.output, str)
            else "".join(part.text for part in self.output)
        )
        return ChatMessage(role="tool", content=text, tool_call_id=self.call_id)


class InputReasoning(Loose):
    """Reasoning of another server's model. It is ignored."""

    type: Literal["reasoning"]

    def as_chat(self) -> None:
        """None: reasoning is not passed to the model."""


Item = InputMessage | InputCall | InputOutput | InputReasoning


class FlatTool(BaseModel):
    """A function that the model may call, in the format of this endpoint."""

    model_config = STRICT

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class FlatChoice(BaseModel):
    """The function that must be called."""

    model_config = STRICT

    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    """Format of the answer: text, a JSON object, or JSON that follows a schema."""

    model_config = ConfigDict(**STRICT, populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class TextSettings(BaseModel):
    """Settings of the answer's text. `verbosity` is ignored."""

    model_config = STRICT

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesAsk(BaseModel):
    """The body of /v1/responses.

    `reasoning` is ignored. In `include`, the encrypted reasoning of OpenAI's models is ignored.
    """

    model_config = STRICT

    model: str
    input: str | Annotated[list[Item], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=128)] = []
    tool_choice: Literal["auto", "none", "required"] | FlatChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextSettings = TextSettings()
    stream: bool = False
    priority: Priority = 0
    metadata: Annotated[dict[MetadataKey, MetadataText], Field(max_length=16)] = {}
    include: Annotated[list[str], Field(max_length=32)] = []
    reasoning: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ApiError for values of `include` that this server does not support."""
        known = {"message.output_text.logprobs", "reasoning.encrypted_content"}
        unknown = next((name for name in self.include if name not in known), None)
        if unknown is not None:
            raise bad_request(
                f"include: '{shortened(unknown)}' is not supported. Remove it",
                "include",
                "unsupported_value",
            )

    def messages(self) -> list[ChatMessage]:
        """The conversation as chat messages.

        Consecutive calls become one turn, together with the assistant's text before them.

        Raises:
            ApiError: the conversation is empty.
        """
        turns: list[ChatMessage] = (
            [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        )
        items: list[Item] = (
            [InputMessage(role="user", content=self.input)]
            if isinstance(self.input, str)
            else self.input
        )
        for item in items:
            turn = item.as_chat()
            if turn is None:
                continue
            last = turns[-1] if turns else None
            if turn.tool_calls and last is not None and last.role == "assistant":
                turns[-1] = last.model_copy(
                    update={"tool_calls": [*(last.tool_calls or ()), *turn.tool_calls]}
                )
            else:
                turns.append(turn)
        if not turns:
            raise bad_request("input is empty. Give a text or at least one message", "input")
        return turns

    def chat_fields(self) -> dict[str, Any]:
        """The fields of the equivalent request to /v1/chat/completions."""
        logprobs = "message.output_text.logprobs" in self.include
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": logprobs or None,
            "top_logprobs": self.top_logprobs if logprobs else None,
            "tools": [_tool(tool) for tool in self.tools] or None,
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            "stream": self.stream,
            "priority": self.priority,
            "metadata": self.metadata,
        }
        return {key: value for key, value in fields.items() if value is not None}

    def _choice(self) -> str | NamedTool:
        if isinstance(self.tool_choice, FlatChoice):
            return NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))
        return self.tool_choice

    def _format(self) -> ResponseFormat | None:
        given = self.text.format
        if given is None or given.type == "text":
            return None
        schema = (
            NamedSchema(name=given.name, json_schema=given.json_schema)
            if given.type == "json_schema"
            else None
        )
        return ResponseFormat(type=given.type, json_schema=schema)


def _tool(tool: FlatTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def parse_responses(body: dict[str, Any]) -> tuple[ResponsesAsk, ChatAsk]:
    """Check a request and convert it to a chat request.

    Returns:
        The request, and the equivalent chat request.

    Raises:
        ApiError: a field is wrong. The error names the first one.
    """
    given = without_neutral(body, ResponsesAsk.model_fields, NEUTRAL | NEUTRAL_RESPONSES)
    items = given.get("input")
    if isinstance(items, list):
        given["input"] = [
            {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item
            for item in items
        ]
    for tool in given["tools"] if isinstance(given.get("tools"), list) else ():
        if isinstance(tool, dict) and tool.get("type") != "function":
            kind = shortened(str(tool.get("type")))
            raise bad_request(
                f"tools: the type '{kind}' is not supported. Use 'function'",
                "tools",
                "unsupported_value",
            )
    asked = check_form(ResponsesAsk, given)
    asked.check()
    ask = check_form(ChatAsk, asked.chat_fields())
    ask.check()
    return asked, ask
