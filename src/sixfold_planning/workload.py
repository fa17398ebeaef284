"""Work of one step."""

from __future__ import annotations

from dataclasses import dataclass

from sixfold.errors import UserError

from . import checks


@dataclass(frozen=True)
class Workload:
    """Work of one step.

    Attributes:
        prompt_tokens: mean length of a prompt.
        mean_tokens: mean length of a completion.
        longest_tokens: bound of the length of a completion.
        packed: tokens per micro-batch of one trainer rank.
        recompute: activation checkpointing: "none", "selective" or "full".
        adapters: train adapters (LoRA) only.
        shared_prompt: the trainer computes a prompt once for all of its samples.
        reference: score a reference model.
        critic: train a critic of the policy's size.
        shared_weights: sampler and trainer of one device share one set of weights: no sync.
        sent_width: bytes per parameter that a weight sync sends: 2, or 1 for FP8 and int8.
        epochs: passes of the trainer over the samples of a step.
        proximal: score the policy itself before its first update (proximal log-probs).
    """

    prompts: int
    samples: int
    prompt_tokens: float
    mean_tokens: float
    longest_tokens: float
    packed: float
    recompute: str
    adapters: bool
    shared_prompt: bool
    reference: bool
    critic: bool
    shared_weights: bool
    sent_width: float = 2.0
    epochs: int = 1
    proximal: bool = False

    def __post_init__(self) -> None:
        checks.whole(prompts=self.prompts, samples=self.samples, epochs=self.epochs)
        checks.positive(
            prompt_tokens=self.prompt_tokens,
            mean_tokens=self.mean_tokens,
            longest_tokens=self.longest_tokens,
            packed=self.packed,
            sent_width=self.sent_width,
        )
        if self.mean_tokens > self.longest_tokens:
            raise UserError(
                f"the mean length of completions ({self.mean_tokens:g} tokens) is above their bound"
                f" of {self.longest_tokens:g}. Lower the mean, or raise the bound"
            )

    @property
    def sequences(self) -> int:
        """Trajectories per step."""
        return self.prompts * self.samples

    @property
    def trained(self) -> float:
        """Tokens per trajectory in the trainer's forward pass."""
        return self.mean_tokens + self.prompt_tokens / (self.samples if self.shared_prompt else 1)
