"""Stand-in with everything that TRL's trainer methods read: settings, one process, evaluation mode,
and our tables in place of a model and of rollouts.

Importing this needs TRL.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from .tables import Tables

# All tokens train: no entropy quantile.
ALL = 1.0


def trainer(
    t: Tables, logp: Tensor, entropies: Tensor | None = None, **settings: Any
) -> SimpleNamespace:
    """Trainer on one process, in evaluation: no gradient accumulation, and `logp` as the model's
    log-probs.
    """
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing_kwargs": None,
        "per_device_train_batch_size": len(logp),
        "per_device_eval_batch_size": len(logp),
    }
    own = {
        "accelerator": SimpleNamespace(
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
            num_processes=1,
            process_index=0,
            device="cpu",
            sync_gradients=True,
        ),
        "model": SimpleNamespace(training=False, is_gradient_checkpointing=False),
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": ALL,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "max_completion_length": 23,
        "current_gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *given, **more: (
            logp,
            torch.zeros_like(logp) if entropies is None else entropies,
            None,
        ),
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "get_gamma_weights": GRPOTrainer.get_gamma_weights,
    }
    stub = SimpleNamespace(**(own | {k: v for k, v in settings.items() if k not in arguments}))
    stub.args = SimpleNamespace(
        **(arguments | {k: v for k, v in settings.items() if k in arguments})
    )
    for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min"):
        if name in settings:
            setattr(stub.args, name, settings[name])
    stub.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, stub)
    return stub


def inputs(t: Tables, advantage: Tensor, **more: Any) -> dict[str, Any]:
    """A batch as TRL's loss reads it."""
    nothing = torch.zeros(len(t.mask), 0, dtype=torch.long)
    return {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(t.mask, dtype=torch.long),
        "completion_mask": t.counted,
        "advantages": advantage,
        "old_per_token_logps": t.old_logp,
        "ref_per_token_logps": t.ref_logp,
        "num_items_in_batch": t.mask.sum(),
        **more,
    }


def rollout(
    t: Tables, parts: Tensor, kind: Any = GRPOTrainer, **settings: Any
) -> dict[str, Tensor]:
    """Result of TRL's trainer for a batch of rollouts with these rewards [B, R]: advantages, and
    importance ratios with `use_vllm`.
    """
    names = [f"reward-{i}" for i in range(parts.shape[1])]
    lengths = t.lengths.tolist()
    ids = [[1] * n for n in lengths]
    sampled = [t.sampler_logp[i, :n].tolist() for i, n in enumerate(lengths)]
    own: dict[str, Any] = {
        "_generate": lambda prompts: (ids, ids, None, ["" for _ in ids], sampled, {}, None, None),
        "_calculate_rewards": lambda *given: parts.clone(),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "pad_to_multiple_of": None,
        "environment_factories": None,
        "tools": [],
        "environments": None,
        "mask_truncated_completions": False,
        "num_generations": t.samples,
        "num_generations_eval": t.samples,
        "reward_weights": torch.ones(len(names)),
        "reward_funcs": names,
        "reward_func_names": names,
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "log_multimodal": False,
        "_logs": (
            defaultdict(lambda: defaultdict(list))
            | {
                "prompt": [],
                "completion": [],
                "advantages": [],
            }
        ),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "ref_model": None,
        "reward_clip_range": None,
        "normalize_advantages": False,
    }
    if kind is RLOOTrainer:
        own["_generate"] = lambda prompts: (ids, ids, ["" for _ in ids])
    stub = trainer(t, t.old_logp, **(own | settings))
    return kind._generate_and_score_completions(stub, [{"prompt": ""} for _ in ids])
