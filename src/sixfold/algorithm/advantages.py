"""Advantages from rewards, computed per group.

Pure functions on [B]: they take rewards and the number of each row's group, and return advantages.

A row with a reward that is not finite (its check failed) is left out of every mean, standard
deviation and count, and gets advantage 0. A group whose known rewards are all equal is degenerate
and gets exactly 0. Below, sums, means and K are over the known rows of the row's group.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_statistics(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, population standard deviation and count of each row's group, over finite rewards.

    Args:
        rewards: [B].
        group: [B] number of each row's group.

    Returns:
        (mean, std, count), each [B].
    """
    _check(rewards, group)
    known = rewards.isfinite()
    count = _group_sum(known.to(rewards.dtype), group).clamp_min(1.0)
    mean = _group_sum(torch.where(known, rewards, 0.0), group) / count
    variance = _group_sum(torch.where(known, rewards - mean, 0.0) ** 2, group) / count
    return mean, variance.sqrt(), count


def degenerate(rewards: Tensor, group: Tensor) -> Tensor:
    """[B] True where all known rewards of the row's group are equal: the advantage is exactly 0."""
    _check(rewards, group)
    known = rewards.isfinite()
    return _group_max(rewards, known, group) <= -_group_max(-rewards, known, group)


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = r_i - mean; [B] -> [B].

    REINFORCE with the group mean as baseline (Williams 1992; Kool et al. 2019), Dr. GRPO
    (arXiv:2503.20783, 3.2). r_i is part of its own baseline, so the gradient is too small by (K -
    1) / K; `leave_one_out` avoids this.
    """
    mean, _, _ = group_statistics(rewards, group)
    return _zero_where_degenerate(rewards - mean, rewards, group)


def group_zscore(rewards: Tensor, group: Tensor, eps: float) -> Tensor:
    """A_i = (r_i - mean) / (std + eps), population std. GRPO (arXiv:2402.03300, section 4.1.2).

    Peers use the n - 1 form of std, which gives the same direction, smaller by sqrt((K - 1) / K).

    Args:
        rewards: [B].
        group: [B] number of each row's group.
        eps: added to the standard deviation. Sixfold and verl 1e-6, TRL 1e-4, OpenRLHF 1e-9.

    Returns:
        [B] advantages.
    """
    mean, std, _ = group_statistics(rewards, group)
    return _zero_where_degenerate((rewards - mean) / (std + eps), rewards, group)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = r_i - mean of the others = K / (K - 1) (r_i - mean); [B] -> [B].

    RLOO (arXiv:2402.14740, eq. 8). If failed checks left one known row in a group, its advantage is
    0.

    Raises:
        ValueError: for a group of one row, which has no others. verl's rloo gives it its raw
            reward.
    """
    mean, _, count = group_statistics(rewards, group)
    if bool((_group_size(group) < 2).any()):
        raise ValueError("leave_one_out needs at least 2 samples of every prompt, got a group of 1")
    return _zero_where_degenerate(
        count / (count - 1.0).clamp_min(1.0) * (rewards - mean), rewards, group
    )


def batch_std(rewards: Tensor, group: Tensor, eps: float) -> Tensor:
    """A_i = (r_i - mean of the group) / (std of all rewards of the batch + eps).

    Lite PPO (arXiv:2508.08221). A group that is nearly all right is not amplified by its small std.
    Population std; TRL (scale_rewards="batch") uses n - 1 and eps 1e-4.

    Args:
        rewards: [B].
        group: [B] number of each row's group.
        eps: added to the standard deviation.

    Returns:
        [B] advantages.
    """
    mean, _, _ = group_statistics(rewards, group)
    _, std, _ = group_statistics(rewards, torch.zeros_like(group))
    return _zero_where_degenerate((rewards - mean) / (std + eps), rewards, group)


def length_weighted(rewards: Tensor, group: Tensor, lengths: Tensor) -> Tensor:
    """A_i = r_i - sum l_j r_j / sum l_j; [B] -> [B]. OPO (arXiv:2505.23585).

    The baseline has the least variance if |grad log pi|^2 grows in proportion to the length. verl
    has the same formula but gives a group of one its raw reward.

    Args:
        rewards: [B].
        group: [B] number of each row's group.
        lengths: [B] sampled tokens of each row.
    """
    _check(rewards, group, lengths)
    weight = torch.where(rewards.isfinite(), lengths.to(rewards.dtype), 0.0)
    weighted = torch.where(rewards.isfinite(), weight * rewards, 0.0)
    baseline = _group_sum(weighted, group) / _group_sum(weight, group).clamp_min(1.0)
    return _zero_where_degenerate(rewards - baseline, rewards, group)


def maxrl(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = (r_i - mean) / mean; [B] -> [B]. MaxRL (arXiv:2602.02710).

    As K grows, this is the gradient of log p(right) rather than of p(right). prime-rl's max_rl is
    the same without the check.

    Raises:
        ValueError: for a negative reward: a mean below 0 would reverse every sign.
    """
    mean, _, _ = group_statistics(rewards, group)
    if bool((rewards[rewards.isfinite()] < 0).any()):
        raise ValueError("maxrl divides by the mean reward: rewards must not be negative")
    return _zero_where_degenerate((rewards - mean) / mean, rewards, group)


def gpg(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = B / (B - M) (r_i - mean); [B] -> [B]. GPG (arXiv:2504.02546), F_norm = 1.

    M of the B known rows are in degenerate groups. The factor keeps the size of the gradient if
    many groups are degenerate. verl counts the rows with nonzero reward as B - M.
    """
    known = rewards.isfinite()
    useful = known & ~degenerate(rewards, group)
    alpha = known.sum() / useful.sum().clamp_min(1).to(rewards.dtype)
    return alpha * group_mean(rewards, group)


def pass_at_k(rewards: Tensor, group: Tensor, k: int) -> Tensor:
    """Z-score of "at least one of k is right", averaged over all draws of k that contain row i.

    A_i = (C(W, k) / C(K, k) - [i is wrong] C(W - 1, k - 1) / C(K - 1, k - 1)) / sqrt(p (1 - p))

    W of K samples are wrong, and p = 1 - C(W, k) / C(K, k). This is the closed form of Pass@k
    training (arXiv:2508.10751). The advantage is 0 if every draw has a right sample, if none has,
    or if failed checks left fewer than k rows. verl's grpo_passk is `top_gap`.

    Args:
        rewards: [B], 0 or 1.
        group: [B] number of each row's group.
        k: samples per draw.

    Returns:
        [B] advantages.

    Raises:
        ValueError: for other rewards, or unless 1 <= k <= samples of every prompt.
    """
    _check(rewards, group)
    known = rewards.isfinite()
    if bool((known & (rewards != 0) & (rewards != 1)).any()):
        raise ValueError("pass_at_k needs rewards that are 0 (wrong) or 1 (right)")
    if not 1 <= k <= int(_group_size(group).min()):
        raise ValueError(
            f"pass_at_k needs 1 <= k <= samples of every prompt, got k={k} and a group of"
            f" {int(_group_size(group).min())}"
        )
    wrong = known & (rewards == 0)
    samples, misses = _group_sum(known.double(), group), _group_sum(wrong.double(), group)
    fail = _all_among(misses, samples, k)
    fail_with_me = torch.where(wrong, _all_among(misses - 1, samples - 1, k - 1), 0.0)
    deviation = (fail * (1.0 - fail)).sqrt()
    return torch.where(known & (deviation > 0), (fail - fail_with_me) / deviation, 0.0).to(
        rewards.dtype
    )


def top_gap(rewards: Tensor, group: Tensor) -> Tensor:
    """The best row of a group gets r_max - r_second, the others 0; [B] -> [B].

    Rows that tie for best get 0. Pass@k after arXiv:2503.19595. verl's grpo_passk also divides by
    the std of the group by default.
    """
    _check(rewards, group)
    known = rewards.isfinite()
    best = known & (rewards == _group_max(rewards, known, group))
    alone = best & (_group_sum(best.to(rewards.dtype), group) == 1)
    gap = rewards - _group_max(rewards, known & ~best, group)
    return torch.where(alone, _zero_where_degenerate(gap, rewards, group), 0.0)


def greedy_baseline(rewards: Tensor, greedy: Tensor) -> Tensor:
    """A_i = r_i - r(greedy answer to the same prompt); [B], [B] -> [B]. ReMax (arXiv:2310.10505).

    0 where either reward is not finite.
    """
    _check(rewards, greedy)
    return torch.where(rewards.isfinite() & greedy.isfinite(), rewards - greedy, 0.0)


def normalise_then_sum(parts: Tensor, weights: Tensor, group: Tensor, eps: float) -> Tensor:
    """Z-score each reward in its group, add them weighted, and z-score the sums in the batch.

    s_i = sum_n w_n zscore(r_i^n in the group), A_i = zscore(s_i in the batch)

    GDPO (arXiv:2601.05242). Rewards of different scale or rarity all count, because they are
    normalised before they are added. A part that is not finite does not apply to the row and adds
    nothing. A row without a finite part gets 0 and is excluded from the batch's statistics.
    Population std in both; TRL (normalize_then_sum) uses n - 1 and eps 1e-4. verl's second
    normalisation is over tokens.

    Args:
        parts: [B, R] rewards.
        weights: [R].
        group: [B] number of each row's group.
        eps: added to both standard deviations.

    Returns:
        [B] advantages.
    """
    if parts.ndim != 2 or weights.shape != parts.shape[1:]:
        raise ValueError(
            f"parts must be [B, R] and weights [R]: got {tuple(parts.shape)} and"
            f" {tuple(weights.shape)}"
        )
    known = parts.isfinite().any(-1)
    scores = torch.stack([group_zscore(part, group, eps) for part in parts.unbind(-1)], -1)
    total = scores @ weights.to(parts.dtype)
    across = group_zscore(torch.where(known, total, torch.nan), torch.zeros_like(group), eps)
    # Every group's z-scores sum to 0, and so does the batch. Without this line, the rounding error
    # of the batch mean would become the advantage of a row with total 0.
    return torch.where(total == 0, 0.0, across)


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """[B]: the sum of `values` over each row's group."""
    return values.new_zeros(int(group.max()) + 1).index_add(0, group, values)[group]


def _group_max(values: Tensor, among: Tensor, group: Tensor) -> Tensor:
    """[B]: the largest of `values` in each row's group where `among` is True; -inf if none."""
    lowest = values.new_full((int(group.max()) + 1,), -torch.inf)
    return lowest.scatter_reduce(0, group, torch.where(among, values, -torch.inf), "amax")[group]


def _group_size(group: Tensor) -> Tensor:
    """[B]: rows in each row's group, known or not."""
    return _group_sum(torch.ones_like(group), group)


def _all_among(some: Tensor, of: Tensor, k: int) -> Tensor:
    """[B]: C(some, k) / C(of, k), the probability that k draws out of `of` are all among `some`.

    0 if k > some. Computed as a product, so that no factorial overflows.
    """
    drawn = torch.arange(k, device=some.device)
    return ((some[:, None] - drawn) / (of[:, None] - drawn).clamp_min(1.0)).prod(-1)


def _zero_where_degenerate(advantages: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    # Equal float rewards can leave a rounding residue in r - mean, which a tiny std would amplify.
    # Set these advantages to exactly 0.
    return torch.where(rewards.isfinite() & ~degenerate(rewards, group), advantages, 0.0)


def _check(*vectors: Tensor) -> None:
    shapes = [tuple(v.shape) for v in vectors]
    if vectors[0].ndim != 1 or len(set(shapes)) != 1:
        raise ValueError(
            f"advantages take [B] tensors of one length (rewards, group, ...), got {shapes}"
        )
