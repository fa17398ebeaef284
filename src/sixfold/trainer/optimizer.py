"""AdamW in the form that the settings choose, and its learning rate.

The learning rate is a function of the step alone, so checkpoints do not store it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import UserError
from ..recipe.schema import TrainerConfig
from .lean_adamw import LeanAdamW, StateForm


def make_optimizer(
    model: nn.Module, config: TrainerConfig, seed: int = 0
) -> torch.optim.AdamW | LeanAdamW:
    """AdamW over the parameters that require gradients (a frozen reference has none).

    Gradients of bfloat16 parameters are summed in float32. In bfloat16, the gradients of later
    micro-batches would be rounded away.

    Args:
        model: module to train.
        config: trainer settings.
        seed: seed of stochastic rounding.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.epsilon,
        "weight_decay": config.weight_decay,
    }
    if config.plain_optimizer:
        return torch.optim.AdamW(parameters, **settings, fused=True)
    if any(isinstance(p, DTensor) for p in parameters):
        raise UserError(
            "trainer.weights, trainer.optimizer and trainer.offload have only their defaults on"
            " several ranks, where the state is already divided among the ranks. Remove them, or"
            " train on one rank"
        )
    _accumulate_in_float32(parameters)
    form = StateForm(
        master=config.rounding == "master",
        eight_bit=config.optimizer == "adamw8bit",
        on_host=config.offload == "optimizer",
    )
    return LeanAdamW(parameters, form, seed, **settings)


def _accumulate_in_float32(parameters: Sequence[nn.Parameter]) -> None:
    """Make the gradients of lower-precision parameters float32.

    Raises:
        UserError: if this release of PyTorch cannot do so.
    """
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
        config: trainer settings.
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
