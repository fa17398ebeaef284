"""The two rules of speculative decoding by themselves: the distribution that comes out, and wrong
rules that the same test must catch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from chi_square import fits
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sixfold.engine.noise import uniforms
from sixfold.engine.proposer import Draft
from sixfold.engine.sampler import inverse_transform
from sixfold.engine.speculative import reject, run_lengths

N = 40_000
LEVEL = 1e-3
PAIRS = {
    "near": ([0.4, 0.3, 0.2, 0.06, 0.04], [0.3, 0.35, 0.2, 0.1, 0.05]),
    "far": ([0.01, 0.04, 0.05, 0.1, 0.8], [0.7, 0.2, 0.05, 0.04, 0.01]),
    "p truncated": ([0.5, 0.3, 0.2, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]),
    "q truncated": ([0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.6, 0.4, 0.0, 0.0]),
    "nothing in common": ([0.5, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.1, 0.2, 0.7]),
    "the same": ([0.4, 0.3, 0.2, 0.06, 0.04], [0.4, 0.3, 0.2, 0.06, 0.04]),
}
"""p of the model, q of the draft."""
Rule = Callable[[Tensor, Draft, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def accept_always(
    logp: Tensor, draft: Draft, greedy: Tensor, accept: Tensor, again: Tensor
) -> tuple[Tensor, Tensor]:
    return draft.tokens, torch.ones_like(greedy)


def resample_from_p(
    logp: Tensor, draft: Draft, greedy: Tensor, accept: Tensor, again: Tensor
) -> tuple[Tensor, Tensor]:
    """Leaves out what makes it exact: the residual."""
    _, accepted = reject(logp, draft, greedy, accept, again)
    return torch.where(accepted, draft.tokens, inverse_transform(logp.exp(), again)), accepted


def one_noise(
    logp: Tensor, draft: Draft, greedy: Tensor, accept: Tensor, again: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws again with the number that has just rejected."""
    return reject(logp, draft, greedy, accept, accept)


def drawn(
    rule: Rule, p: list[float], q: list[float], greedy: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N], and whether the guess stood."""
    noise = [
        torch.from_numpy(uniforms(11, "rule", 0, N, purpose))
        for purpose in ("", "accept", "residual")
    ]
    logp, logq = (torch.tensor(side).log().expand(N, -1) for side in (p, q))
    tokens, accepted = rule(
        logp,
        Draft(inverse_transform(logq.exp(), noise[0]), logq),
        torch.full((N,), greedy),
        noise[1],
        noise[2],
    )
    return tokens.numpy(), accepted.numpy()


def quality(rule: Rule, p: list[float], q: list[float]) -> float:
    tokens, _ = drawn(rule, p, q)
    return fits(np.bincount(tokens, minlength=len(p)), np.array(p))


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_follow_the_models_distribution_whatever_the_draft(pair: str) -> None:
    p, q = PAIRS[pair]
    assert quality(reject, p, q) > LEVEL
    _, accepted = drawn(reject, p, q)
    rate = np.minimum(p, q).sum()  # what can stand at all
    assert abs(accepted.mean() - rate) <= 4 * np.sqrt(rate * (1 - rate) / N) + 1e-6


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if pair not in ("the same", "nothing in common")]
)
def test_wrong_rules_are_caught(pair: str) -> None:
    assert quality(accept_always, *PAIRS[pair]) < LEVEL
    assert quality(resample_from_p, *PAIRS[pair]) < LEVEL


@pytest.mark.parametrize("pair", ["far", "q truncated"])  # whose residuals hold more than one token
def test_the_noise_that_rejects_is_not_to_draw_again(pair: str) -> None:
    assert quality(one_noise, *PAIRS[pair]) < LEVEL


def test_greedy_row_accepts_a_proposed_token_only_if_it_is_the_best() -> None:
    p, q = PAIRS["near"]
    tokens, accepted = drawn(reject, p, q, greedy=True)
    guesses, _ = drawn(accept_always, p, q)
    assert (tokens == 0).all() and (accepted == (guesses == 0)).all() and 0 < accepted.mean() < 1


@pytest.mark.slow
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=9))
def test_a_run_ends_with_the_first_token_that_was_not_guessed(rows: list[list[bool]]) -> None:
    lengths = run_lengths(
        np.concatenate([np.array(row) for row in rows]), np.array([len(row) for row in rows])
    )
    assert lengths.tolist() == [
        next((i + 1 for i, stands in enumerate(row) if not stands), len(row)) for row in rows
    ]
