"""NEFTune: noise on the token embeddings in training (arXiv:2310.05914)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..seeds import STEP_BYTES, seed_number
from .packing import PackedRow


class EmbeddingNoise:
    """Adds noise to the embeddings of each example, uniform in +-alpha / sqrt(L * d).

    L is the number of tokens of the example and d the size of an embedding. The noise of an example
    depends on (seed, step, row of the batch) alone, and not on packing.

    Args:
        step: number of the step.
    """

    def __init__(self, alpha: float, seed: int, step: Callable[[], int]) -> None:
        self._alpha = alpha
        self._seed = seed
        self._step = step

    @contextmanager
    def on(self, embedding: nn.Module, row: PackedRow) -> Iterator[None]:
        """Context in which the embeddings of a packed row are noisy, if gradients are computed.

        Args:
            embedding: token ids [1, N] -> embeddings [1, N, d].
            row: a row without shared prompts.
        """
        if not torch.is_grad_enabled():
            yield
            return

        def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output + self._noise(row, output.shape[-1]).to(output)

        hook = embedding.register_forward_hook(add)
        try:
            yield
        finally:
            hook.remove()

    def _noise(self, row: PackedRow, size: int) -> Tensor:
        """Noise [N, size] of a packed row, float32 on the host."""
        starts = [segment.start for segment in row.segments if segment.prefix == 0]
        stops = [*starts[1:], len(row.tokens)]
        numbers = row.members.tolist()
        parts = []
        for number, start, stop in zip(numbers, starts, stops, strict=True):
            text = f"neftune/{self._seed}/{self._step()}/{number}"
            generator = torch.Generator().manual_seed(seed_number(text, STEP_BYTES))
            unit = torch.rand(stop - start, size, generator=generator) * 2 - 1
            parts.append(unit * self._alpha / ((stop - start) * size) ** 0.5)
        return torch.cat(parts)
