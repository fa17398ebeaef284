"""Request bodies: common fields of both completion endpoints, /v1/completions and /v1/weights.

Every field is checked before anything is computed. Unknown fields are refused. So are unsupported
fields that would change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, PlainValidator

from sixfold.renderer.renderer import Renderer
from sixfold.types import SamplingParams

from .api_error import ApiError, bad_request
from .form import STRICT, check_form
from .neutral import NEUTRAL, without_neutral
from .structured import Form

MAX_CHOICES = 1024
"""Maximum number of completions of one request: number of prompts times n."""

MAX_SAMPLES = 128
"""Maximum number of completions of one prompt."""

MAX_TOKENS = 1 << 22
"""Maximum number of sampled tokens per prompt: completions times the longest one.

The engine draws the noise of all of them at once.
"""
MAX_VERSIONS_AHEAD = 1_000_000
"""Largest difference between a new version of the weights and the current one."""


def _temperature(value: float) -> float:
    """Refuse temperatures between 0 and 1e-20: logits divided by them overflow float32."""
    if 0 < value < 1e-20:
        raise ValueError("0 (greedy), or a number from 1e-20 to 2")
    return value


Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
"""Requests with a larger priority leave the queue first."""


class StreamOptions(BaseModel):
    """Options of a stream. With `include_usage`, a last chunk has the token counts."""

    model_config = STRICT

    include_usage: bool = False
    include_obfuscation: bool = False


class Noise(BaseModel):
    """Name of the sampling noise of one completion (`SampleKey` in `rollout/generator.py`)."""

    model_config = STRICT

    name: Annotated[str, Field(max_length=1000)]
    sample: Annotated[int, Field(ge=0, lt=2**31)] = 0
    origin: Annotated[int, Field(ge=0)] | None = None


class SearchForm(BaseModel):
    """How an answer is searched for: a method of `sixfold search` with its settings.

    Fields that are absent have the values of `sixfold_search.Settings` and `Stepping`.
    """

    model_config = STRICT

    method: Annotated[str, Field(max_length=64)]
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    expand: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    lookahead: Annotated[int, Field(ge=1, le=64)] | None = None
    explore: Annotated[float, Field(gt=0)] | None = None
    threshold: float | None = None
    think: Count | None = None
    think_min: Annotated[int, Field(ge=0)] | None = None
    think_end: StopText | None = None
    think_more: StopText | None = None
    steps: StopText | None = None
    step_tokens: Count | None = None
    aggregate: Annotated[str, Field(max_length=64)] | None = None
    budget: Count | None = None


class Ask(BaseModel):
    """Common fields of /v1/chat/completions and /v1/completions.

    With `best_of`, the best n of so many completions are answered: those with the largest log-prob
    per token. With `search`, the answer is what a method of search chooses.

    Of the requests that wait, those with the largest `priority` start first. With
    `return_token_ids`, the answer includes token ids, log-probs and weight versions.
    `metadata` is stored in the record of the exchange.
    """

    model_config = STRICT

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    search: SearchForm | None = None
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
    priority: Priority = 0
    metadata: Annotated[dict[MetadataKey, MetadataText], Field(max_length=16)] = {}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def samples(self) -> int:
        """Number of completions that are sampled for each prompt."""
        return self.best_of or self.n

    @property
    def token_limit(self) -> int | None:
        """Longest completion in tokens, or None if the request sets no limit."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer includes log-probs in OpenAI's format."""
        raise NotImplementedError

    @property
    def alternatives(self) -> int:
        """Number of likeliest tokens that the answer shows at each position."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        """True if the answer includes log-probs of the prompt."""
        return False

    @property
    def named_noise(self) -> Noise | None:
        """The noise that the request names, or None."""
        return None

    def check(self) -> None:
        """Raise ApiError for fields that contradict one another."""
        if self.samples < self.n:
            raise bad_request(
                f"best_of = {self.best_of} is less than n = {self.n}: the n best of best_of"
                " completions are answered. Raise best_of",
                "best_of",
            )
        if self.samples > self.n and self.stream:
            raise bad_request(
                "best_of: the best completion is known when all have ended, so it cannot be"
                " streamed. Remove stream",
                "best_of",
            )
        if self.search and self.best_of:
            raise bad_request("best_of and search both choose completions. Give one", "best_of")

    def form(self) -> Form:
        """The required form of the completion. Raises ApiError for contradictory fields."""
        return Form()

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompt."""
        return "prompt"

    def sampling(
        self, max_tokens: int, stop_token_ids: tuple[int, ...], seed: int
    ) -> SamplingParams:
        """The engine's sampling parameters.

        Args:
            max_tokens: longest completion in tokens.
            stop_token_ids: the model's end tokens, in addition to those of the request.
            seed: used if the request has no seed.
        """
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
    """Check the type of `prompt`.

    pydantic itself would report every item of a list once per form, and there are four forms.
    """
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
    """The body of /v1/completions.

    `prompt` is one prompt or several, each as text or token ids. With `echo`, the answer begins
    with the prompt.

    With `noise`, the request alone decides when its completion ends: the model's own end tokens and
    stop strings do not end it. It has one prompt and n = 1.
    """

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    noise: Noise | None = None

    def check(self) -> None:
        """Raise ApiError also if `noise` is given for more than one completion."""
        super().check()
        if self.noise is not None and (self.samples > 1 or len(self.prompts()) > 1):
            raise bad_request("noise names one completion. Send one prompt, and n = 1", "noise")

    @property
    def named_noise(self) -> Noise | None:
        """The noise that the request names, or None."""
        return self.noise

    @property
    def wants_logprobs(self) -> bool:
        """True if `logprobs` is set. 0 requests only the log-probs of sampled tokens."""
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        """Number of likeliest tokens that the answer shows at each position."""
        return self.logprobs or 0

    @property
    def scores_prompt(self) -> bool:
        """True if the answer includes log-probs of the prompt."""
        return self.echo and self.wants_logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Raises ApiError if there is no prompt or an empty one."""
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        prompts = [given] if given and isinstance(given[0], int) else given
        if not prompts or not all(prompts):
            raise bad_request(
                "prompt is empty. Give at least one token for the model to continue", "prompt"
            )
        return prompts


class WeightsAsk(BaseModel):
    """The body of /v1/weights.

    `path` is a checkpoint on the server's machine. `version` is the version of its weights, greater
    than the current one.
    """

    model_config = STRICT

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    version: Annotated[int, Field(ge=1, lt=2**53)]


@dataclass(frozen=True)
class Limits:
    """Limits that requests are checked against.

    Attributes:
        vocabulary: number of token ids.
        context: longest sequence that the model and the KV cache support, in tokens.
        default_tokens: longest completion of a request without a limit, in tokens.
        characters_per_token: maximum number of characters of one token.
    """

    vocabulary: int
    context: int
    default_tokens: int
    characters_per_token: int

    def max_tokens(self, ask: Ask, longest_prompt: int) -> int:
        """Longest completion of a request, in tokens.

        Args:
            ask: the request.
            longest_prompt: length of its longest prompt, in tokens.

        Raises:
            ApiError: a stop token does not exist, the completion does not fit into the context, or
                the request needs too many tokens.
        """
        self.check_token_ids(ask.stop_token_ids, "stop_token_ids")
        room = self.context - longest_prompt
        wanted = (
            ask.token_limit
            if ask.token_limit is not None
            else min(self.default_tokens, max(1, room))
        )
        if wanted > room:
            raise self.overflow(
                f"you requested {wanted} tokens for the completion and your prompt has"
                f" {longest_prompt}",
                ask.prompt_field,
            )
        if wanted * ask.samples > MAX_TOKENS:
            field = "best_of" if ask.best_of else "n"
            raise bad_request(
                f"{field} = {ask.samples} completions of {wanted} tokens exceed {MAX_TOKENS}"
                f" tokens. Lower {field} or max_tokens",
                field,
            )
        return wanted

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Check that token ids are in the vocabulary.

        Args:
            ids: the token ids.
            param: field that holds them, for the error.

        Raises:
            ApiError: an id is too large.
        """
        if ids and max(ids) >= self.vocabulary:
            raise bad_request(
                f"{param}: {max(ids)} is not a token id; the vocabulary has {self.vocabulary}"
                " tokens. Use ids below that",
                param,
            )

    def check_chat(self, messages: Sequence[Mapping[str, Any]], renderer: Renderer) -> None:
        """Check a conversation before it is tokenized.

        Args:
            messages: the conversation.
            renderer: has the model's chat template.

        Raises:
            ApiError: the model has no chat template, or the messages are too long.
        """
        if not renderer.has_template:
            raise bad_request("the model has no chat template. Use /v1/completions", "messages")
        self.check_length(sum(len(message["content"]) for message in messages), "messages")

    def check_length(self, characters: int, param: str) -> None:
        """Check the length of a text before it is tokenized.

        Args:
            characters: number of characters.
            param: field that holds the text, for the error.

        Raises:
            ApiError: the text has too many characters to fit into the context.
        """
        if characters > self.context * self.characters_per_token:
            raise self.overflow(f"your prompt has {characters} characters", param)

    def overflow(self, requested: str, param: str) -> ApiError:
        """Error for a request that does not fit into the context.

        Clients recognize OpenAI's wording and code.

        Args:
            requested: the part of the message about the request.
            param: field that is too long.
        """
        message = (
            f"This model's maximum context length is {self.context} tokens. However, {requested}."
            " Please shorten the prompt or lower max_tokens."
        )
        return bad_request(message, param, "context_length_exceeded")


AskT = TypeVar("AskT", bound=Ask)


def parse_ask(form: type[AskT], body: Mapping[str, Any]) -> AskT:
    """Check a request body. Fields that are null count as absent.

    An empty list counts as absent in a message too, but as `content` it is an empty text.

    Args:
        form: class of the endpoint's body.
        body: the parsed JSON.

    Raises:
        ApiError: a field is wrong. The error names the first one.
    """
    given = without_neutral(body, form.model_fields, NEUTRAL)
    messages = given.get("messages")
    if isinstance(messages, list):
        given["messages"] = [
            {k: v for k, v in m.items() if v is not None and (v != [] or k == "content")}
            if isinstance(m, dict)
            else m
            for m in messages
        ]
    ask = check_form(form, given)
    ask.check()
    if ask.stream_options is not None and not ask.stream:
        raise bad_request("stream_options needs stream = true", "stream_options")
    return ask
