"""Rough phase times of a step from model size and completion length alone.

Constants are for a dense model on four H100 per pool. Use measured times where there are any.
"""

from __future__ import annotations

import math

from . import checks
from .step_time import PhaseSeconds

ROLLOUT_SECONDS, TRAINER_SECONDS = 21.0, 8.0
"""Seconds for one million tokens of a 7B model on four H100."""

CALIBRATED_DEVICES = 4


def modelled_phases(
    billions: float, *, prompts: int, samples: int, length: int, devices: int
) -> PhaseSeconds:
    """Phase times of a step.

    Sampling and training scale with tokens and parameters, and inversely with devices. Long
    completions slow sampling by up to 2.8 times: `1 + 1.8 tanh(L / 2048)`. The reference takes a
    third of the trainer's time, checks take 1 s, and sync takes `0.15 P + 0.005 P^2` seconds for P
    billion parameters.

    The published simulator of this model divides by four devices although its constants already
    hold for four. Its results are those of `devices=16` here.

    Args:
        billions: parameters in billions.
        prompts: prompts per step.
        samples: samples per prompt.
        length: mean length of completions, in tokens.
        devices: H100 in each pool.

    Raises:
        UserError: if a number is out of range.
    """
    checks.positive(billions=billions)
    checks.whole(prompts=prompts, samples=samples, length=length, devices=devices)
    millions = prompts * samples * length / 1e6
    scale = billions / 7 * millions * CALIBRATED_DEVICES / devices
    trainer = TRAINER_SECONDS * scale
    return PhaseSeconds(
        rollout=ROLLOUT_SECONDS * scale * (1 + 1.8 * math.tanh(length / 2048)),
        verifier=1.0,
        reference=trainer / 3,
        trainer=trainer,
        sync=0.15 * billions + 0.005 * billions**2,
    )
