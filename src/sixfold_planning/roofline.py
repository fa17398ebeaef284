"""Roofline: whether memory bandwidth or compute limits a role, and the time of a decode step.

Williams et al., 2009; for decoding, Pope et al., https://arxiv.org/abs/2211.05102.
`flops_per_second` is the peak of the device, 989e12 for an H100 in dense bfloat16, and
`bytes_per_second` its memory bandwidth, 3.35e12 for an H100.
"""

from __future__ import annotations

from dataclasses import dataclass


def knee(*, flops_per_second: float, bytes_per_second: float) -> float:
    """Arithmetic intensity above which compute is the limit, in FLOPs per byte. 295 for an H100."""
    return flops_per_second / bytes_per_second


INTENSITY = {"decode": 1.0, "reference": 3.0, "prefill": 125.0, "trainer": 400.0}
"""Typical arithmetic intensity of each role, in FLOPs per byte.

Prefill is between 100 and 150 for prompts of usual length. That is below the knee of an H100, so
such a prefill reaches about 40 % of the peak. Prompts of more than `prefill_knee` tokens are
limited by compute. Weight sync moves bytes over the network and is not on the roofline.
"""

ROLES = (*INTENSITY, "sync")


def role_limit(role: str, *, flops_per_second: float, bytes_per_second: float) -> str:
    """What limits one of `ROLES` at its typical intensity: "memory", "compute" or "network"."""
    if role == "sync":
        return "network"
    limit = knee(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
    return "memory" if INTENSITY[role] < limit else "compute"


def prefill_knee(*, flops_per_second: float, bytes_per_second: float, width: float) -> float:
    """Tokens in one prefill above which compute is the limit.

    A prefill of n tokens reads the weights once, `width` bytes per parameter, and does `2 n` FLOPs
    per parameter.
    """
    return knee(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second) * width / 2


@dataclass(frozen=True)
class DecodeStep:
    """Time to decode one token of each sequence of a batch.

    Attributes:
        memory_seconds: time to read weights and KV cache.
    """

    memory_seconds: float
    compute_seconds: float
    sequences: int

    @property
    def seconds(self) -> float:
        """Duration of the step, if reads and products overlap."""
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole batch."""
        return self.sequences / self.seconds


def decode_step(
    *,
    weight_bytes: float,
    active_parameters: float,
    sequences: int,
    context: float,
    kv_bytes_per_token: float,
    flops_per_second: float,
    bytes_per_second: float,
) -> DecodeStep:
    """Roofline of one decode step. Multiply bandwidth by 0.6 to 0.85 for what kernels reach.

    Args:
        weight_bytes: bytes of weights that the step reads. See `expert_share` for experts.
        active_parameters: parameters that one token passes through.
        context: mean tokens in the cache per sequence.
        kv_bytes_per_token: bytes of keys and values per token.
        flops_per_second: peak of the device.
        bytes_per_second: memory bandwidth of the device.
    """
    moved = weight_bytes + sequences * context * kv_bytes_per_token
    return DecodeStep(
        memory_seconds=moved / bytes_per_second,
        compute_seconds=2 * active_parameters * sequences / flops_per_second,
        sequences=sequences,
    )


def expert_share(*, experts: int, per_token: int, tokens: float) -> float:
    """Expected share of experts that a batch reads: `1 - (1 - k/E)^B`.

    Args:
        experts: experts E per layer.
        per_token: experts k that compute each token.
        tokens: mean tokens B in the batch. Their routes are taken as independent.
    """
    return 1 - (1 - per_token / experts) ** tokens
