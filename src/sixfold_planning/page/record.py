"""`sixfold plan TARGET --json`: the plan as one JSON object, with exact numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean as mean
from typing import Any

from sixfold.environment.pass_rate import degenerate_share
from sixfold.recipe.memory import memory_of

from ..constants import CONSTANTS
from ..placed import OWN
from ..planner import TopologyPlan, weight_sync
from ..simulate.outcome import Outcome
from ..stragglers import exact_longest
from .answer import Answer, tokens_per_second
from .simulation import Simulated, SimulationResult
from .verdict import EXIT_CODES, Verdict

Json = dict[str, Any]


def plan_record(given: Answer, hint: str, *, rates: Sequence[float], variation: float) -> Json:
    """Numbers of a plan. Sizes are in bytes, times in seconds if the name says nothing else.

    Args:
        hint: from `plan_verdict.remedy`.
        rates: pass rates of tasks, or one for all.
        variation: coefficient of variation of the lengths in a group.
    """
    inputs, device, verdict = given.inputs, given.cluster.device, given.verdict
    arch, work = inputs.arch, inputs.work
    return {
        "target": inputs.title,
        "verdict": verdict_record(verdict, hint),
        "devices": {
            "name": device.name,
            "count": given.cluster.count,
            "bytes": round(device.memory_gb * 1e9),
            "price_per_hour": device.price_per_hour,
        },
        "model": {
            "name": arch.name,
            "parameters": round(arch.params_b * 1e9),
            "active_parameters": round(arch.active_b * 1e9),
            "sizes_from": inputs.sizes_from,
        },
        "work": {**asdict(work), "steps": inputs.plan.recipe.run.steps},
        "assumed": list(inputs.assumed),
        "memory": {
            "fits": given.fits,
            "two_pools_fit": given.pools_fit if given.apart else None,
            **_memory(given),
        },
        "topologies": {
            name: _topology(given, plan) for name, plan in given.found.topologies.items()
        },
        "run": _run(given),
        "groups": {
            "pass_rate": mean(rates),
            "tasks_measured": len(inputs.rates),
            "variation": variation,
            "equal_rewards": degenerate_share(rates, work.samples),
            "longest_to_mean": exact_longest(1.0, variation=variation, samples=work.samples),
        },
    }


def _memory(given: Answer) -> Json:
    """Memory of one device with all roles. Empty if sizes are not known."""
    memory = memory_of(given.inputs.plan, given.cluster.count)
    if memory is None:
        return {}
    return {
        "least": memory.needed(memory.cache_least),
        "parts": {part.name: part.size for part in memory.parts if part.size and not part.host},
        "host_parts": {part.name: part.size for part in memory.parts if part.size and part.host},
        "kv_cache": memory.cache_wanted * memory.cache_token,
    }


def _topology(given: Answer, plan: TopologyPlan) -> Json:
    sync: Json = {}
    if plan.name not in OWN:
        sync["sync_operations"] = weight_sync(
            given.inputs.arch,
            given.cluster.device,
            trainer_ranks=plan.training_devices,
            devices=given.cluster.count,
            sent_width=given.inputs.work.sent_width,
            k=CONSTANTS,
        )
    return {
        "sampling_devices": plan.sampling_devices,
        "training_devices": plan.training_devices,
        "devices_per_engine": plan.engine_devices,
        "phases": dict(plan.phases.items()),
        **sync,
        "step": plan.step.seconds,
        "tokens_per_second": tokens_per_second(given, plan),
    }


def verdict_record(verdict: Verdict, hint: str) -> Json:
    """Whether Sixfold runs the plan, and what is left to do if not."""
    return {
        "sixfold": verdict.kind,
        "exit_code": EXIT_CODES[verdict.kind],
        "settings": dict(verdict.settings),
        "text": verdict.text,
        "remedy": hint or None,
    }


def _run(given: Answer) -> Json | None:
    """Time and cost of the run with the settings of the verdict.

    None: Sixfold cannot run it, or the time is not known.
    """
    plan = given.running
    if plan is None:
        return None
    return {"step": plan.step.seconds, "hours": given.hours(plan), "us_dollars": given.price(plan)}


def simulation_record(result: SimulationResult) -> Json:
    """Numbers of a simulation: topologies, samples per prompt, failures."""
    request, failures = result.request, result.failures
    found: Json = {
        "steps": request.steps,
        "seed": request.seed,
        "staleness_bound": request.staleness,
        "topologies": _simulated(result.topologies),
        "samples_per_prompt": {
            str(samples): _simulated(topologies)
            for samples, topologies in result.by_samples.items()
        },
    }
    if failures is not None:
        found["failures"] = {
            "device_hours": request.device_hours,
            "restart": request.restart_seconds,
            "runs": [_simulated(run) for run in failures.runs],
            # None: failures come too often for the run to end.
            "expected_slowdown": {
                name: value if math.isfinite(value) else None
                for name, value in failures.expected.items()
            },
        }
    return found


def _simulated(found: Mapping[str, Simulated]) -> Json:
    return {name: _outcome(one.outcome) for name, one in found.items()}


def _outcome(outcome: Outcome) -> Json:
    shares = outcome.shares
    return {
        "step": outcome.step_seconds,
        "sampling_busy": shares.sampling,
        "training_busy": shares.training,
        "idle": shares.idle,
        "sequences_per_engine": shares.running,
        "longest_to_mean": outcome.longest,
        "group_longest_to_mean": outcome.group_longest,
        "equal_rewards": outcome.equal,
        "staleness": {str(age): share for age, share in outcome.staleness.items()},
        "tokens_per_second": outcome.tokens_per_second,
        "useful_tokens_per_second": outcome.useful_per_second,
        "failures": outcome.failures,
        "tokens": asdict(outcome.tokens),
        "total": outcome.total_seconds,
    }
