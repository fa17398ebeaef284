"""Settings of the trainer and of the supervised warm-up."""

from __future__ import annotations

from typing import Literal

from .base import Decay, Real, Section, knob


class TrainerConfig(Section):
    """The optimizer, the learning rate schedule and the micro-batches."""

    learning_rate: Real = knob(1e-6, "AdamW learning rate", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "constant", "learning rate after the warm-up: constant, or a decay to 0 at the last update"
    )
    warmup_steps: int = knob(0, "updates over which the learning rate rises from 0", ge=0)
    betas: tuple[Decay, Decay] = knob(
        (0.9, 0.95),
        "betas of AdamW; with 0.95, the second moment forgets a gradient spike in about 20 steps",
    )
    epsilon: Real = knob(1e-8, "epsilon of AdamW", gt=0)
    weight_decay: Real = knob(
        0.0,
        "AdamW weight decay; 0 for RL, because decay causes drift that the KL does not show",
        ge=0,
    )
    grad_clip: Real = knob(
        1.0, "maximum norm of the gradient; larger gradients are scaled down", gt=0
    )
    max_tokens_per_microbatch: int = knob(
        4096, "maximum number of tokens per forward and backward pass", ge=16
    )
    logprob_chunk: int = knob(
        1024, "number of positions whose logits are in memory at the same time", ge=16
    )
    activation_checkpointing: Literal["none", "selective", "full"] = knob(
        "none", "recompute activations in the backward pass to save memory"
    )
    activation_offload: bool = knob(
        False,
        "keep activations in host memory until the backward pass; with full checkpointing, only"
        " those of one layer are on the GPU",
    )
    weights: Literal["float32", "bfloat16"] = knob(
        "float32",
        "dtype of the trained weight matrices; bfloat16 takes 2 instead of 4 bytes per parameter"
        " and lets the engine use the same weights; needs run.precision = 'bfloat16'",
    )
    rounding: Literal["master", "stochastic"] = knob(
        "master",
        "how bfloat16 weights are updated: master (in float32 copies, the master weights, 4 bytes"
        " per parameter), stochastic (by random rounding, without copies)",
    )
    optimizer: Literal["adamw", "adamw8bit"] = knob(
        "adamw",
        "adamw, or adamw8bit: AdamW with moments in 2 instead of 8 bytes per parameter (needs"
        " torchao)",
    )
    offload: Literal["none", "optimizer"] = knob(
        "none",
        "optimizer: keep moments and master weights in host memory and update there (saves 8 to 12"
        " bytes per parameter on the GPU)",
    )
    share_prefix: bool = knob(
        True, "compute a prompt once for all its completions, in the forward and backward pass"
    )
    max_skipped_steps: int = knob(
        3,
        "number of consecutive updates with NaN or infinite gradients after which the run stops",
        ge=1,
    )

    @property
    def plain_optimizer(self) -> bool:
        """True for AdamW with all state in float32 on the device of the weights."""
        return (self.weights, self.optimizer, self.offload) == ("float32", "adamw", "none")


class SftConfig(Section):
    """Supervised training on worked solutions and conversations, by the same trainer."""

    steps: int = knob(0, "maximum number of SFT steps before RL (0: no SFT)", ge=0)
    epochs: int = knob(
        0,
        "passes of a stage of kind sft over its examples, in place of sft.steps (0: sft.steps"
        " decides)",
        ge=0,
    )
    examples_per_step: int = knob(64, "worked solutions per SFT step", ge=1)
    tasks: int = knob(
        0, "number of tasks whose solutions SFT learns from, drawn at random (0: all)", ge=0
    )
    learning_rate: Real = knob(1e-3, "AdamW learning rate", gt=0)
    warmup_steps: int = knob(10, "steps over which the learning rate rises from 0", ge=0)
    weight_decay: Real = knob(0.1, "AdamW weight decay", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "constant", "learning rate after the warm-up: constant, or a decay to 0 at the last step"
    )
    neftune_alpha: Real = knob(
        0.0, "noise on the token embeddings in training (NEFTune, arXiv:2310.05914; 0: none)", ge=0
    )
    form: Literal["auto", "tasks", "messages", "conversations", "prompt_completion", "alpaca"] = (
        knob(
            "auto",
            "what a stage of kind sft imitates: tasks (worked solutions, data.trace_field),"
            " messages (OpenAI's), conversations (ShareGPT's), prompt_completion (two texts, or two"
            " lists of messages), alpaca (instruction, input, output), or auto (tasks if"
            " data.trace_field is set or they are generated, otherwise by the columns)",
        )
    )
    train_on: Literal["assistant", "last", "all"] = knob(
        "assistant",
        "tokens of a conversation that are trained: assistant (every reply), last (the last reply),"
        " or all (every token but the first)",
    )
    max_tokens: int = knob(
        0,
        "longest conversation in tokens (0: the model's context); data.overlong says what happens"
        " to a longer one",
        ge=0,
    )
    stop_at_accuracy: Real = knob(
        0.0,
        "end SFT when this share of a probe set is solved greedily, separately for each source"
        " (0: run all steps)",
        ge=0,
        le=1,
    )
