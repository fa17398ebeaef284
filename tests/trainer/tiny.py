"""Tiny models and ragged batches for the tests of this folder, and the slow, obvious way to score
them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.made_trajectories import from_mask
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, Loss, collate
from sixfold.model.attention import NAME, register
from sixfold.recipe.schema import TrainerConfig
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, Task, Trajectory

VOCABULARY = 31
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)


def tiny_model(kind: str = "qwen3", **sizes: Any) -> PreTrainedModel:
    """Random weights, large enough for every token to matter; evaluation mode, our attention."""
    register()
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=128)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model: PreTrainedModel = GPT2LMHeadModel(config)
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**_SIZES | {"sliding_window": 5} | sizes))
    elif (
        kind == "gemma2"
    ):  # one layer with a window and one without, soft caps in attention and head
        model = Gemma2ForCausalLM(
            Gemma2Config(**_SIZES | {"sliding_window": 5, "query_pre_attn_scalar": 8} | sizes)
        )
    elif kind == "gpt_oss":  # sinks, and the same layers
        model = GptOssForCausalLM(
            GptOssConfig(
                **_SIZES
                | {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2}
                | sizes
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**_SIZES | {"tie_word_embeddings": True} | sizes))
    for name, p in model.named_parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.25)
        elif name.endswith(".sinks"):
            torch.nn.init.normal_(p, std=1.5)
    model.set_attn_implementation(NAME)
    return model.eval()


def trajectory(
    group: int, sample: int, prompt: Sequence[int], completion: Sequence[int], **fields: Any
) -> Trajectory:
    """A trajectory of random behaviour log-probs, all of its completion sampled unless `sampled`
    says otherwise.
    """
    rng = random.Random(f"{group}/{sample}")
    sampled: Sequence[bool] = fields.pop("sampled", [True] * len(completion))
    reward = fields.pop("reward", rng.choice([0.0, 0.25, 1.0]))
    return from_mask(
        f"task-{group}",
        sample,
        [*prompt, *completion],
        len(prompt),
        [False] * len(prompt) + list(sampled),
        logp=[0.0] * len(prompt) + [-rng.uniform(1.5, 5.0) if s else 0.0 for s in sampled],
        reward=Reward(reward),
        **fields,
    )


def ragged_groups(
    seed: int = 0, groups: int = 3, samples: int = 4, longest: int = 14
) -> list[Group]:
    """Groups of unlike prompts: one of one token, one completion of one token, and tool output
    inside some completions.
    """
    rng = random.Random(seed)
    made = []
    for g in range(groups):
        prompt = [rng.randrange(VOCABULARY) for _ in range(1 if g == 0 else rng.randint(2, 9))]
        trajectories = []
        for k in range(samples):
            n = 1 if k == 0 else rng.randint(2, longest)
            sampled = [True] * n
            if k % 2 and n > 3:
                sampled[1 : n - 1] = [rng.random() < 0.5 for _ in range(n - 2)]
            reward = float(k % 3 == g % 3)  # no group is degenerate
            trajectories.append(
                trajectory(
                    g,
                    k,
                    prompt,
                    [rng.randrange(VOCABULARY) for _ in range(n)],
                    sampled=sampled,
                    reward=reward,
                )
            )
        made.append(Group(Task(f"task-{g}", "?"), trajectories))
    return made


def grpo(
    aggregation: str = "sequence", beta: float = 0.0, kl: str = "k3", kl_in: str = "loss"
) -> Composed:
    """GRPO with a band so wide that few tokens are clipped."""
    return Composed(
        replace(
            ZOO["grpo"],
            clip_low=0.9,
            clip_high=9.0,
            beta=beta,
            kl=kl,
            kl_in=kl_in,
            aggregation=aggregation,
        ),
        horizon=16,
    )


def ragged_batch(seed: int = 0, algorithm: Composed | None = None, **sizes: int) -> Batch:
    """A ragged batch with advantages, weights and made-up ref_logp."""
    batch = collate(ragged_groups(seed, **sizes))
    ref = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(seed)) - 3.0
    return (algorithm or grpo()).prepare(batch.with_(ref_logp=ref * batch.mask))


def settings(**values: Any) -> TrainerConfig:
    """Trainer settings with a gradient clip that never bites, unless given."""
    return TrainerConfig(**{"learning_rate": 1e-3, "grad_clip": 1e9} | values)


def make_trainer(model: PreTrainedModel, scoring: Scoring | None = None, **values: Any) -> Trainer:
    """A trainer on the model itself."""
    return Trainer(PolicyRoot(model), settings(**values), scoring or Scoring(), total_steps=10)


def step_gradient(
    model: PreTrainedModel, batch: Batch, loss: Loss, scoring: Scoring | None = None, **values: Any
) -> Tensor:
    """Gradient of one step of the trainer on a copy of the model, flat: AdamW's first moment after
    its first step is (1 - beta 1) times it.
    """
    trainer = make_trainer(copy.deepcopy(model), scoring, **values)
    metrics = trainer.train_step(batch, loss)
    assert metrics["train/skipped"] == 0.0, trainer.skip_reason
    state = trainer.optimizer.state
    return torch.cat([state[p]["exp_avg"].flatten() for p in trainer.model.parameters()]) / (
        1 - trainer.config.betas[0]
    )


def plain_logits(model: PreTrainedModel, batch: Batch, implementation: str = "eager") -> Tensor:
    """Logits [B, T, V] of an ordinary padded forward with the attention and masks of transformers
    itself.
    """
    model.set_attn_implementation(implementation)
    columns = torch.arange(batch.tokens.shape[1])
    real = columns < batch.lengths[:, None]
    logits = model(input_ids=batch.tokens, attention_mask=real.long(), use_cache=False).logits
    return torch.where(real[:, :, None], logits, 0.0)


def plain_logp(
    model: PreTrainedModel, batch: Batch, temperature: float = 1.0, implementation: str = "eager"
) -> Tensor:
    """Log-probs [B, T] by the full softmax, 0 where mask is False."""
    table = (plain_logits(model, batch, implementation).float() / temperature).log_softmax(-1)
    logp = table[:, :-1].gather(-1, batch.tokens[:, 1:, None])[:, :, 0]
    return torch.where(batch.mask, torch.nn.functional.pad(logp, (1, 0)), 0.0)


def plain_gradient(
    model: PreTrainedModel, batch: Batch, loss: Loss, temperature: float = 1.0
) -> Tensor:
    """Gradient of the loss on the whole batch through the plain forward, flat."""
    model = copy.deepcopy(model)
    loss(batch, plain_logp(model, batch, temperature)).loss.backward()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in the Euclidean norm."""
    return float((a - b).norm() / b.norm())


class Allocations(TorchDispatchMode):
    """Context that records the tensors which operations make, in forward and backward passes.

    Attributes:
        wide: entries of the largest tensor whose last dimension is `width`.
        peak: largest number of entries of such tensors that existed at the same time.
        peak_bytes: largest number of bytes of all recorded storages that existed at the same time.
    """

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.width = width
        self.wide = 0
        self.peak = 0
        self.peak_bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        wide = tensor.numel() if tensor.ndim and tensor.shape[-1] == self.width else 0
        self.wide = max(self.wide, wide)
        self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), wide)
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(v[2] for v in self._storages.values()))
        self.peak_bytes = max(self.peak_bytes, sum(v[1] for v in self._storages.values()))

    def live(self) -> int:
        return sum(nbytes for ref, nbytes, _ in self._storages.values() if not ref.expired())
