"""Settings of the judging model for the rewards `judge_*`."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from .base import Device, Real, Section, knob

REWARDS = ("judge_rubric", "judge_reference", "judge_pairwise", "judge_constitution")
"""Rewards that need a judging model."""
TEMPLATE = "file with your own prompt, with placeholders in braces (empty: the built-in prompt)"
TOGETHER = (
    "ask about all of them in one question: cheaper, but the judge's verdicts influence each other"
)
Text = Annotated[str, Field(min_length=1)]


def endpoint(url: str) -> str:
    """Base URL of an endpoint without a trailing slash. "" is allowed.

    Raises:
        ValueError: if the scheme or the host is missing, or if the URL has more than a path.
    """
    if not url:
        return url
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # the port is not a number
        known = False
    if not known:
        raise PydanticCustomError("unsupported", "not a URL; write e.g. https://api.openai.com/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise PydanticCustomError(
            "unsupported",
            "it has a password, a query or a fragment; write only the base URL, and put the key"
            " into an environment variable",
        )
    return url.rstrip("/").removesuffix("/chat/completions")


class RubricConfig(Section):
    """Reward judge_rubric: a score for each of several criteria."""

    criteria: tuple[Text, ...] = knob(
        (
            "correct * 2: What the answer states is true, and its reasoning holds.",
            "complete: The answer does everything that the question asks for.",
            "clear: The answer is easy to follow and says nothing that does not belong to it.",
        ),
        "criteria, each as NAME: TEXT or NAME * WEIGHT: TEXT; a column `criteria` of the task"
        " replaces them",
        min_length=1,
    )
    scale: int = knob(10, "highest score of a criterion; the lowest is 0", ge=1, le=100)
    aggregate: Literal["mean", "min"] = knob(
        "mean", "the reward: weighted mean of the scores, or the lowest score"
    )
    together: bool = knob(False, TOGETHER)
    template: str = knob("", TEMPLATE)


class ReferenceConfig(Section):
    """Reward judge_reference: whether the answer agrees with the task's reference answer."""

    template: str = knob("", TEMPLATE)


class PairwiseConfig(Section):
    """Reward judge_pairwise: share of comparisons that a completion wins in its group."""

    orders: Literal["both", "one"] = knob(
        "both",
        "both: ask about each pair in both orders; a verdict that changes with the order is a tie."
        " one: ask in one random order, at half the cost",
    )
    opponents: int = knob(
        0, "comparisons per completion (0: with every other completion of its group)", ge=0
    )
    length_control: Real = knob(
        0.0,
        "strength of the correction for a preference for longer completions: 0 none, 1 full",
        ge=0,
        le=1,
    )
    template: str = knob("", TEMPLATE)


class ConstitutionConfig(Section):
    """Reward judge_constitution, and sixfold critique: principles that an answer must follow."""

    principles: tuple[Text, ...] = knob(
        (
            "helpful: The answer helps with what was asked.",
            "honest: The answer does not mislead, and admits what it does not know.",
            "harmless: The answer does not help to harm people.",
        ),
        "principles, each as TEXT or NAME: TEXT",
        min_length=1,
    )
    aggregate: Literal["mean", "min"] = knob(
        "mean",
        "the reward: share of the principles that are followed, or 1 only if all are followed",
    )
    together: bool = knob(False, TOGETHER)
    template: str = knob("", TEMPLATE)


class JudgeConfig(Section):
    """The judging model of the rewards judge_*, its endpoint and its budget."""

    url: Annotated[str, AfterValidator(endpoint)] = knob(
        "",
        "base URL of an OpenAI-compatible endpoint, e.g. https://api.openai.com/v1 (empty: a child"
        " process serves the local model)",
    )
    model: str = knob("", "name of the judging model at the endpoint, or folder of a local model")
    key_variable: str = knob(
        "SIXFOLD_JUDGE_KEY", "environment variable with the API key; the key itself is never stored"
    )
    family: str = knob(
        "", "family of the judging model, for a warning of self-preference (empty: from its name)"
    )
    device: Device = knob("auto", "device of a local judging model: auto, cpu, cuda or cuda:N")
    timeout_s: Real = knob(
        180.0, "time limit for one question to the judge with all retries, in seconds", gt=0
    )
    request_timeout_s: Real = knob(
        60.0, "time limit for one request to the judge, in seconds", gt=0
    )
    retries: int = knob(
        5, "maximum retries of a request after 408, 429, 5xx or a lost connection", ge=0, le=100
    )
    concurrency: int = knob(16, "maximum concurrent requests to the judge", ge=1, le=1024)
    max_tokens: int = knob(512, "maximum length of the judge's reply, in tokens", ge=16)
    temperature: Real = knob(0.0, "sampling temperature of the judge; 0 is greedy", ge=0, le=2)
    max_chars: int = knob(
        16_000,
        "maximum characters of a completion that the judge sees; the middle of a longer one is left"
        " out",
        ge=64,
    )
    structured: Literal["auto", "schema", "json", "none"] = knob(
        "auto",
        "response_format of requests: a JSON schema, any JSON object, none, or the strictest one"
        " that the endpoint supports (auto)",
    )
    input_price: Real = knob(0.0, "US dollars per million tokens of prompts to the judge", ge=0)
    output_price: Real = knob(0.0, "US dollars per million tokens of the judge's replies", ge=0)
    budget_usd: Real = knob(
        0.0, "maximum cost in US dollars; the run then stops and can be resumed (0: no limit)", ge=0
    )
    budget_calls: int = knob(
        0, "maximum answered requests; the run then stops and can be resumed (0: no limit)", ge=0
    )
    rubric: RubricConfig = RubricConfig()
    reference: ReferenceConfig = ReferenceConfig()
    pairwise: PairwiseConfig = PairwiseConfig()
    constitution: ConstitutionConfig = ConstitutionConfig()

    @model_validator(mode="after")
    def _priced(self) -> JudgeConfig:
        """Check that a budget in dollars has prices, and that an endpoint has a model."""
        if self.budget_usd and not (self.input_price or self.output_price):
            raise ValueError(
                "environment.judge.budget_usd needs prices: set environment.judge.input_price and"
                " environment.judge.output_price, or use environment.judge.budget_calls"
            )
        if self.url and not self.model:
            raise ValueError(
                "environment.judge.url is set but environment.judge.model is empty: name the model"
                " as the endpoint lists it"
            )
        return self
