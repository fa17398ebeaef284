"""What a client may ask: the bodies of /v1/chat/completions and /v1/completions, checked field by field before anything is computed.

A field that would change the answer and is not supported is refused, not passed over; so is one
that nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, PlainValidator

from ..types import SamplingParams
from .api_error import ApiError, bad_request
from .form import STRICT, check_form
from .neutral import NEUTRAL, without_neutral
from .structured import Form

MAX_CHOICES = 1024
"""Completions of one request: prompts times n."""

MAX_TOKENS = 1 << 22
"""Tokens that one prompt may be answered with: n times the longest completion. The engine draws the
noise of all of them at once."""
MAX_VERSIONS_AHEAD = 1_000_000
"""How far a version of the weights may lie ahead of the present one."""


def _temperature(value: float) -> float:
    """Below 1e-20, logits divided by it overflow float32."""
    if 0 < value < 1e-20:
        raise ValueError("0 (greedy), or a number from 1e-20 to 2")
    return value


Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]


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
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_temperature)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = []
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] = []
    max_tokens: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    metadata: Annotated[dict[MetadataKey, MetadataText], Field(max_length=16)] = {}

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

    @property
    def scores_prompt(self) -> bool:
        """True when the answer holds log-probs of the prompt."""
        return False

    def check(self) -> None:
        """Raises ApiError for fields that contradict one another."""

    def form(self) -> Form:
        """What the completion must look like.

        Raises ApiError for a form that contradicts itself.
        """
        return Form()

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompt."""
        return "prompt"

    def sampling(self, max_tokens: int, stop_token_ids: tuple[int, ...], seed: int) -> SamplingParams:
        """The engine's parameters. seed: where the request has none."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop_token_ids=(*stop_token_ids, *self.stop_token_ids),
            seed=seed if self.seed is None else self.seed,
            top_logprobs=self.alternatives,
        )


def _prompt(value: Any) -> Any:
    """By hand: pydantic would complain of every item once for each of the four forms."""
    if isinstance(value, str) or _all(value, str) or _all_tokens(value):
        return value
    if isinstance(value, list) and all(_all_tokens(item) for item in value):
        return value
    raise ValueError("expected a text, token ids (whole numbers >= 0), or a list of either")


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _all_tokens(value: Any) -> bool:
    return _all(value, int) and (not value or min(value) >= 0)


class TextAsk(Ask):
    """The body of /v1/completions. prompt: one or several, each as text or as token ids. echo: the answer begins with the prompt."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """OpenAI's number of alternatives: 0 asks for the sampled tokens' log-probs alone."""
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        """The same number."""
        return self.logprobs or 0

    @property
    def scores_prompt(self) -> bool:
        """True when the answer holds log-probs of the prompt."""
        return self.echo and self.wants_logprobs

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

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    version: Annotated[int, Field(ge=1, lt=2**53)]


@dataclass(frozen=True)
class Limits:
    """What a request is held against.

    vocabulary: token ids below it exist. context: longest sequence that model and KV cache hold.
    default_tokens: of a completion that names no limit. characters_per_token: most characters that
    one token stands for.
    """

    vocabulary: int
    context: int
    default_tokens: int
    characters_per_token: int

    def max_tokens(self, ask: Ask, longest_prompt: int) -> int:
        """The completion limit.

        Raises ApiError for token ids that do not exist and for what the context does not hold.
        """
        if any(token >= self.vocabulary for token in ask.stop_token_ids):
            raise bad_request(f"stop_token_ids: the vocabulary has {self.vocabulary} tokens", "stop_token_ids")
        room = self.context - longest_prompt
        wanted = ask.token_limit if ask.token_limit is not None else min(self.default_tokens, max(1, room))
        if wanted > room:
            raise self.overflow(f"you requested {wanted} tokens for the completion and your prompt has {longest_prompt}", ask.prompt_field)
        if wanted * ask.n > MAX_TOKENS:
            raise bad_request(f"n = {ask.n} completions of {wanted} tokens are over {MAX_TOKENS} tokens: lower n or max_tokens", "n")
        return wanted

    def check_length(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit the context, before it is tokenized.

        Raises:
            ApiError: the text has more characters than the context holds.
        """
        if characters > self.context * self.characters_per_token:
            raise self.overflow(f"your prompt has {characters} characters", param)

    def overflow(self, requested: str, param: str) -> ApiError:
        """The refusal of what does not fit the context, in words and with the code by which clients know it."""
        message = (
            f"This model's maximum context length is {self.context} tokens. However, {requested}. Please shorten the prompt or lower max_tokens."
        )
        return bad_request(message, param, "context_length_exceeded")


AskT = TypeVar("AskT", bound=Ask)


def parse_ask(form: type[AskT], body: Mapping[str, Any]) -> AskT:
    """The checked request. A field that is null counts as left out.

    Raises:
        ApiError: names the first field that is wrong.
    """
    given = without_neutral(body, form.model_fields, NEUTRAL)
    messages = given.get("messages")
    if isinstance(messages, list):
        given["messages"] = [{k: v for k, v in m.items() if v is not None and v != []} if isinstance(m, dict) else m for m in messages]
    ask = check_form(form, given)
    ask.check()
    if ask.stream_options is not None and not ask.stream:
        raise bad_request("stream_options is for stream = true", "stream_options")
    return ask
