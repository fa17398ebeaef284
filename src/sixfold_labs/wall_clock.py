"""Seconds per step from model size, samples per prompt, length and topology."""

from __future__ import annotations

import math

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table
from sixfold_planning.step_time import (
    POOLS,
    TOPOLOGIES,
    PhaseSeconds,
    StepTime,
    step_time,
    useful_tokens_per_second,
)

PROMPTS = 64
DEVICES = {"corrected": 4, "published": 16}
"""Devices per pool. The rates of the published model already hold for 4 devices, but it divides the
times by 4 once more, as if there were 16.
"""


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
        length: mean length of completions, in tokens.
        devices: H100 in each pool.
    """
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


def utilisation(step: StepTime, topology: str) -> float:
    """Share of the step in which the trainer computes. Disaggregated: of the step without sync."""
    waiting = step.sync if topology == "disaggregated" else 0
    return step.training / (step.seconds - waiting)


def wall_clock(
    *,
    billions: float,
    k: int,
    length: int,
    topology: str,
    calibration: str,
    reference: str,
    kept: float,
) -> Outcome:
    """Time a step."""
    phases = modelled_phases(
        billions, prompts=PROMPTS, samples=k, length=length, devices=DEVICES[calibration]
    )
    step = step_time(phases, topology=topology, sync_hidden=False, reference_on=reference)
    terms = {
        "rollout": phases.rollout,
        "verifier": phases.verifier,
        "reference": phases.reference,
        "trainer": phases.trainer,
        "sync": phases.sync,
    }
    dominant = max(terms, key=terms.__getitem__)
    total = sum(terms.values())
    return Outcome(
        values={
            "step_seconds": step.seconds,
            "tokens_per_second": useful_tokens_per_second(
                prompts=PROMPTS, samples=k, mean_length=length, keep_rate=kept, seconds=step.seconds
            ),
            "dominant_term": dominant,
            "dominant_share_of_step": terms[dominant] / step.seconds,
            "dominant_share_of_sum": terms[dominant] / total,
            "compute_utilisation": utilisation(step, topology),
        },
        tables=(
            Table(
                "Terms",
                ("term", "seconds", "share of the sum"),
                [[name, seconds, seconds / total] for name, seconds in terms.items()],
            ),
        ),
        figures=(Bars("Terms", "seconds", list(terms), list(terms.values())),),
    )


WALL_CLOCK = Lab(
    name="wall-clock",
    title="The five terms of a step: which one dominates, and what topology hides",
    about=(
        "64 prompts with K samples of L tokens. R = 21 s (P/7) (tokens/1e6) (1 + 1.8 tanh(L/2048)),"
        " V = 1 s, T = 8 s (P/7) (tokens/1e6), ref = T/3, S = 0.15 P + 0.005 P^2 for P billion"
        " parameters. Colocated R + V + ref + T + S; disaggregated max(R + V, ref + T) + S; async"
        " max(R + V, ref + T, S). Beside the sampler, ref adds to R + V. The calibration is for 4"
        " GPUs. The published model divides R and T by 4 once more, by mistake; `calibration` ="
        " published repeats that. The corrected model does not."
    ),
    controls=(
        Control(
            "billions",
            7.0,
            "parameters, billions",
            unit="billion",
            low=1.0,
            high=70.0,
            sweep=(1.0, 3.0, 7.0, 13.0, 34.0, 70.0),
        ),
        Control("k", 16, "samples per prompt (K)", low=1, high=32, sweep=(1, 2, 4, 8, 16, 32)),
        Control(
            "length",
            1024,
            "mean completion length, tokens",
            unit="tokens",
            low=128,
            high=8192,
            sweep=(128, 256, 512, 1024, 2048, 4096, 8192),
        ),
        Control("topology", "disaggregated", "placement of the roles", choices=TOPOLOGIES),
        Control("reference", "trainer", "devices of the reference", choices=POOLS),
        Control("kept", 1.0, "share of sampled tokens that train", low=0.1, high=1.0, step=0.1),
        Control("calibration", "corrected", "model of the terms", choices=tuple(DEVICES)),
    ),
    run=wall_clock,
    breaking=Breaking(
        breaks={"length": 8192},
        safe={"length": 128, "k": 8},
        why="Long completions make the rollout nearly the whole step, so no topology helps.",
        failed=lambda outcome: outcome.number("dominant_share_of_step") > 0.97,
    ),
)

LABS = (WALL_CLOCK,)
