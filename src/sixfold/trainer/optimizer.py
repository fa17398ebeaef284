"""AdamW and its learning rate.

The learning rate is a function of the step alone, so checkpoints do not store it.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..recipe.schema import TrainerConfig


def make_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that require gradients (a frozen reference has none)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def reset_optimizer(optimizer: torch.optim.AdamW) -> None:
    """Zero all moments and step counts in place, as in a new optimizer.

    The learning-rate schedule continues.
    """
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
