"""Weight matrices in bfloat16 for training and scoring under autocast.

Under autocast, the matrix products of a float32 model read its matrices rounded to bfloat16. Here
the matrices are stored rounded. Vectors (norms, biases) stay float32. Embeddings are stored in
bfloat16 and converted to float32 after the look-up, so the residual stream is float32 as before. A
forward pass therefore gives the numbers of the float32 model, except that embeddings are rounded.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel


@torch.no_grad()
def store_in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Store the model's weight matrices in bfloat16, in place. Returns the model."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    lookups: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    for lookup in lookups:
        # A bound method, not a closure: a deep copy of the model then binds its own module.
        lookup.forward = MethodType(_float32_lookup, lookup)
    model.config.dtype = torch.bfloat16
    return model


def _float32_lookup(module: Any, ids: Tensor) -> Tensor:
    """Forward pass of an embedding [V, H] for ids [...]: float32 rows [..., H]."""
    if type(module).forward is nn.Embedding.forward:
        rows: Tensor = Lookup.apply(ids, module.weight, module.padding_idx)
        return rows
    rows = type(module).forward(module, ids)  # with a scale, as in Gemma
    return rows.float()


class Lookup(torch.autograd.Function):
    """Embedding look-up with float32 rows and a float32 gradient of the table.

    In a bfloat16 sum, most gradients of a frequent token would be rounded away.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        """ids [...], table [V, H] -> [..., H]. The gradient of row `padding` is 0."""
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding = len(table), -1 if padding is None else padding
        return F.embedding(ids, table).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        """grad [..., H] -> gradient of the table [V, H]."""
        (ids,) = ctx.saved_tensors
        sums = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.rows, ctx.padding, False)
        return None, sums, None
