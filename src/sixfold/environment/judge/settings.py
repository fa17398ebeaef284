"""Settings of a judge, as plain data. A recipe has the same fields in `environment.judge`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Aggregate = Literal["mean", "min"]


@dataclass(frozen=True)
class RubricSettings:
    """Settings of `judge_rubric`.

    Attributes:
        criteria: what is judged, each as "NAME: TEXT" or "NAME * WEIGHT: TEXT".
        scale: highest score of a criterion. The lowest is 0.
        aggregate: weighted mean of the scores, or the lowest one.
        together: ask about all criteria in one question.
        template: file of the user's own prompt. "": the built-in one.
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
        orders: "both": each pair is asked in both orders. "one": in one order, drawn by the seed.
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
        principles: the principles, each as TEXT or "NAME: TEXT".
        aggregate: share of the principles that are followed, or 1 only if all are.
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
    """Which model judges, how it is asked, and what it may cost.

    Attributes:
        url: base URL of an OpenAI-compatible endpoint, such as https://api.openai.com/v1. "": a
            local model, which a child process serves.
        model: name of the model at the endpoint, or the folder of a local model.
        key_variable: environment variable that holds the API key.
        family: label of the model's family. "": derived from its name.
        device: device of a local model.
        timeout_s: seconds for one question, with all repetitions.
        request_timeout_s: seconds for one request.
        retries: how often a request is repeated after a failure of the endpoint.
        concurrency: most requests at a time.
        max_tokens: most tokens of a reply.
        temperature: sampling temperature of the judge.
        max_chars: characters of a completion that the judge sees.
        structured: how the reply is constrained. "auto": the strictest way that the endpoint has.
        input_price: US dollars per million tokens of prompts.
        output_price: US dollars per million tokens of replies.
        budget_usd: most dollars of a run. 0: no limit.
        budget_calls: most answered requests of a run. 0: no limit.
        solved_at: value from which a verdict is "passed".
        seed: seed of the order and the choice of pairs.
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
