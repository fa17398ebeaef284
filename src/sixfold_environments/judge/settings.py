"""Settings of a judge. The section `environment.judge` of a recipe has the same fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Aggregate = Literal["mean", "min"]


@dataclass(frozen=True)
class RubricSettings:
    """Settings of `judge_rubric`.

    Attributes:
        criteria: the criteria, each as "NAME: TEXT" or "NAME * WEIGHT: TEXT".
        scale: highest score of a criterion. The lowest is 0.
        aggregate: "mean": weighted mean of the scores. "min": the lowest score.
        together: ask about all criteria in one question.
        template: file with a prompt. "": use the built-in prompt.
    """

    criteria: tuple[str, ...] = (
        "correct * 2: What the answer states is true, and its reasoning holds.",
        "complete: The answer does everything that the question asks for.",
        "clear: The answer is easy to follow and says nothing that does not belong to it.",
    )
    scale: int = 10
    aggregate: Aggregate = "mean"
    together: bool = False
    template: str = ""


@dataclass(frozen=True)
class ReferenceSettings:
    """Settings of `judge_reference`.

    Attributes:
        template: as in `RubricSettings`.
    """

    template: str = ""


@dataclass(frozen=True)
class PairwiseSettings:
    """Settings of `judge_pairwise`.

    Attributes:
        orders: "both": ask about each pair in both orders. "one": in one order, which the seed
            decides.
        opponents: comparisons per completion. 0: with every other completion of the group.
        length_control: strength of the length correction, from 0 (off) to 1.
        template: as in `RubricSettings`.
    """

    orders: Literal["both", "one"] = "both"
    opponents: int = 0
    length_control: float = 0.0
    template: str = ""


@dataclass(frozen=True)
class ConstitutionSettings:
    """Settings of `judge_constitution` and of critiques.

    Attributes:
        principles: the principles, each as "TEXT" or "NAME: TEXT".
        aggregate: "mean": share of the principles that are followed. "min": 1 if all are followed,
            else 0.
        together: as in `RubricSettings`.
        template: as in `RubricSettings`.
    """

    principles: tuple[str, ...] = (
        "helpful: The answer helps with what was asked.",
        "honest: The answer does not mislead, and admits what it does not know.",
        "harmless: The answer does not help to harm people.",
    )
    aggregate: Aggregate = "mean"
    together: bool = False
    template: str = ""


@dataclass(frozen=True)
class JudgeSettings:
    """The judging model, its endpoint, its prompts and its budget.

    Attributes:
        url: base URL of an OpenAI-compatible endpoint, such as https://api.openai.com/v1. "": a
            child process serves a local model.
        model: name of the model at the endpoint, or the folder of a local model.
        key_variable: environment variable that holds the API key.
        family: label of the model's family. "": derived from its name.
        device: device of a local model.
        timeout_s: time limit for the requests and retries of one question, in seconds.
        request_timeout_s: time limit for one request, in seconds.
        retries: maximum retries of a request after failures of the endpoint.
        concurrency: maximum concurrent requests.
        max_tokens: maximum length of a reply, in tokens.
        temperature: sampling temperature of the judge.
        max_chars: maximum characters of a completion that the judge sees.
        structured: `response_format` of requests: a JSON schema, any JSON object, or none. "auto":
            the strictest one that the endpoint supports.
        input_price: US dollars per million prompt tokens.
        output_price: US dollars per million reply tokens.
        budget_usd: maximum cost of a run in US dollars. 0: no limit.
        budget_calls: maximum number of answered requests of a run. 0: no limit.
        solved_at: lowest reward whose verdict is "passed".
        seed: seed for the choice and the order of pairs.
        rubric: settings of `judge_rubric`.
        reference: settings of `judge_reference`.
        pairwise: settings of `judge_pairwise`.
        constitution: settings of `judge_constitution` and of critiques.
    """

    url: str = ""
    model: str = ""
    key_variable: str = "SIXFOLD_JUDGE_KEY"
    family: str = ""
    device: str = "auto"
    timeout_s: float = 180.0
    request_timeout_s: float = 60.0
    retries: int = 5
    concurrency: int = 16
    max_tokens: int = 512
    temperature: float = 0.0
    max_chars: int = 16_000
    structured: Literal["auto", "schema", "json", "none"] = "auto"
    input_price: float = 0.0
    output_price: float = 0.0
    budget_usd: float = 0.0
    budget_calls: int = 0
    solved_at: float = 1.0
    seed: int = 0
    rubric: RubricSettings = field(default_factory=RubricSettings)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    pairwise: PairwiseSettings = field(default_factory=PairwiseSettings)
    constitution: ConstitutionSettings = field(default_factory=ConstitutionSettings)
