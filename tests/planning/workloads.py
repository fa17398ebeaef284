"""Workloads of the planner's tests."""

from __future__ import annotations

from dataclasses import replace

from sixfold_planning.workload import Workload

WORK = Workload(
    prompts=64,
    samples=16,
    prompt_tokens=128,
    mean_tokens=1024,
    longest_tokens=2048,
    packed=8192,
    recompute="full",
    adapters=False,
    shared_prompt=True,
    reference=True,
    critic=False,
    shared_weights=True,
)
"""1,024 samples of 1,024 tokens on average."""

EQUAL_LENGTHS = replace(WORK, prompts=32, samples=8, longest_tokens=1024)
"""256 samples, all of 1,024 tokens."""
