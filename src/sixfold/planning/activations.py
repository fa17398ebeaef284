"""Memory of the activations that a training step keeps for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from . import checks


@dataclass(frozen=True)
class Checkpointing:
    """Effect of activation checkpointing.

    Attributes:
        memory: share of the activations that remains.
        compute: additional FLOPs of a training step, as a share of the step without checkpointing.
    """

    memory: float
    compute: float


CHECKPOINTING = {
    "none": Checkpointing(memory=1.0, compute=0.0),
    "full": Checkpointing(memory=1 / 10, compute=1 / 3),
    "selective": Checkpointing(memory=0.073, compute=0.1),
    "attention": Checkpointing(memory=0.4, compute=0.1),
}
"""Rules of thumb, for planning without a model's exact sizes.

`full` repeats one forward pass: 2 FLOPs per parameter beside the 6 of the step. `selective` keeps
only the tensors that are costly to recompute: about 10 of 137 GB for a 7B model. `attention`
recomputes attention alone.
"""


def activation_bytes(*, layers: int, hidden: int, length: int, sequences: int, width: int) -> int:
    """Activations of a step without checkpointing: `N L B (12 d + 2 L) b` bytes.

    The first term has the inputs of the matrix products of a block; the second one stands for the
    attention scores. It grows with the square of the length. With a fused attention kernel, which
    does not store scores, this is an upper bound: `layer_activation_bytes` is finer.

    Args:
        layers: number of blocks N.
        hidden: width d of the residual stream.
        length: tokens L per sequence.
        sequences: sequences B in a micro-batch.
        width: bytes b per number.

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    checks.whole(layers=layers, hidden=hidden, length=length, sequences=sequences, width=width)
    return layers * length * sequences * (12 * hidden + 2 * length) * width


LAYER_RULES = ("none", "selective", "full")


def layer_activation_bytes(
    *,
    length: int,
    sequences: int,
    hidden: int,
    heads: int,
    tensor: int,
    sequence_parallel: bool,
    recompute: str,
) -> float:
    """Activations of one block with 16-bit numbers: Korthikanti et al., Table 2.

    https://arxiv.org/abs/2205.05198. The block has a GELU MLP of four times its width, and dropout.

    Args:
        length: tokens s per sequence.
        sequences: sequences b in a micro-batch.
        hidden: width h of the residual stream.
        heads: attention heads a.
        tensor: tensor-parallel ranks t.
        sequence_parallel: norms and dropouts are also split over the tensor ranks.
        recompute: "none"; "selective" recomputes attention scores, as a fused attention kernel
            does; "full" keeps only the input of the block.

    Returns:
        Bytes per rank.

    Raises:
        UserError: if a size is not a whole number of at least 1, `tensor` does not divide `heads`,
            or `recompute` is unknown.
    """
    checks.whole(length=length, sequences=sequences, hidden=hidden, heads=heads, tensor=tensor)
    checks.one_of("recompute", recompute, LAYER_RULES)
    checks.divides(heads=heads, tensor=tensor)
    stream = length * sequences * hidden
    if recompute == "full":
        return float(2 * stream)
    scores = 0.0 if recompute == "selective" else 5 * heads * length / hidden
    unsplit = 10 / tensor if sequence_parallel else 10.0
    return stream * (unsplit + (24 + scores) / tensor)
