"""Kernel launches of training on a GPU: which attention kernel a model gets, and how many launches
a layer costs. A host needs about 5 microseconds per launch, so launches that grow with the
sequences of a packed row would leave the GPU idle.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fused_kernels import register_gpu
from phantom import count_launches
from tests.trainer.tiny import grpo, make_trainer, ragged_batch, tiny_model

from sixfold.kernels.norms import fuse_norms
from sixfold.trainer.logprobs import Scoring

DEVICE = register_gpu()
BF16 = torch.bfloat16

ATTENTION = {
    "flash": ("_flash_attention_forward", "_flash_attention_backward"),
    "efficient": ("_efficient_attention_forward", "_efficient_attention_backward"),
}
# Model and precision -> the kernel of each of its two kinds of layers.
KERNELS = {
    ("qwen3", BF16): ("flash", "flash"),
    ("qwen3", None): ("efficient", "efficient"),
    ("mistral", BF16): ("flash", "flash"),  # window
    ("mistral", None): ("chunked", "chunked"),  # window in float32
    ("gemma2", BF16): ("chunked", "chunked"),  # soft cap
    ("gpt_oss", BF16): ("chunked", "chunked"),  # sinks
    ("gpt2", BF16): ("flash", "flash"),
}


def launches(
    kind: str,
    autocast: torch.dtype | None,
    groups: int = 2,
    samples: int = 3,
    mode: str = "none",
    **sizes: int,
) -> Counter[str]:
    """Count the launches of one forward and backward pass over one packed row."""
    model, algorithm = tiny_model(kind, **sizes).to(DEVICE), grpo()
    fuse_norms(model)
    batch = ragged_batch(1, algorithm, groups=groups, samples=samples).to(DEVICE)
    trainer = make_trainer(model, Scoring(autocast=autocast), activation_checkpointing=mode)
    rows = list(range(len(batch.tokens)))
    with count_launches() as counts:
        trainer._accumulate(batch, [rows], algorithm.compute_loss)
    return counts


def of_a_layer(kind: str, autocast: torch.dtype | None, groups: int, samples: int) -> Counter[str]:
    """Count the launches that two more layers add."""
    few, many = (
        launches(kind, autocast, groups, samples, num_hidden_layers=layers) for layers in (2, 4)
    )
    many.subtract(few)
    return many


@pytest.mark.parametrize(("model", "kernels"), KERNELS.items())
def test_kernel_of_each_model(
    model: tuple[str, torch.dtype | None], kernels: tuple[str, str]
) -> None:
    counts = launches(*model)
    for kernel, names in ATTENTION.items():
        for name in names:
            assert counts[name] == kernels.count(kernel), counts


@pytest.mark.parametrize(("mode", "forwards"), [("selective", 1), ("full", 2)])
def test_checkpointing_computes_attention_again_only_if_full(mode: str, forwards: int) -> None:
    counts = launches("qwen3", BF16, mode=mode, num_hidden_layers=2)
    assert counts["_flash_attention_forward"] == 2 * forwards
    assert counts["_flash_attention_backward"] == 2


# Per layer, 42 of these are operations of its two norms, which take two launches on CUDA.
BUDGETS = {("qwen3", BF16): 220, ("qwen3", None): 185, ("mistral", BF16): 178}


@pytest.mark.parametrize(("model", "budget"), BUDGETS.items())
def test_launches_of_a_layer_do_not_grow(
    model: tuple[str, torch.dtype | None], budget: int
) -> None:
    """The launches grow neither with the number of sequences of a row nor with their lengths."""
    few, many = of_a_layer(*model, 1, 2), of_a_layer(*model, 4, 5)
    assert many == few, many - few
    assert few.total() <= 2 * budget, few.most_common()


def test_an_optimizer_step_is_one_kernel_for_all_parameters() -> None:
    algorithm = grpo()
    trainer = make_trainer(tiny_model(num_hidden_layers=4).to(DEVICE))
    batch = ragged_batch(1, algorithm).to(DEVICE)
    trainer.train_step(batch, algorithm.compute_loss)
    with count_launches() as counts:
        trainer.train_step(batch, algorithm.compute_loss)
    assert counts["_fused_adamw_"] == 1
    assert not counts["addcdiv_"] + counts["lerp_"] + counts["sqrt"], counts
