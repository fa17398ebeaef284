"""Settings of reward models: how a stage trains one, and how it scores as a reward."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .base import Device, Real, Section, knob


class RewardModelConfig(Section):
    """Training of a reward model on the comparisons that [comparisons] describes."""

    steps: int = knob(0, "number of steps", ge=0)
    epochs: int = knob(
        0, "passes over the comparisons, in place of reward_model.steps (0: steps decides)", ge=0
    )
    examples_per_step: int = knob(
        64, "comparisons per step: prompts, each with all of its completions", ge=1
    )
    member: int = knob(
        0,
        "number of this one among the reward models of an ensemble: each number is an order of the"
        " comparisons (arXiv:2310.02743)",
        ge=0,
    )
    loss: Literal["bradley_terry", "bce"] = knob(
        "bradley_terry",
        "bradley_terry: -log sigma(difference of scores) of every pair; bce: binary cross-entropy"
        " of each completion, whose grade is a label between 0 and 1",
    )
    head: Literal["last", "mean"] = knob(
        "last",
        "where the score is read: last (the last token of the completion, as transformers reads"
        " it), or mean (over all tokens of the completion)",
    )
    margin: bool = knob(
        False, "the difference of the grades of a pair is the margin of its loss (arXiv:2307.09288)"
    )
    centring: Real = knob(
        0.0,
        "weight of (r_w + r_l)^2, which holds scores around 0 (arXiv:2312.09244, which has 0.01; 0:"
        " off)",
        ge=0,
    )
    lm_weight: Real = knob(
        0.0,
        "weight of the cross-entropy of the better completions' tokens under the language head of"
        " the model that the stage starts from (arXiv:2406.10216; 0: off)",
        ge=0,
    )
    normalise: bool = knob(
        True,
        "store an offset and a scale that give held-out completions rewards of mean 0 and standard"
        " deviation 1",
    )
    length_debias: bool = knob(
        False,
        "rewards lose the part that the length explains among held-out completions of one prompt",
    )
    learning_rate: Real = knob(1e-5, "AdamW learning rate", gt=0)
    warmup_steps: int = knob(10, "steps over which the learning rate rises from 0", ge=0)
    weight_decay: Real = knob(0.0, "AdamW weight decay", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "cosine", "learning rate after the warm-up: constant, or a decay to 0 at the last step"
    )

    @model_validator(mode="after")
    def _read_by_the_loss(self) -> RewardModelConfig:
        """Refuse settings of pairs with a loss of single completions."""
        for name in ("margin", "centring"):
            if self.loss == "bce" and getattr(self, name):
                raise ValueError(
                    f"reward_model.{name} has no effect with reward_model.loss = 'bce', which has"
                    " no pairs. Remove it, or use 'bradley_terry'"
                )
        return self


class RewardScoringConfig(Section):
    """How the reward models among `environment.rewards` score."""

    device: Device = knob("auto", "device of the reward models")
    precision: Literal["float32", "bfloat16"] = knob("float32", "dtype of their weights")
    placement: Literal["inline", "worker"] = knob(
        "inline",
        "where they run: inline (in the process of the run), or worker (in one process of their"
        " own)",
    )
    timeout_s: Real = knob(
        180.0, "longest wait for the answer of a worker or a served reward model, in seconds", gt=0
    )
    retries: int = knob(5, "repetitions of a request to a served reward model that fails", ge=0)
    max_tokens: int = knob(16384, "most tokens that a reward model computes at once", ge=1)
    std_factor: Real = knob(
        0.0,
        "k of an ensemble of reward models, whose reward is mean - k * standard deviation"
        " (arXiv:2310.02743; 0: the mean)",
        ge=0,
    )
    limit: Real = knob(
        0.0, "bound of the reward: values are cut to -limit and limit (0: no bound)", ge=0
    )
