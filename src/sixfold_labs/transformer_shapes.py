"""Shapes, parameters and FLOPs of a small transformer."""

from __future__ import annotations

from dataclasses import dataclass

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table, Value
from sixfold_planning.flops import FORWARD, TRAINING, flops_per_token


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part.

    Attributes:
        embedding: token embedding, which is also the output head.
        positions: learned position embedding.
        block: one block: `4 d^2` attention, `8 d^2 + 5 d` MLP and `4 d` of two norms.
        layers: number of blocks.
        final_norm: scale and shift of the last norm.
    """

    embedding: int
    positions: int
    block: int
    layers: int
    final_norm: int

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.embedding + self.positions + self.layers * self.block + self.final_norm


def small_gpt_parameters(
    *, vocabulary: int, positions: int, layers: int, hidden: int
) -> ParameterCount:
    """Parameters of a small GPT: `V d + T d + L (12 d^2 + 9 d) + 2 d`.

    Attention has no biases, the MLP is four times as wide as the residual stream and has biases,
    norms have scale and shift, and the head is the embedding. For models of a config.json, use
    `sixfold.sizing.model_size`.

    Args:
        vocabulary: number of tokens V.
        positions: longest sequence T, in tokens.
        hidden: width d of the residual stream.
    """
    return ParameterCount(
        embedding=vocabulary * hidden,
        positions=positions * hidden,
        block=12 * hidden**2 + 9 * hidden,
        layers=layers,
        final_norm=2 * hidden,
    )


def fitting_heads(width: int, heads: int) -> int:
    """The largest number of heads that divides `width` and is at most `heads`."""
    return max(h for h in range(1, heads + 1) if width % h == 0)


def transformer_shapes(
    *, batch: int, length: int, width: int, heads: int, layers: int, vocabulary: int
) -> Outcome:
    """Shapes of the tensors of one forward pass."""
    used = fitting_heads(width, heads)
    b, t, d, k = batch, length, width, width // used
    count = small_gpt_parameters(vocabulary=vocabulary, positions=t, layers=layers, hidden=d)
    groups = {
        "token embedding": count.embedding,
        "position embedding": count.positions,
        "blocks": count.block * count.layers,
        "final norm": count.final_norm,
    }
    total = sum(groups.values())
    training = flops_per_token(total, TRAINING)
    shapes = [
        ["token ids", f"{b} x {t}"],
        ["embeddings", f"{b} x {t} x {d}"],
        ["queries, keys, values", f"{b} x {used} x {t} x {k}"],
        ["attention scores", f"{b} x {used} x {t} x {t}"],
        ["MLP hidden", f"{b} x {t} x {4 * d}"],
        ["logits", f"{b} x {t} x {vocabulary}"],
    ]
    shown = min(t, 8)
    mask: list[list[Value]] = [
        [i, "".join("1" if j <= i else "." for j in range(shown))] for i in range(shown)
    ]
    return Outcome(
        values={
            "heads": used,
            "head_width": k,
            "parameters": total,
            "parameters_per_block": count.block,
            "embedding_share": count.embedding / total,
            "forward_flops_per_token": flops_per_token(total, FORWARD),
            "training_flops_per_token": training,
            "training_flops": training * b * t,
        },
        tables=(
            Table("Shapes", ("tensor", "shape"), shapes),
            Table("Parameters", ("part", "parameters"), [[p, n] for p, n in groups.items()]),
            Table(f"Causal mask, first {shown} tokens", ("query", "visible keys"), mask),
        ),
        figures=(Bars("Parameters", "numbers", list(groups), [float(n) for n in groups.values()]),),
    )


TRANSFORMER_SHAPES = Lab(
    name="transformer-shapes",
    title="Shapes, parameters and FLOPs of a small transformer",
    about=(
        "A decoder with learned positions, pre-norm blocks, fused QKV without bias, a GELU MLP of"
        " width 4d with bias, and a head tied to the embedding has V d + T d + L (12 d^2 + 9 d)"
        " + 2 d parameters N. A forward pass takes about 2N FLOPs per token, training 6N. Heads"
        " that do not divide the width are lowered to a divisor."
    ),
    controls=(
        Control("batch", 4, "sequences B", low=1, high=64, step=4),
        Control("length", 11, "tokens per sequence T", unit="tokens", low=1, high=256, step=16),
        Control("width", 128, "model width d", low=16, high=512, step=16),
        Control("heads", 4, "attention heads h", low=1, high=16),
        Control("layers", 4, "blocks L", low=1, high=12),
        Control("vocabulary", 29, "tokens V", low=16, high=50304, sweep=(16, 29, 256, 1024, 50304)),
    ),
    run=transformer_shapes,
    breaking=Breaking(
        breaks={"vocabulary": 50304},
        safe={"vocabulary": 256},
        why="With a large vocabulary most parameters of a narrow model are embeddings.",
        failed=lambda outcome: outcome.number("embedding_share") > 0.5,
    ),
)

LABS = (TRANSFORMER_SHAPES,)
