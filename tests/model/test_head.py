"""The output head under autocast: factors rounded to bfloat16, results in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sixfold.model.head
from sixfold.model.head import head_product

torch.set_num_threads(1)


@pytest.fixture(params=["upcast", "wide kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute it; the kernel is CUDA's, so its sum is written out here."""
    if request.param == "wide kernel":
        monkeypatch.setattr(sixfold.model.head, "wide_products", lambda device: True)
        monkeypatch.setattr(sixfold.model.head, "wide_mm", lambda a, b: a.float() @ b.float())
    return str(request.param)


def case(bias: bool) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(32, 50, bias=bias)
    with torch.no_grad():
        head.weight.mul_(40)
    return head, torch.randn(7, 32, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_not_rounded(path: str, bias: bool) -> None:
    """Oracle: the exact sum in float64 of factors that are rounded to bfloat16."""
    head, hidden = case(bias)
    with torch.autocast("cpu", torch.bfloat16):
        logits, rounded = head_product(head, hidden), head(hidden)
    exact = hidden.bfloat16().double() @ head.weight.bfloat16().double().T
    exact = exact + head.bias.double() if bias else exact
    assert logits.dtype == torch.float32 and exact.abs().max() > 16
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-4)
    assert (rounded.double() - exact).abs().max() > 0.03, "autocast alone rounds the logits"


def test_gradients_are_those_of_the_product(path: str) -> None:
    head, hidden = case(bias=True)
    of_logits = torch.randn(7, 50)
    with torch.autocast("cpu", torch.bfloat16):
        head_product(head, hidden).backward(of_logits)
    tolerance = dict(rtol=0.02, atol=0.5)
    torch.testing.assert_close(hidden.grad, of_logits @ head.weight.detach(), **tolerance)
    torch.testing.assert_close(head.weight.grad, of_logits.T @ hidden.detach(), **tolerance)
    torch.testing.assert_close(head.bias.grad, of_logits.sum(0), rtol=1e-3, atol=1e-3)


def test_without_autocast_the_head_is_called_as_it_is() -> None:
    head, hidden = case(bias=True)
    assert torch.equal(head_product(head, hidden), head(hidden))


def test_a_head_with_a_hook_is_called_as_it_is() -> None:
    head, hidden = case(bias=False)
    head.register_forward_hook(lambda module, inputs, output: output + 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head_product(head, hidden), head(hidden).float())
