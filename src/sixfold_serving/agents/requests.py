"""Sampling parameters of an agent's request.

The recipe sets the sampling distribution, because log-probs must be those of the trained policy.
So the sampling settings of a request have no effect, and each causes one warning. Settings that
only end a reply earlier are respected: `stop`, `stop_token_ids` and `max_tokens`. Requests whose
answers would have a wrong form are refused, such as n > 1.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from sixfold.types import SamplingParams

from ..api_error import bad_request
from ..chat_ask import ChatAsk
from ..requests import Ask, Limits, TextAsk

log = logging.getLogger("sixfold_serving.agents")

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields of a request that change how tokens are drawn."""


class Settings:
    """Converts requests to sampling parameters. Warns once about each setting without effect."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._told: set[str] = set()

    def check(self, ask: Ask, own: SamplingParams) -> None:
        """Check a request before its prompt is made.

        Args:
            own: the recipe's parameters.

        Raises:
            ApiError: the request has a setting that is not supported in training.
        """
        _check(ask)
        self._limits.check_token_ids(ask.stop_token_ids, "stop_token_ids")
        self._tell(ask, own)

    def params(self, ask: Ask, own: SamplingParams, room: int) -> SamplingParams:
        """Sampling parameters of one request.

        Args:
            room: maximum number of tokens that fit after the prompt.
        """
        longest = min(own.max_tokens, room, ask.token_limit or own.max_tokens)
        ends = (*own.stop_token_ids, *ask.stop_token_ids)
        if (longest, ends) == (own.max_tokens, own.stop_token_ids):
            return own
        return replace(own, max_tokens=longest, stop_token_ids=ends)

    def _tell(self, ask: Ask, own: SamplingParams) -> None:
        """Warn about settings that have no effect."""
        ignored = {
            name: getattr(ask, name)
            for name in _SAMPLING
            if name in ask.model_fields_set and getattr(ask, name) != getattr(own, name)
        }
        if isinstance(ask, ChatAsk):
            if ask.tool_choice not in ("auto", "none"):
                ignored["tool_choice"] = ask.tool_choice
            if ask.response_format is not None and ask.response_format.type != "text":
                ignored["response_format"] = ask.response_format.type
        for name, value in ignored.items():
            if name not in self._told:
                self._told.add(name)
                log.warning(
                    "the agent asks for %s = %s, which has no effect: the recipe decides how the"
                    " policy is sampled",
                    name,
                    value,
                )


def unforced(ask: ChatAsk) -> ChatAsk:
    """The request without a forced tool or format, so that nothing constrains the sampling."""
    choice = "none" if ask.tool_choice == "none" else "auto"
    return ask.model_copy(update={"tool_choice": choice, "response_format": None})


def _check(ask: Ask) -> None:
    """Refuse requests whose answers the endpoint cannot give."""
    if ask.n > 1:
        raise bad_request(
            f"n = {ask.n}: an agent in training gets one reply per request. Set n = 1;"
            " rollout.samples_per_prompt sets the number of episodes",
            "n",
            "unsupported_value",
        )
    if ask.alternatives:
        field = "top_logprobs" if isinstance(ask, ChatAsk) else "logprobs"
        raise bad_request(
            f"{field} is not supported in training: the generator does not return the most likely"
            " tokens. Leave it out",
            field,
            "unsupported_value",
        )
    if not isinstance(ask, TextAsk):
        return
    if ask.named_noise is not None or ask.echo or ask.max_tokens == 0:
        field = "noise" if ask.named_noise else "echo" if ask.echo else "max_tokens"
        raise bad_request(
            f"{field} is not supported in training. Leave it out", field, "unsupported_value"
        )
    if len(ask.prompts()) > 1:
        raise bad_request(
            "prompt: an agent in training gets one reply per request. Send one prompt",
            "prompt",
            "unsupported_value",
        )
