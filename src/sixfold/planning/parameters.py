"""Number of parameters of a decoder with learned positions and a tied head."""

from __future__ import annotations

from dataclasses import dataclass

from . import checks


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
    `sixfold.recipe.model_size`.

    Args:
        vocabulary: number of tokens V.
        positions: longest sequence T, in tokens.
        layers: blocks L.
        hidden: width d of the residual stream.

    Raises:
        UserError: if a size is not a whole number of at least 1.
    """
    checks.whole(vocabulary=vocabulary, positions=positions, layers=layers, hidden=hidden)
    return ParameterCount(
        embedding=vocabulary * hidden,
        positions=positions * hidden,
        block=12 * hidden**2 + 9 * hidden,
        layers=layers,
        final_norm=2 * hidden,
    )
