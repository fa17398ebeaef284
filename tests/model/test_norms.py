"""The exchanged norm against the module's own: the same bits forward, the same gradient, and only
where it is the same function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.conftest import make_tiny
from torch import nn
from torch.autograd import gradcheck
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sixfold.kernels.norms import RMSNorm, fuse_norms


def norm_pair(dimension: int) -> tuple[nn.Module, nn.Module]:
    """A norm of transformers' with a random weight, and its copy with our forward."""
    theirs = Qwen3RMSNorm(dimension, eps=1e-3)
    torch.nn.init.normal_(theirs.weight, generator=torch.Generator().manual_seed(1))
    ours = copy.deepcopy(theirs)
    fuse_norms(ours)  # type: ignore[arg-type]
    assert "forward" in vars(ours)
    return theirs, ours


@pytest.mark.parametrize("transposed", [False, True])
def test_forward_is_the_modules_own_and_so_is_the_gradient(transposed: bool) -> None:
    theirs, ours = norm_pair(64)
    x, grad = torch.randn(2, 1, 50, 4, 64, generator=torch.Generator().manual_seed(2))
    grad = (
        grad.transpose(1, 2).contiguous().transpose(1, 2) if transposed else grad
    )  # as attention gives it back
    results = []
    for module in (theirs, ours):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(grad)
        results.append((out.detach(), leaf.grad, module.weight.grad))
    assert torch.equal(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][1:], results[0][1:], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(ours(x), results[0][0])


def test_gradient_in_double_precision_is_the_difference_quotient() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = (
        torch.randn(5, 3, 7, dtype=torch.float64, generator=generator),
        torch.randn(7, dtype=torch.float64, generator=generator),
    )
    assert gradcheck(
        lambda a, b: RMSNorm.apply(a, b, 0.1), (x.requires_grad_(), weight.requires_grad_())
    )


def test_bfloat16_is_left_to_the_module() -> None:
    theirs, ours = norm_pair(64)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(ours(x), theirs(x)) and ours(x).dtype == theirs(x).dtype


@pytest.mark.parametrize(
    ("name", "fused"),
    [("qwen3", 9), ("llama", 5), ("qwen3_moe", 9), ("gemma", 0), ("gemma3_text", 0), ("gpt2", 0)],
)
def test_norm_is_replaced_only_by_an_equal_function(name: str, fused: int) -> None:
    """Two layers: two norms each (Qwen 3: two more, on queries and keys) and a last one. Gemma's
    are 1 + weight, GPT-2's are LayerNorm.
    """
    model = make_tiny(name)
    fuse_norms(model)
    assert sum("forward" in vars(m) for m in model.modules()) == fused


class ShiftedNorm(Qwen3RMSNorm):
    """Named and built as a plain one, but 1 + weight."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + super().forward(hidden_states) / self.weight


def test_a_norm_that_only_looks_plain_keeps_its_forward() -> None:
    model = nn.ModuleList([Qwen3RMSNorm(8), ShiftedNorm(8)])
    fuse_norms(model)  # type: ignore[arg-type]
    assert ["forward" in vars(norm) for norm in model] == [True, False]


def test_a_copy_of_the_model_runs_its_own_weights(tiny: Callable[[str], PreTrainedModel]) -> None:
    """A frozen reference is such a copy: a norm still bound to the original would follow the
    policy.
    """
    twin = copy.deepcopy(tiny("qwen3"))
    x = torch.ones(1, 64)
    with torch.no_grad():
        before = tiny("qwen3").model.norm(x)
        twin.model.norm.weight.zero_()
        assert not twin.model.norm(x).any()
        assert torch.equal(tiny("qwen3").model.norm(x), before)


class Gated(Qwen3RMSNorm):
    """A norm that takes a gate too, as linear attention has."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * gate  # type: ignore[no-any-return]


def test_a_norm_that_takes_more_than_its_input_is_left_alone() -> None:
    norm = Gated(8, eps=1e-3)
    fuse_norms(norm)  # type: ignore[arg-type]
    assert "forward" not in vars(norm)
