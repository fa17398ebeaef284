"""The whole loop in one file: GRPO teaches a tiny Qwen3 to add, from nothing, with torch and
transformers alone.

    python recipes/minimal/grpo.py --steps 400

Read it top to bottom. Each part names the package of `src/sixfold/` that does the same for real
models and tasks. A test (`tests/recipes/test_minimal.py`) gives both the same trajectories and
compares losses and weights.

One step, eight verbs, and what flows between them:

    tasks -> rollout -> verify -> reference -> advantages -> loss -> backward -> optimizer step
             tokens     reward    ref_logp     [B]           scalar
             mask
             logp

A step has B trajectories, padded on the right to T tokens. In every [B, T] tensor, index t belongs
to token t, not to the prediction of the next token. No logits predict token 0, so it is never
scored.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    steps: int = 400
    prompts_per_step: int = 16
    samples_per_prompt: int = 8  # K, the size of a group
    max_new_tokens: int = 2  # a digit and the end of the sequence
    temperature: float = 1.0
    learning_rate: float = 1e-3
    clip: float = 0.2
    beta: float = 0.0  # weight of the KL to the reference; 0 keeps no reference
    seed: int = 0


# ---------------------------------------------------------------- the model: sixfold/model

ALPHABET = "0123456789+="
PAD, EOS = 0, 1
VOCABULARY = 2 + len(ALPHABET)


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character."""
    return [2 + ALPHABET.index(character) for character in text]


def decode(ids: list[int]) -> str:
    """Text of token ids. Padding and the end of the sequence have no text."""
    return "".join(ALPHABET[i - 2] for i in ids if i >= 2)


def make_model(seed: int = 0) -> nn.Module:
    """A Qwen3 with 76 thousand parameters, initialised from `seed`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# ---------------------------------------------------------------- tasks and verifier:
# sixfold/environment


@dataclass(frozen=True)
class Task:
    """A sum. All prompts have the same length, so a batch needs no padding on the left."""

    prompt: str
    answer: str


def draw_task(rng: random.Random) -> Task:
    """A sum of two numbers below 5: the answer is one digit."""
    a, b = rng.randrange(5), rng.randrange(5)
    return Task(f"{a}+{b}=", str(a + b))


def verify(completion: str, task: Task) -> float:
    """Reward: 1 for the exact answer, at most 1/2 for another number (the nearer the more), else 0.

    A reward of only 0 or 1 would not do: an untrained model is hardly ever right, and a group with
    equal rewards gives no gradient. The factor 1/2 matters: without it "03" would earn as much as
    "3", and some seeds learn to write that.
    """
    if completion == task.answer:
        return 1.0
    return 0.5 / (1 + abs(int(completion) - int(task.answer))) if completion.isdigit() else 0.0


# ---------------------------------------------------------------- rollout: sixfold/rollout,
# sixfold/engine


@dataclass(frozen=True)
class Trajectories:
    """Samples of a step: B = prompts * K rows, group after group.

    Attributes:
        tokens: [B, T] prompt, completion, padding.
        mask: [B, T] True for tokens that the policy sampled, including the end of the sequence.
        logp: [B, T] log-prob under the distribution that sampled the token, 0 off the mask.
        rewards: [B].
        groups: [B] index of the task.
    """

    tokens: Tensor
    mask: Tensor
    logp: Tensor
    rewards: Tensor
    groups: Tensor


@torch.no_grad()
def sample(
    model: nn.Module, prompts: Tensor, settings: Settings, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a completion of each prompt [B, P], token by token with a KV cache.

    Returns:
        tokens, mask and logp, each [B, T].
    """
    tokens, mask = prompts, torch.zeros_like(prompts, dtype=torch.bool)
    logp = torch.zeros_like(prompts, dtype=torch.float32)
    alive = torch.ones(len(prompts), dtype=torch.bool)
    fresh, cache = prompts, None
    for _ in range(settings.max_new_tokens):
        out = model(input_ids=fresh, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logprobs = (out.logits[:, -1] / settings.temperature).log_softmax(-1)
        fresh = torch.multinomial(logprobs.exp(), 1, generator=generator)
        taken = logprobs.gather(-1, fresh)
        # A row that has ended stays in the batch. Its further tokens are padding, never scored.
        fresh = fresh.where(alive[:, None], PAD)
        tokens = torch.cat([tokens, fresh], 1)
        mask = torch.cat([mask, alive[:, None]], 1)
        logp = torch.cat([logp, taken.where(alive[:, None], 0.0)], 1)
        alive = alive & (fresh[:, 0] != EOS)
        if not alive.any():
            break
    return tokens, mask, logp


def rollout(
    model: nn.Module, tasks: list[Task], settings: Settings, generator: torch.Generator
) -> Trajectories:
    """Sample and verify K completions of every task."""
    rows = [task for task in tasks for _ in range(settings.samples_per_prompt)]
    tokens, mask, logp = sample(
        model, torch.tensor([encode(task.prompt) for task in rows]), settings, generator
    )
    completions = [decode(ids[sampled].tolist()) for ids, sampled in zip(tokens, mask, strict=True)]
    rewards = torch.tensor(
        [verify(text, task) for text, task in zip(completions, rows, strict=True)]
    )
    groups = torch.arange(len(tasks)).repeat_interleave(settings.samples_per_prompt)
    return Trajectories(tokens, mask, logp, rewards, groups)


# ---------------------------------------------------------------- log-probs of given tokens:
# sixfold/trainer, sixfold/reference


def token_logp(model: nn.Module, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of every token given those before it, [B, T] -> [B, T]; index 0 is 0.

    No attention mask is needed: attention is causal and padding is on the right, where no sampled
    token sees it.
    """
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1] / temperature
    predicted = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return F.pad(predicted, (1, 0))


# ---------------------------------------------------------------- the algorithm: sixfold/algorithm


def group_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = (r_i - mean) / (std + 1e-6) over the group of trajectory i, with population std.

    [B], [B] -> [B]. With equal rewards the advantages are 0, not rounding noise divided by 1e-6.
    """
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        members = groups == group
        r = rewards[members]
        if r.max() > r.min():
            advantages[members] = (r - r.mean()) / (r.std(correction=0) + 1e-6)
    return advantages


def sequence_weights(mask: Tensor) -> Tensor:
    """Weights [B, T] of token losses: mean over a sequence's sampled tokens, then over sequences.

    The loss is the weighted sum, so any split of the rows into micro-batches gives the same
    gradient.
    """
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) / len(mask)


def clipped_surrogate(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A) per token, rho = exp(logp - old_logp) (PPO,
    https://arxiv.org/abs/1707.06347).
    """
    ratio = (logp - old_logp).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Estimate of KL(policy, reference) per token: exp(-r) + r - 1 with r = logp - ref_logp.

    Never negative, and 0 where both are equal.
    """
    r = logp - ref_logp
    return (-r).exp() + r - 1


def step_loss(
    model: nn.Module,
    tokens: Tensor,
    mask: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor | None,
    rewards: Tensor,
    groups: Tensor,
    beta: float,
    clip: float,
    temperature: float = 1.0,
) -> Tensor:
    """GRPO loss (https://arxiv.org/abs/2402.03300) of a step's trajectories, a scalar.

    tokens, mask, old_logp and ref_logp are [B, T]; rewards and groups are [B].
    """
    # Tokens off the mask have weight 0, but exp(-r) of an unlikely one overflows, and 0 * inf is
    # NaN. So their log-probs are set to 0.
    logp = token_logp(model, tokens, temperature).where(mask, 0.0)
    loss = clipped_surrogate(logp, old_logp, group_advantages(rewards, groups)[:, None], clip)
    if ref_logp is not None:
        loss = loss + beta * k3(logp, ref_logp)
    return (sequence_weights(mask) * loss).sum()


# ---------------------------------------------------------------- the loop: sixfold/controller

Report = Callable[[int, Trajectories, float], None]


def train(
    model: nn.Module,
    settings: Settings,
    given: Callable[[int], Trajectories] | None = None,
    report: Report = lambda step, trajectories, loss: None,
) -> list[float]:
    """Train `model` in place. Returns the loss of each step.

    If `given` is set, the trajectories of a step are `given(step)` instead of a rollout.
    """
    rng, generator = random.Random(settings.seed), torch.Generator().manual_seed(settings.seed)
    reference = copy.deepcopy(model).requires_grad_(False) if settings.beta > 0 else None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for step in range(settings.steps):
        if given is None:
            tasks = [draw_task(rng) for _ in range(settings.prompts_per_step)]
            batch = rollout(model, tasks, settings, generator)
        else:
            batch = given(step)
        with torch.no_grad():
            ref_logp = (
                None
                if reference is None
                else token_logp(reference, batch.tokens, settings.temperature)
            )
        loss = step_loss(
            model,
            batch.tokens,
            batch.mask,
            batch.logp,
            ref_logp,
            batch.rewards,
            batch.groups,
            settings.beta,
            settings.clip,
            settings.temperature,
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # The sampler reads the same weights, so the next rollout is on-policy without a copy:
        # sixfold/sync.
        optimizer.step()
        losses.append(loss.item())
        report(step, batch, losses[-1])
    return losses


def print_step(step: int, trajectories: Trajectories, loss: float) -> None:
    """Print one line per step: the share of right answers, the loss and one sample.

    The loss shows no progress: with one optimizer step per rollout every ratio is 1, and advantages
    sum to 0. So without a KL term the loss is 0, but its gradient is not.
    """
    right = (trajectories.rewards == 1.0).float().mean().item()
    print(
        f"step {step:4d}   right {right:6.1%}   loss {loss:+.4f}  "
        f" {decode(trajectories.tokens[0].tolist())}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file: a tiny model learns to add.")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument(
        "--beta", type=float, default=Settings.beta, help="weight of the KL to the starting model"
    )
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    options = parser.parse_args()
    settings = Settings(**vars(options))
    train(make_model(settings.seed), settings, report=print_step)


if __name__ == "__main__":
    main()
