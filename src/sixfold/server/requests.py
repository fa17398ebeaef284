"""What a client may ask: the bodies of /v1/chat/completions and /v1/completions, checked field by field before anything is computed.

A field that would change the answer and is not supported is refused, not passed over; so is one that nobody knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import nearest
from ..types import SamplingParams
from .api_error import ApiError, bad_request

MAX_CHOICES = 1024
"""Completions of one request: prompts times n."""

IGNORED = {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
"""Fields that change nothing in an answer of ours."""

NEUTRAL: dict[str, list[Any]] = {
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "logit_bias": [{}],
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "tool_choice": ["auto", "none"],
}
"""Fields taken only with these values."""

Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""No guesses: "4" is not 4, and a field that nobody knows is a mistake."""


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the token counts."""

    model_config = STRICT

    include_usage: bool = False
    include_obfuscation: bool = False


class Ask(BaseModel):
    """What both endpoints take. return_token_ids: answer with token ids, log-probs and weight versions too. metadata: kept in the record."""

    model_config = STRICT

    model: str
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] = []
    max_tokens: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    metadata: Annotated[dict[str, str], Field(max_length=16)] = {}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def token_limit(self) -> int | None:
        """Most tokens of a completion, if the request says."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """True when the answer carries log-probs in OpenAI's form."""
        raise NotImplementedError

    @property
    def alternatives(self) -> int:
        """How many of the likeliest tokens the answer shows at every position."""
        raise NotImplementedError

    def sampling(self, max_tokens: int, stop_token_ids: tuple[int, ...], seed: int) -> SamplingParams:
        """The engine's parameters. seed: where the request has none."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=(*stop_token_ids, *self.stop_token_ids),
            seed=seed if self.seed is None else self.seed,
            top_logprobs=self.alternatives,
        )


class TextPart(BaseModel):
    """A piece of a message. Text is the only kind."""

    model_config = STRICT

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """arguments: JSON of an object, as text."""

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
    """One turn. Fields that OpenAI's clients send back with an answer of ours are read; what they hold besides text and calls is nothing."""

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class Function(BaseModel):
    """A function that the model may call. parameters: its JSON schema."""

    model_config = STRICT

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One tool."""

    model_config = STRICT

    type: Literal["function"]
    function: Function


class ChatAsk(Ask):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] = "auto"

    @property
    def token_limit(self) -> int | None:
        """Both names of the limit mean the same."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """OpenAI's flag."""
        return self.logprobs

    @property
    def alternatives(self) -> int:
        """OpenAI's number."""
        return self.top_logprobs

    @property
    def uses_tools(self) -> bool:
        """True when the template shows tools and the answer is searched for calls."""
        return bool(self.tools) and self.tool_choice == "auto"

    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as templates take them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()] if self.uses_tools else []

    def shown_messages(self) -> list[dict[str, Any]]:
        """The messages as templates take them: content as text, a call's arguments as an object. Raises ApiError for what no template can show."""
        return [_shown(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


class TextAsk(Ask):
    """The body of /v1/completions. prompt: one or several, each as text or as token ids."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """OpenAI's number of alternatives: 0 asks for the sampled tokens' log-probs alone."""
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        """The same number."""
        return self.logprobs or 0

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises ApiError when there is none, or an empty one."""
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        prompts = [given] if given and isinstance(given[0], int) else given
        if not prompts or not all(prompts):
            raise bad_request("prompt is empty: the model needs at least one token to continue", "prompt")
        return prompts


class WeightsAsk(BaseModel):
    """The body of /v1/weights. path: a checkpoint on the server's machine. version: the number of its weights, larger than that of those served."""

    model_config = STRICT

    path: Annotated[str, Field(min_length=1)]
    version: Count


@dataclass(frozen=True)
class Limits:
    """What a request is held against.

    vocabulary: token ids below it exist. context: longest sequence. default_tokens: of a completion that names no limit.
    """

    vocabulary: int
    context: int
    default_tokens: int

    def max_tokens(self, ask: Ask, longest_prompt: int) -> int:
        """The completion limit. Raises ApiError for token ids that do not exist and for what the context does not hold."""
        if any(token >= self.vocabulary for token in ask.stop_token_ids):
            raise bad_request(f"stop_token_ids: the vocabulary has {self.vocabulary} tokens", "stop_token_ids")
        room = self.context - longest_prompt
        wanted = ask.token_limit if ask.token_limit is not None else min(self.default_tokens, max(1, room))
        if wanted > room:
            raise bad_request(
                f"the model's context is {self.context} tokens: the prompt has {longest_prompt}, and {wanted} are asked for",
                "messages" if isinstance(ask, ChatAsk) else "prompt",
                "context_length_exceeded",
            )
        return wanted


AskT = TypeVar("AskT", bound=Ask)
FormT = TypeVar("FormT", bound=BaseModel)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises ApiError when it is not one, or holds numbers and characters that JSON does not have."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        json.dumps(body, ensure_ascii=False).encode()  # a lone surrogate passes as JSON and breaks tokenizers
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError, as is a number of more digits than Python reads
        raise bad_request(f"the body is not valid JSON: {str(error) or type(error).__name__}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return body


def parse_ask(form: type[AskT], body: Mapping[str, Any]) -> AskT:
    """The checked request. Raises ApiError that names the first field that is wrong. A field that is null counts as left out."""
    given = {key: value for key, value in body.items() if value is not None and key not in IGNORED}
    for key in [k for k in given if k in NEUTRAL]:
        if not any(given[key] == value and isinstance(given[key], bool) == isinstance(value, bool) for value in NEUTRAL[key]):
            allowed = " or ".join(json.dumps(value) for value in NEUTRAL[key])
            raise bad_request(f"{key} is not supported here: leave it out, or {allowed}", key, "unsupported_value")
        if key not in form.model_fields:
            del given[key]
    messages = given.get("messages")
    if isinstance(messages, list):
        given["messages"] = [{k: v for k, v in m.items() if v is not None and v != []} if isinstance(m, dict) else m for m in messages]
    ask = check_form(form, given)
    if isinstance(ask, ChatAsk) and ask.max_tokens and ask.max_completion_tokens and ask.max_tokens != ask.max_completion_tokens:
        raise bad_request("max_tokens and max_completion_tokens mean the same and differ: give one", "max_tokens")
    if isinstance(ask, ChatAsk) and ask.top_logprobs and not ask.logprobs:
        raise bad_request("top_logprobs is for logprobs = true", "top_logprobs")
    if ask.stream_options is not None and not ask.stream:
        raise bad_request("stream_options is for stream = true", "stream_options")
    return ask


def check_form(form: type[FormT], given: Mapping[str, Any]) -> FormT:
    """Raises ApiError that names the first field that is wrong."""
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise _first(error, form) from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _first(error: ValidationError, form: type[BaseModel]) -> ApiError:
    """pydantic's complaint about the first wrong field, in OpenAI's form. Of several (one a branch of a union) the deepest: that branch fits best."""
    errors = error.errors(include_url=False, include_input=False)
    field = str(errors[0]["loc"][0])
    if field in _UNIONS and errors[0]["type"] != "missing":
        return bad_request(f"{field}: expected {_UNIONS[field]}", field, "invalid_value")
    found = max((e for e in errors if e["loc"][0] == field), key=lambda e: len(e["loc"]))
    param, named = "", {name for model in (form, *_PARTS) for name in model.model_fields}
    for step in found["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step in named or found["type"] == "extra_forbidden":  # pydantic names the branches of a union too
            param += f".{step}" if param else step
    if found["type"] == "extra_forbidden":
        hint = nearest(str(found["loc"][-1]), sorted(named))
        return bad_request(f"unknown parameter '{param}'.{hint}", param, "unknown_parameter")
    if found["type"] == "missing":
        return bad_request(f"missing parameter '{param}'", param, "missing_required_parameter")
    return bad_request(f"{param}: {found['msg']}", param, "invalid_value")


_UNIONS = {
    "stop": "a text of 1 to 1000 characters, or a list of at most 16 of them",
    "prompt": "a text, token ids (whole numbers >= 0), or a list of either",
}
"""Fields of several forms, for which pydantic would complain of each form in turn."""

_PARTS: tuple[type[BaseModel], ...] = (ChatMessage, TextPart, PastCall, CalledFunction, Tool, Function, StreamOptions)


def _shown(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise bad_request(f"{where}.content is missing", f"{where}.content", "missing_required_parameter")
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_request(f"{where}.tool_call_id is missing", f"{where}.tool_call_id", "missing_required_parameter")
    if message.tool_calls and message.role != "assistant":
        raise bad_request(f"{where}.tool_calls: only the assistant calls tools", f"{where}.tool_calls")
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    if message.tool_calls:
        shown["tool_calls"] = [_shown_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return shown | {key: value for key, value in (("name", message.name), ("tool_call_id", message.tool_call_id)) if value is not None}


def _shown_call(call: PastCall, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}.function.arguments is not JSON of an object", f"{where}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
