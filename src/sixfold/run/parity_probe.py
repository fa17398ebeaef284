"""Parity probe before training: compare the log-probs of engine and trainer.

It also warns if the algorithm is sensitive to the remaining difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..algorithm.method import LOSSES, Method
from ..batch import Batch, number
from ..engine.engine import Engine
from ..errors import UserError
from ..report.numbers import percent
from ..rollout.kv_probe import exact_logp
from ..trainer.logprobs import Scoring, score_batch, score_tables
from ..trainer.mismatch import QUANTISED_LIMIT, mismatch_metrics, outside_share
from ..trainer.parity import Parity, parity_limits
from .assemble import Assembly

EXACT_ROWS = 8
"""Trajectories that are scored with an exact KV cache if the engine's cache is quantised."""
NOISE_SHARE = 0.05
"""Share of sequences that rounding may move out of a clip band before the user is warned."""


def check_parity(
    assembly: Assembly, batch: Batch, method: Method, say: Callable[[str], None]
) -> None:
    """Score sampled trajectories with the trainer's code, and compare with the engine.

    Args:
        assembly: engine, policy and settings.
        batch: trajectories just sampled by the engine, on the policy's device.
        method: method that will be trained.
        say: receives messages for the user.

    Raises:
        UserError: if the difference exceeds rounding error, or if quantised weights are too far
            from the policy's.
    """
    recipe = assembly.recipe
    logp, sampled, mask = (
        _with_exact_cache(assembly, batch)
        if recipe.engine.kv_dtype == "int8"
        else (_scored(assembly, assembly.sampler, batch), batch.old_logp, batch.mask)
    )
    parity = Parity.of(mismatch_metrics(logp[mask], sampled[mask]), int(mask.sum()))
    say(f"parity of engine and trainer log-probs: {parity}")
    if over := parity_limits(recipe.run.precision, assembly.device, assembly.remote).exceeded(
        parity
    ):
        raise UserError(
            f"engine and trainer disagree on the same tokens and weights: {over}. Set run.precision"
            " = 'float32' or SIXFOLD_KERNELS=torch; if neither helps, this model cannot be trained"
        )
    if recipe.quantised_sampling:
        _check_quantised(assembly, batch, say)
    elif line := noise_warning(method, logp, batch):
        say(line)


def noise_warning(method: Method, logp: Tensor, batch: Batch) -> str:
    """Warning if rounding alone would move many sequences out of the clip band. Otherwise "".

    A loss with a sequence-level ratio has a narrow band (GSPO: 1 - 3e-4 to 1 + 4e-4). In bfloat16,
    the mean difference between engine and trainer over a sequence can be larger. Clipping then
    follows numerical noise.

    Args:
        method: method that will be trained.
        logp: [B, T] log-probs of the trainer.
        batch: the same trajectories with the engine's log-probs.
    """
    kind = LOSSES[method.loss]
    low, high = method.clip_low, method.clip_high
    if (
        kind.ratio != "sequence"
        or kind.clips != "clip"
        or method.ratio_from_trainer
        or low is None
        or high is None
    ):
        return ""
    share = outside_share(logp, batch.old_logp, batch.mask, math.log1p(-low), math.log1p(high))
    if share <= NOISE_SHARE:
        return ""
    return (
        f"WARNING: rounding alone moves {percent(share, 0)} of the sequences outside the clip range"
        f" of {method.name} ({1 - low:g} to {1 + high:g}): clipping would follow numerical noise."
        " Set algorithm.correction = 'decoupled': it computes ratios from the trainer's own"
        " log-probs."
    )


def _check_quantised(assembly: Assembly, batch: Batch, say: Callable[[str], None]) -> None:
    """Measure how far quantised weights or a quantised KV cache move the policy's log-probs.

    Raises:
        UserError: if the mean difference exceeds QUANTISED_LIMIT.
    """
    recipe = assembly.recipe
    names = [f"{recipe.sync.kind} weights"] if recipe.sync.quantised else []
    names += [f"{recipe.engine.kv_dtype} KV cache"] if recipe.engine.kv_dtype == "int8" else []
    setting, exact = (
        (f"sync.kind = '{recipe.sync.kind}'", "'copy'")
        if recipe.sync.quantised
        else (f"engine.kv_dtype = '{recipe.engine.kv_dtype}'", "'auto'")
    )
    logp = _scored(assembly, assembly.policy.model, batch)
    drift = mismatch_metrics(logp[batch.mask], batch.old_logp[batch.mask])
    kl, mean, most = (
        number(drift, f"mismatch/{key}") for key in ("kl_k3", "mean_abs_logp", "max_abs_logp")
    )
    say(
        f"{' and '.join(names)} change log-probs: mean difference {mean:.1e} nats, maximum"
        f" {most:.1e}, KL divergence to the policy {kl:.1e} nats per token"
    )
    if not mean <= QUANTISED_LIMIT:
        raise UserError(
            f"{setting}: rounding changes log-probs too much to learn from these samples: mean"
            f" difference {mean:.2g} nats (limit {QUANTISED_LIMIT:g}). Use {exact}"
        )


def _with_exact_cache(assembly: Assembly, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Score a few trajectories by the trainer, and by the engine with a KV cache that is exact.

    The log-probs in the batch come from a quantised cache, so they say nothing about parity.

    Returns:
        Log-probs of the trainer, of the engine, and the mask of scored tokens, each [B, T]. They
        are at temperature 1 and without truncation.

    Raises:
        TypeError: if the engine runs in another process.
    """
    if not isinstance(assembly.engine, Engine):
        raise TypeError("only the embedded engine has an int8 KV cache")
    few = replace(batch.rows(torch.arange(min(EXACT_ROWS, len(batch.tokens)))), kept=None)
    scoring = replace(assembly.scoring, temperature=1.0)
    logp = _scored(assembly, assembly.sampler, few, scoring)
    sampled = torch.zeros_like(logp)
    model, adapter = assembly.engine.runner.model, assembly.engine.adapters.of(None)
    for row, length in enumerate(few.lengths.tolist()):
        tokens = few.tokens[row, :length].tolist()
        exact = exact_logp(model, tokens, scoring.autocast, adapter)
        sampled[row, 1:length] = exact.to(logp.device)
    return logp, sampled, few.mask


def _scored(
    assembly: Assembly, model: PreTrainedModel, batch: Batch, scoring: Scoring | None = None
) -> Tensor:
    """Log-probs [B, T] computed by the trainer's code with `model`. scoring: None: the run's."""
    config, scoring = assembly.recipe.trainer, scoring or assembly.scoring
    budget = config.max_tokens_per_microbatch, config.share_prefix
    if assembly.shards:  # the engine then has the policy's own weights
        return score_tables(assembly.root(), batch, scoring, *budget, assembly.data_ranks)[0]
    return score_batch(model, batch, scoring, *budget)
