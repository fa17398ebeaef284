"""Decode layout for the Triton kernels. Importing this module needs Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import AttentionLayer
from ..kernels.triton.attention import Units, decode_attention
from .kv_cache import KVCache


@dataclass(frozen=True)
class TritonDecodeLayout:
    """`DecodeLayout` for the Triton kernels: one new token for each of B sequences, or B prompt
    tokens.

    Attributes:
        slots: [B] cache slot that each token is written to.
        table: [B, M] block table of each row.
        positions: [B] position of each token in its sequence.
        units: result of `units_of` or `units_of_prompts`.
    """

    cache: KVCache
    slots: Tensor
    table: Tensor
    positions: Tensor
    units: list[Units]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Write the new keys and values, then attend over each row's own sequence.

        Shapes are those of `DecodeLayout.attend`. Values shorter than keys (latent attention) are
        zero-padded, because the kernels use one size.

        Raises:
            ValueError: if values are longer than keys.
        """
        size = v.shape[-1]
        if size > k.shape[-1]:
            raise ValueError(
                f"values have {size} numbers but keys have {k.shape[-1]}: the kernels do not"
                " support values longer than keys"
            )
        pools = self.cache.write(
            kernel.layer, k[0], F.pad(v[0], (0, k.shape[-1] - size)), self.slots
        )
        queries = q[0].transpose(0, 1).to(v.dtype)
        out = decode_attention(
            queries,
            *pools,
            self.table,
            self.positions,
            self.units,
            kernel,
            self.cache.scales.get(kernel.layer),
        )
        return out[None, ..., :size]
