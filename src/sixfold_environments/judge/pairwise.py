"""`judge_pairwise`: share of comparisons that a completion wins within its group.

Judges have a position bias. If each pair is asked in both orders, a pair whose verdict changes with
the order is a tie. If it is asked in one order, the seed decides which completion comes first.

Judges have a length bias. `length_correction` subtracts a fitted preference for longer completions.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from math import log, sqrt
from typing import NamedTuple

from sixfold.environment.grade import Grade
from sixfold.environment.group_form import Member
from sixfold.types import Task

from .client import JudgeFailed
from .judge import Judge, answer_text, failed, question_text, reference_text
from .prompts import Question, Template, choice, template

FIRST, SECOND, TIE = "first", "second", "tie"
GroupReward = Callable[[Sequence[Member], Task], Awaitable[list[Grade]]]


class Pair(NamedTuple):
    """Result of one comparison.

    Attributes:
        a: index of the first completion.
        b: index of the second completion.
        share: 1 if `a` is better, 0 if `b` is better, 0.5 for a tie. None if the judge failed.
    """

    a: int
    b: int
    share: float | None
    reason: str


def pairwise_reward(judge: Judge) -> GroupReward:
    """Make the reward `judge_pairwise`. In a group of one, the completion earns 0.5.

    A refused completion earns 0. It loses every comparison without a question.

    Raises:
        UserError: for a template with wrong placeholders.
    """
    settings = judge.settings.pairwise
    prompt = template("pairwise", settings.template)

    async def judge_pairwise(group: Sequence[Member], task: Task) -> list[Grade]:
        answers = [answer_text(member.text) for member in group]
        refused = [judge.refuse(answer, task) for answer in answers]
        accepted = [i for i, why in enumerate(refused) if not why]
        rng = random.Random(_seed(judge.settings.seed, task, answers))
        compared = await asyncio.gather(
            *(
                _compare(judge, prompt, task, answers, pair, swap=rng.random() < 0.5)
                for pair in chosen_pairs(accepted, settings.opponents, rng)
            )
        )
        lost = [Pair(i, j, 1.0, "") for i in accepted for j, why in enumerate(refused) if why]
        every = [*compared, *lost]
        rates = [_rate(i, every) for i in range(len(group))]
        known = [i for i in accepted if rates[i] is not None]
        values = length_correction(
            [rates[i] or 0.0 for i in known],
            [len(answers[i]) for i in known],
            settings.length_control,
        )
        corrected = dict(zip(known, values, strict=True))
        grades = []
        for i, why in enumerate(refused):
            reasons = [pair.reason for pair in compared if i in (pair.a, pair.b) and pair.reason]
            if why:
                grades.append(Grade(0.0, "rejected", why))
            elif i in corrected:
                won = f"wins {rates[i]:.2f} of its comparisons. {' '.join(reasons[:1])}"
                grades.append(judge.graded(corrected[i], answers[i], won))
            else:
                grades.append(failed(JudgeFailed(reasons[0] if reasons else "no verdict")))
        return grades

    return judge_pairwise


def chosen_pairs(
    indices: Sequence[int], opponents: int, rng: random.Random
) -> list[tuple[int, int]]:
    """Choose the pairs that are compared.

    If not all pairs are compared, the completions are placed on a circle in random order. Each is
    compared with its nearest neighbours, the same number on both sides. So all completions have the
    same number of comparisons; an odd `opponents` is rounded up.

    Args:
        opponents: comparisons per completion. 0: with all others.
        rng: draws the order on the circle.
    """
    count = len(indices)
    if not opponents or opponents >= count - 1:
        return list(combinations(indices, 2))
    circle = rng.sample(list(indices), count)
    pairs = {
        tuple(sorted((circle[i], circle[(i + step) % count])))
        for step in range(1, -(-opponents // 2) + 1)
        for i in range(count)
    }
    return sorted((a, b) for a, b in pairs)


def length_correction(
    rates: Sequence[float], lengths: Sequence[int], strength: float
) -> list[float]:
    """Subtract the part of the win rates that length explains.

    x = log(1 + length), standardised within the group; b = max(0, mean(x * rate)), the slope of the
    least-squares line; corrected rate = clip(rate - strength * b * x, 0, 1). Only a preference for
    longer completions is removed, not one for shorter completions.

    Args:
        lengths: characters of each completion.
        strength: from 0 (no correction) to 1 (the whole slope is removed).
    """
    logs = [log(1 + length) for length in lengths]
    mean = sum(logs) / max(1, len(logs))
    spread = sqrt(sum((x - mean) ** 2 for x in logs) / max(1, len(logs)))
    if not strength or spread < 1e-9:
        return list(rates)
    x = [(value - mean) / spread for value in logs]
    slope = max(0.0, sum(a * rate for a, rate in zip(x, rates, strict=True)) / len(x))
    return [
        min(1.0, max(0.0, rate - strength * slope * a)) for a, rate in zip(x, rates, strict=True)
    ]


async def _compare(
    judge: Judge,
    prompt: Template,
    task: Task,
    answers: Sequence[str],
    pair: tuple[int, int],
    *,
    swap: bool,
) -> Pair:
    """Compare two completions, in both orders or in one."""
    a, b = pair
    if answers[a].strip() == answers[b].strip():
        return Pair(a, b, 0.5, "")
    both = judge.settings.pairwise.orders == "both"
    orders = ((a, b), (b, a)) if both else ((b, a),) if swap else ((a, b),)
    try:
        replies = await asyncio.gather(
            *(
                judge.ask(_question(judge, prompt, task, answers[one], answers[other]))
                for one, other in orders
            )
        )
    except JudgeFailed as error:
        return Pair(a, b, None, str(error))
    winners = []
    for (one, other), reply in zip(orders, replies, strict=True):
        judge.counts.first += reply["winner"] == FIRST
        judge.counts.second += reply["winner"] == SECOND
        winners.append({FIRST: one, SECOND: other}.get(reply["winner"]))
    judge.counts.pairs += both
    judge.counts.unstable += len(set(winners)) > 1
    winner = winners[0] if len(set(winners)) == 1 else None
    share = 0.5 if winner is None else float(winner == a)
    return Pair(a, b, share, str(replies[0].get("reason", "")))


def _question(judge: Judge, prompt: Template, task: Task, first: str, second: str) -> Question:
    return Question(
        prompt,
        {},
        {
            "question": question_text(task),
            "first": judge.shown(first),
            "second": judge.shown(second),
            "reference": reference_text(task) or "(none)",
        },
        {"winner": choice("the better answer; a tie if none is better", FIRST, SECOND, TIE)},
    )


def _rate(i: int, pairs: Sequence[Pair]) -> float | None:
    """Win rate of completion `i`. 0.5 without comparisons, None if all of them failed."""
    shares = [
        pair.share if pair.a == i else 1.0 - pair.share
        for pair in pairs
        if i in (pair.a, pair.b) and pair.share is not None
    ]
    if shares:
        return sum(shares) / len(shares)
    return None if any(i in (pair.a, pair.b) for pair in pairs) else 0.5


def _seed(seed: int, task: Task, answers: Sequence[str]) -> int:
    """Seed of a group. It depends only on its content, so a resumed run asks the same questions."""
    text = "\0".join((str(seed), task.id, *answers))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "big")
