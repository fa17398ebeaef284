"""Messages and replies of the stand-in."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Base(BaseModel):
    model_config = ConfigDict(extra="allow")

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


class Message(Base):
    role: str
    content: Any = None


class UserMessage(Message):
    role: str = "user"


class ToolCall(Base):
    id: str
    name: str
    arguments: str


class AssistantMessage(Message):
    role: str = "assistant"
    tool_calls: list[ToolCall] | None = None


class ToolMessage(Message):
    role: str = "tool"
    tool_call_id: str = ""


class Tool(Base):
    name: str
    description: str
    parameters: dict[str, Any]


class Usage(Base):
    prompt_tokens: int
    reasoning_tokens: int
    completion_tokens: int
    total_tokens: int


class ResponseMessage(AssistantMessage):
    finish_reason: str | None
    is_truncated: bool | None


class Response(Base):
    id: str
    created: int
    model: str
    usage: Usage
    message: ResponseMessage
