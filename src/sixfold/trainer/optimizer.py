"""AdamW in the form that the settings choose, and its learning rate.

The learning rate is a function of the step alone, so checkpoints do not store it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import UserError
from ..recipe.schema import TrainerConfig
from .lean_adamw import BLOCK, LeanAdamW, StateForm, blocks_cross_ranks
from .sharded import holders, in_rank_group, own_part, whole

T = TypeVar("T", bound=Tensor)


def make_optimizer(
    model: nn.Module, config: TrainerConfig, seed: int = 0
) -> torch.optim.AdamW | LeanAdamW:
    """AdamW over the parameters that require gradients (a frozen reference has none).

    Gradients of bfloat16 parameters are summed in float32. In bfloat16, the gradients of later
    micro-batches would be rounded away.

    Raises:
        UserError: if several ranks or this release of PyTorch do not support the settings.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.epsilon,
        "weight_decay": config.weight_decay,
    }
    if config.plain_optimizer:
        groups = [{"params": group} for group in by_mesh(parameters)]
        return torch.optim.AdamW(groups or parameters, **settings, fused=True)
    if config.optimizer == "adamw8bit":
        _check_blocks(model)
    _accumulate_in_float32(parameters)
    form = StateForm(
        master=config.rounding == "master",
        eight_bit=config.optimizer == "adamw8bit",
        on_host=config.offload == "optimizer",
    )
    return LeanAdamW(parameters, form, seed, **settings)


def _check_blocks(model: nn.Module) -> None:
    """Raise UserError if a block of 8-bit moments would be divided between two ranks."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and blocks_cross_ranks(parameter):
            raise UserError(
                f"trainer.optimizer = 'adamw8bit': this number of ranks divides '{name}'"
                f" {tuple(parameter.shape)} within a block of {BLOCK} numbers, which share a scale."
                " Use another number of ranks, or trainer.optimizer = 'adamw'"
            )


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Tensors that are sharded over the same ranks, together. Their order does not change.

    PyTorch's functions on many tensors need all of them on one mesh.
    """
    meshes = dict[object, list[T]]()
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        meshes.setdefault(mesh, []).append(tensor)
    return list(meshes.values())


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of all gradients together, equal on all ranks. Each value counts once.

    Args:
        parameters: parameters. Those without a gradient do not count.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(map(in_rank_group, gradients)):
        return whole(torch.nn.utils.get_total_norm(gradients))
    # One sum over all ranks, and not one for each dimension of a mesh: these could add in another
    # order on each rank, and then ranks would clip differently.
    held = dict[int, list[Tensor]]()
    for gradient in gradients:
        held.setdefault(holders(gradient), []).append(own_part(gradient))
    norms = [torch.nn.utils.get_total_norm(parts).double() / n**0.5 for n, parts in held.items()]
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square)
    return square.sqrt().float()


def not_finite(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient is not finite on at least one rank.

    All ranks that share the model must call this.
    """
    graded = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    wrong = torch.stack([(~own_part(grad).isfinite()).any() for _, grad in graded]).float()
    if any(isinstance(grad, DTensor) for _, grad in graded):
        dist.all_reduce(wrong)
    return [name for (name, _), bad in zip(graded, wrong.tolist(), strict=True) if bad]


def clip_gradients(parameters: Iterable[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale gradients in place, so that their norm is at most `most`.

    Args:
        most: largest norm.
        norm: the norm, as `gradient_norm` returned it.
    """
    for group in by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, most, norm)


def _accumulate_in_float32(parameters: Sequence[nn.Parameter]) -> None:
    """Make the gradients of lower-precision parameters float32."""
    lower = [p for p in parameters if p.dtype != torch.float32]
    if lower and "grad_dtype" not in vars(torch._C.TensorBase):
        raise UserError(
            "trainer.weights = 'bfloat16' needs PyTorch 2.10 or later, which adds up their"
            f" gradients in float32; this is {torch.__version__}. Update PyTorch, or use"
            " trainer.weights = 'float32'"
        )
    for parameter in lower:
        parameter.grad_dtype = torch.float32


def reset_optimizer(optimizer: torch.optim.AdamW | LeanAdamW) -> None:
    """Zero all moments and step counts in place, as in a new optimizer.

    The learning-rate schedule continues.
    """
    if isinstance(optimizer, LeanAdamW):
        optimizer.reset()
        return
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


def learning_rate(config: TrainerConfig, step: int, total: int) -> float:
    """Learning rate of one optimizer step: linear warm-up, then the schedule.

    The schedule is constant, or a linear or cosine decay to 0 at the last step.

    Args:
        step: optimizer step, starting at 0.
        total: number of optimizer steps.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or total <= config.warmup_steps:
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps) / (total - config.warmup_steps))
    return config.learning_rate * (
        1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    )
