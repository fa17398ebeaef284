"""Cost and budget of a judge."""

from __future__ import annotations

from dataclasses import dataclass, field

from sixfold.errors import BudgetSpent

from .settings import JudgeSettings

CHARACTERS_PER_TOKEN = 4
"""Ratio for estimates: before a request, and if the endpoint reports no token counts."""


def estimated_tokens(text: str) -> int:
    # Count bytes of UTF-8: a Chinese character has three bytes and is about one token.
    return 1 + len(text.encode("utf-8", "replace")) // CHARACTERS_PER_TOKEN


@dataclass(frozen=True)
class Cost:
    """Cost of answered requests.

    Attributes:
        calls: number of answered requests.
        prompt_tokens: tokens of their prompts.
        completion_tokens: tokens of the replies.
        usd: price in US dollars.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.usd + other.usd,
        )


def cost_of(settings: JudgeSettings, prompt_tokens: int, completion_tokens: int) -> Cost:
    usd = prompt_tokens * settings.input_price + completion_tokens * settings.output_price
    return Cost(1, prompt_tokens, completion_tokens, usd / 1e6)


@dataclass
class Spending:
    """Cost of a run so far, and the reserved cost of running requests.

    Attributes:
        share: part of the budgets that this process may use: 1 / number of ranks.
        spent: cost of answered requests, including those before a resume.
    """

    settings: JudgeSettings
    share: float = 1.0
    spent: Cost = Cost()
    _reserved: Cost = field(default=Cost(), init=False)
    _stopped_by: str = field(default="", init=False)

    def reserve(self, prompt: str) -> Cost:
        """Reserve the maximum cost of a request: the estimated prompt and the longest reply.

        Raises:
            BudgetSpent: if the request would exceed a budget, or an earlier request was refused.
        """
        asked = cost_of(self.settings, estimated_tokens(prompt), self.settings.max_tokens)
        total = self.spent + self._reserved + asked
        for name, limit, used in (
            ("budget_calls", self.settings.budget_calls, total.calls),
            ("budget_usd", self.settings.budget_usd, total.usd),
        ):
            if self._stopped_by == name or (limit and used > limit * self.share):
                # Stay stopped, even if a running request turns out cheaper than its reservation.
                self._stopped_by = name
                raise BudgetSpent(
                    f"the judge has used its budget: environment.judge.{name} = {limit:g},"
                    f" {self.spent.calls} requests for ${self.spent.usd:.4g} so far."
                    f" Resume with a larger --environment.judge.{name}"
                )
        self._reserved += asked
        return asked

    def settle(self, reserved: Cost, paid: Cost) -> None:
        """Replace a reservation by the cost that was paid."""
        minus = Cost(
            -reserved.calls, -reserved.prompt_tokens, -reserved.completion_tokens, -reserved.usd
        )
        self._reserved += minus
        self.spent += paid
