"""Gradient spikes: an update whose gradient norm is far above its running level.

The rule is that of ZClip (arXiv:2504.02507): the z-score of the norm under exponential moving
averages of its mean and variance. It differs in two ways. The averages are those of the norm's
logarithm, because norms vary by factors. The threshold is higher, because a spike is only reported:
the update is clipped by `trainer.grad_clip`, like every update.

The contribution of a row is measured at the logits. Let g be the derivative of the loss with
respect to a token's log-prob, and p the token's probability. The derivative with respect to the
token's logit is then g (1 - p). The contribution of a row is the sum of its squares over the row's
tokens. This needs no further pass through the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

DECAY, WARM_UP = 0.97, 25
"""Decay of the averages, and number of updates before the first report. Values of ZClip."""

Z, FACTOR = 5.0, 5.0
"""Thresholds of a spike: z-score of the logarithm, and ratio of the norm to its running level."""

LEAST_DEVIATION = 0.1
"""Lower bound of the standard deviation of the logarithm. Without it, small changes of a norm that
hardly varies would count as spikes.
"""

NAMED = 5
"""Maximum number of trajectories that a warning names."""


@dataclass
class NormLevel:
    """Running level of the logarithm of the gradient norm.

    Attributes:
        seen: number of norms seen.
        mean: moving average.
    """

    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def observe(self, norm: float) -> str:
        """Compare a norm with the running level, and then update the level.

        A norm above the threshold counts as the threshold, as in ZClip. So a spike hardly raises
        the level with which the next norm is compared.

        Args:
            norm: a finite gradient norm.

        Returns:
            Text that says by how much the norm exceeds its level. Empty if it is not a spike.
        """
        if norm <= 0:
            return ""
        value, deviation = math.log(norm), max(math.sqrt(self.variance), LEAST_DEVIATION)
        z, ratio = (value - self.mean) / deviation, norm / math.exp(self.mean)
        spike = self.seen >= WARM_UP and z > Z and ratio > FACTOR
        self._add(min(value, self.mean + Z * deviation) if self.seen >= WARM_UP else value)
        if not spike:
            return ""
        return f"{ratio:.3g} times its running level (z = {z:.1f})"

    def _add(self, value: float) -> None:
        """Add a logarithm to the averages. The first ones have equal weights."""
        self.seen += 1
        share = max(1.0 - DECAY, 1.0 / self.seen)
        gap = value - self.mean
        self.mean += share * gap
        self.variance = (1.0 - share) * (self.variance + share * gap * gap)

    def state(self) -> dict[str, float]:
        return {"seen": self.seen, "mean": self.mean, "variance": self.variance}

    def load(self, state: Mapping[str, Any]) -> None:
        self.seen, self.mean = int(state["seen"]), float(state["mean"])
        self.variance = float(state["variance"])


@dataclass
class RowGradients:
    """Derivatives of an update's loss with respect to its scores, [S] per micro-batch.

    They are kept until the update is done. Contributions are computed from them only after a spike.
    """

    _parts: list[dict[str, Tensor]] = field(default_factory=list)

    def watch(self, values: Tensor, members: Tensor, slot: Tensor) -> None:
        """Keep the derivative with respect to a micro-batch's scores when backward computes it.

        Args:
            values: [S], or [S, C], scores of its tokens.
            members: [R] rows of the batch in the micro-batch.
            slot: [S] index into `members` of each token.
        """
        if not values.requires_grad:
            return
        part = {"scores": values.detach(), "members": members, "slot": slot}
        # Keep the gradient only: the scores themselves would keep the graph of the micro-batch.
        values.register_hook(_keep(part))
        self._parts.append(part)

    def contributions(self, log_probs: bool) -> dict[int, float]:
        """Squared norm of the gradient at the logits, by row. Waits for the device.

        Args:
            log_probs: whether the scores are log-probs. If not, the squared norm of the gradient at
                the scores is returned.
        """
        found: dict[int, float] = {}
        for part in self._parts:
            if "gradient" not in part:  # the loss does not depend on the scores
                continue
            felt = part["gradient"].double()
            if log_probs:
                felt = felt * -part["scores"].double().clamp_max(0.0).expm1()
            members = part["members"]
            squares = felt.square().reshape(len(felt), -1).sum(-1)
            sums = felt.new_zeros(len(members)).index_add_(0, part["slot"], squares)
            for row, size in zip(members.tolist(), sums.tolist(), strict=True):
                found[row] = found.get(row, 0.0) + size
        return found


def named_rows(sizes: Mapping[int, float], names: Sequence[str]) -> str:
    """Text that names the rows with the largest contributions, each with its share.

    Args:
        names: name of each row of the batch; may be empty.
    """
    total = math.fsum(size for size in sizes.values() if math.isfinite(size))
    most = sorted(sizes, key=lambda row: (math.isfinite(sizes[row]), -sizes[row]))[:NAMED]
    return ", ".join(
        f"{row_name(row, names)} ({_share(sizes[row], total)})" for row in most if sizes[row] != 0
    )


def row_name(row: int, names: Sequence[str]) -> str:
    """Name of a row of a batch, or its number if the batch has no names."""
    return names[row] if names else f"row {row}"


def _share(size: float, total: float) -> str:
    if not math.isfinite(size):
        return "not finite"
    return f"{100 * size / total:.0f}%" if total > 0 else "0%"


def _keep(part: dict[str, Tensor]) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        part["gradient"] = gradient.detach()

    return keep
