"""The vetted defaults of every named algorithm, as plain data: what the command line can know without torch.

The losses themselves are in the file of the same name; `plan.resolve_algorithm` lays a recipe's overrides over a row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmDefaults:
    """One row of the zoo.

    group_baseline: the advantage is taken against the group of K samples, so K = 1 teaches nothing. clip_low, clip_high: the ratio is
    clipped to [1 - clip_low, 1 + clip_high]; None: the loss has no ratio. beta: weight of the KL to the reference. kl: its estimator
    (k1, k2, k3). kl_in: "loss" or "reward". aggregation: how token losses are averaged. paper: where the method comes from.
    """

    name: str
    group_baseline: bool
    clip_low: float | None
    clip_high: float | None
    beta: float
    kl: str
    kl_in: str
    aggregation: str
    paper: str


ALGORITHMS: dict[str, AlgorithmDefaults] = {
    row.name: row
    for row in (
        # Williams has no KL term; where one is wanted, k1 taken off the reward is the estimator whose score-function gradient is that of
        # KL(policy || reference). As a loss term k1 has zero expected gradient.
        AlgorithmDefaults("reinforce", True, None, None, 0.0, "k1", "reward", "sequence-sum", "Williams 1992, doi:10.1007/BF00992696"),
        # The paper trains with beta = 0.04. The default is 0: with a verifier for a reward there is no reward model to drift away from,
        # and without the KL no reference model is kept.
        AlgorithmDefaults("grpo", True, 0.2, 0.2, 0.0, "k3", "loss", "sequence", "arXiv:2402.03300"),
    )
}
