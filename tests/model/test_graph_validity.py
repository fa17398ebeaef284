"""Fingerprints of models for CUDA graphs: which models have one, and what changes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.conftest import make_tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from sixfold.model.attention import NAME
from sixfold.model.causal_lm import CausalLM
from sixfold.model.graph_validity import GraphFingerprint

X = torch.arange(3.0)


@torch.library.custom_op("sixfold_tests::seeded", mutates_args=())
def seeded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A result and a number of the host, as attention in float32 returns them on a GPU."""
    return x.clone(), torch.zeros(())


seeded.register_fake(lambda x: (torch.empty_like(x), torch.zeros(())))

CAPTURED: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: (X.max() + 1) * torch.arange(3, device=X.device).float() @ X,
    "a constant of the host": lambda: X * torch.tensor(3.0),
    "a choice on the device": lambda: torch.where(X > 1, X, 0.0),
    "a number of the host beside the result": lambda: seeded(torch.empty(2, device="meta")),
    "a new tensor": lambda: torch.zeros(3).index_copy_(0, torch.arange(3), X),
}
ON_HOST: dict[str, Callable[[], object]] = {
    "item": lambda: (X.sum() > 2).item(),
    "if": lambda: X if X.max() > 2 else -X,
    "int": lambda: int(X.max()),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 1],
    "where": lambda: torch.where(X > 1),
    "repeat": lambda: torch.repeat_interleave(X, X.long()),
    "equal": lambda: torch.equal(X, X),
    "to another device": lambda: X.to("meta"),
    "a number to another device": lambda: X.max().to("meta"),
    "copied to another device": lambda: torch.empty(3, device="meta").copy_(X),
    # What `torch.tensor([1.0], device="cuda")` shows of itself; on the meta device it shows
    # nothing.
    "made of the host's numbers": lambda: torch.ops.aten.lift_fresh(torch.empty(1, device="meta")),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", [*CAPTURED, *ON_HOST])
def test_reads_by_the_host_are_detected(what: str, inference: bool) -> None:
    """In inference mode too, where the engine asks."""
    with torch.inference_mode(inference):
        fingerprint = GraphFingerprint(nn.Linear(1, 1), {**CAPTURED, **ON_HOST}[what]).current()
    assert (fingerprint is not None) == (what in CAPTURED)


@pytest.fixture
def model() -> PreTrainedModel:
    made = make_tiny("qwen3")
    made.set_attn_implementation(NAME)
    return made


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3_text", "gpt2", "qwen3_moe"])
def test_dense_models_have_a_fingerprint(name: str, tiny: Callable[[str], PreTrainedModel]) -> None:
    """Experts are looked up on the host."""
    with torch.inference_mode():
        assert (CausalLM(tiny(name)).graph_fingerprint() is not None) == (name != "qwen3_moe")


def test_fingerprint_stays_while_values_change(model: PreTrainedModel) -> None:
    lm = CausalLM(model)
    before = lm.graph_fingerprint()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert before is not None and lm.graph_fingerprint() == before
    handle = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert lm.graph_fingerprint() is None
    handle.remove()
    assert lm.graph_fingerprint() == before


def _moved(model: PreTrainedModel) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.clone()


def _replaced(model: PreTrainedModel) -> None:
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())


def _seen_otherwise(model: PreTrainedModel) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.view(
        torch.bfloat16
    )  # in the same place


def _buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


def _part(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


@pytest.mark.parametrize("change", [_moved, _replaced, _seen_otherwise, _buffer, _part])
def test_fingerprint_changes_when_a_tensor_moves(
    change: Callable[[PreTrainedModel], None], model: PreTrainedModel
) -> None:
    lm = CausalLM(model)
    before = lm.graph_fingerprint()
    change(model)
    after = lm.graph_fingerprint()
    assert before is not None and after not in (None, before) and after == lm.graph_fingerprint()


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


def test_a_new_part_is_looked_at(model: PreTrainedModel) -> None:
    lm = CausalLM(model)
    assert lm.graph_fingerprint() is not None
    model.model.layers[0].mlp.act_fn = Asks()
    assert lm.graph_fingerprint() is None
    model.model.layers[0].mlp.act_fn = nn.SiLU()
    assert lm.graph_fingerprint() is not None
