"""NF4 weights against a slow version and torchao; modules with them in trainer and engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.test_trained_lora import (
    TOKENS,
    batch,
    engine_of,
    logp,
    loss,
    moved,
    sampled,
    trainers_logp,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from sixfold.errors import UserError
from sixfold.model import nf4
from sixfold.model.lora import read_adapter
from sixfold.model.merge import merge_into
from sixfold.model.nf4 import VALUES, Nf4Linear, from_nf4, round_to_nf4, store_in_nf4, to_nf4
from sixfold.model.trained_lora import TrainedLora, add_lora, lower_base
from sixfold.recipe.adapter_folder import Base, base_of
from sixfold.recipe.schema import LoraConfig, TrainerConfig
from sixfold.reference.frozen import FrozenReference
from sixfold.sync.adapter import AdapterSync
from sixfold.sync.sync import SyncError
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer

Tiny = Callable[[str], PreTrainedModel]


def values_of(weight: Tensor) -> Tensor:
    return from_nf4(*to_nf4(weight), (weight.shape[0], weight.shape[1]), torch.float32)


def slowly(weight: Tensor) -> Tensor:
    """Number by number: the nearest of the 16 values times the scale of the block."""
    found: list[float] = []
    numbers = weight.flatten().tolist()
    for first in range(0, len(numbers), 64):
        block = numbers[first : first + 64]
        largest = max(max(map(abs, block)), 2.0**-100)
        scale = float(torch.tensor(largest).bfloat16())
        found += [min((v * scale for v in VALUES), key=lambda v: abs(v - x)) for x in block]
    return torch.tensor(found).bfloat16().float().view(weight.shape)


def random(rows: int, columns: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=rng)
    weight *= torch.exp(3 * torch.randn(rows, 1, generator=rng))
    weight[seed % rows] = 0
    return weight


@given(st.integers(1, 9), st.integers(1, 90), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_every_number_is_the_nearest_value_of_its_block(rows: int, columns: int, seed: int) -> None:
    weight = random(rows, columns, seed)
    values = values_of(weight)
    assert torch.equal(values, slowly(weight))
    flat, given_flat = values.flatten().split(64), weight.flatten().split(64)
    for mine, exact in zip(flat, given_flat, strict=True):
        assert bool(((mine - exact).abs() <= 0.157 * exact.abs().max()).all())
    assert torch.equal(values_of(values), values), "storing the values again changed them"


def test_the_values_are_those_of_torchao() -> None:
    """Its scales are rounded to 8 bits and ours to bfloat16, so only the codes are compared.

    A few numbers are half-way between two values, and its values are rounded otherwise.
    """
    torchao = pytest.importorskip("torchao.quantization")
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    # Scales that bfloat16 holds exactly: else a number between two values may go either way.
    weight.view(-1, 64)[:, 0] = 8.0
    theirs = torchao.to_nf4(weight, 64, 256)
    codes, scales = to_nf4(weight)
    assert scales.tolist() == [8.0] * 256
    swapped = theirs.quantized_data >> 4 | (theirs.quantized_data & 15) << 4
    assert (codes == swapped.view(-1)).float().mean() > 0.999
    assert codes.nbytes + scales.nbytes == weight.numel() // 2 + weight.numel() // 64 * 2


def test_slices_change_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(50, 90, 1)
    whole = values_of(weight)
    monkeypatch.setattr(nf4, "SLICE", 256)
    assert torch.equal(values_of(weight), whole)


@pytest.mark.parametrize("lowered", [False, True])
def test_product_and_gradient_are_those_of_the_values(lowered: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 20)
    stored = Nf4Linear(plain)
    with torch.no_grad():
        plain.weight.copy_(values_of(plain.weight))
    for p in plain.parameters():
        p.requires_grad_(False)
    results = []
    for module in (plain, stored):
        x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            y = module(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def stored(tiny: Tiny, **changed: object) -> TrainedLora:
    """A trained adapter on a base in NF4."""
    model = copy.deepcopy(tiny("qwen3"))
    config = LoraConfig(rank=4, alpha=8.0, base="nf4", **changed)  # type: ignore[arg-type]
    store_in_nf4(model)
    return moved(add_lora(model, config, Base("base"), seed=3))


def rounded(tiny: Tiny) -> PreTrainedModel:
    """The plain model with the values of the stored one."""
    model = copy.deepcopy(tiny("qwen3"))
    round_to_nf4(model)
    return model


def test_trainer_reference_and_engine_read_the_same_values(tiny: Tiny) -> None:
    lora, plain = stored(tiny), rounded(tiny)
    assert torch.equal(logp(lora.base), logp(plain))
    assert (logp(plain) - logp(tiny("qwen3"))).abs().max() > 1e-3
    reference = FrozenReference(lora.base, Scoring(chunk=16), 64, True, base=lora.base)
    assert torch.equal(logp(reference.model), logp(plain))
    engine = engine_of(lora.base)
    AdapterSync(lora, engine).sync(1)
    tokens, logps, _ = sampled(engine)
    theirs = trainers_logp(lora.model, tokens)[len(TOKENS) - 1 :]
    assert (torch.tensor(logps) - theirs).abs().max() <= 1e-5
    merged = copy.deepcopy(plain)
    merge_into(merged, lora.adapter())
    assert (logp(merged) - logp(lora.model)).abs().max() <= 1e-5


def test_under_autocast_a_base_in_nf4_gives_the_bits_of_its_values(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("qwen3"))
    lower_base(model, "nf4")
    head = model.get_output_embeddings()
    assert head is not None and head.weight.dtype == torch.bfloat16 and type(head) is nn.Linear
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logp(model), logp(rounded(tiny)))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_gradients_equal_those_on_a_plain_base_with_the_values(tiny: Tiny, mode: str) -> None:
    lora = stored(tiny)
    plain = add_lora(rounded(tiny), lora.config, Base("base"), seed=3)
    moved(plain)
    for each in (lora, plain):
        config = TrainerConfig(max_tokens_per_microbatch=16, activation_checkpointing=mode)
        trainer = Trainer(PolicyRoot(each.model), config, Scoring(chunk=16), 1)
        trainer._accumulate(batch().with_host(), [[0, 1], [2, 3]], loss)
    for name, p in lora.weights().items():
        other = plain.weights()[name].grad
        assert p.grad is not None and other is not None and other.abs().max() > 0
        assert torch.equal(p.grad, other), name


def test_the_base_exists_once_in_four_bits(tiny: Tiny) -> None:
    lora = stored(tiny)
    linears = [m for m in lora.base.modules() if isinstance(m, Nf4Linear)]
    assert len(linears) == 2 * 7
    numbers = sum(m.in_features * m.out_features for m in linears)
    bits = 8 * sum(m.codes.nbytes + m.scales.nbytes for m in linears) / numbers
    assert bits == pytest.approx(4.25, rel=0.01)
    codes = {b.data_ptr() for n, b in lora.model.named_buffers() if n.endswith("codes")}
    assert codes == {m.codes.data_ptr() for m in linears}


def test_a_base_that_is_no_longer_shared_is_refused(tiny: Tiny) -> None:
    lora = stored(tiny)
    with pytest.raises(SyncError, match="no longer shared"):
        AdapterSync(lora, engine_of(copy.deepcopy(lora.base)))


def test_the_adapter_remembers_the_base_that_it_was_trained_on(tiny: Tiny, tmp_path: Path) -> None:
    """It continues on that base only, and is not added to one in full precision."""
    lora = stored(tiny)
    lora.save(tmp_path)
    assert json.loads((tmp_path / "base.json").read_text())["rounded"] == "nf4"
    assert base_of(str(tmp_path), "x").rounded == "nf4"
    model = copy.deepcopy(tiny("qwen3"))
    with pytest.raises(UserError, match=r"nf4.*sixfold export .* --merge"):
        read_adapter(str(tmp_path), model)
    config = lora.config.model_copy(update={"base": "bfloat16"})
    with pytest.raises(UserError, match=r"model.lora.base = 'bfloat16'.*'nf4'"):
        add_lora(model, config, Base("b"), 9, str(tmp_path))
    store_in_nf4(model)
    again = add_lora(model, lora.config, Base("b"), 9, str(tmp_path))
    assert torch.equal(logp(again.model), logp(lora.model))


def test_a_router_that_is_a_kind_of_linear_module_stays(tiny: Tiny) -> None:
    class Router(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            logits = super().forward(x)
            return logits, logits.argmax(-1)

    model = copy.deepcopy(tiny("qwen3"))
    model.model.layers[0].mlp.gate = Router(8, 4)
    store_in_nf4(model)
    assert type(model.model.layers[0].mlp.gate) is Router
    assert type(model.model.layers[0].mlp.up_proj) is Nf4Linear


def test_bases_that_cannot_be_stored_are_refused(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"'nf4'.*Conv1D.*'bfloat16'"):
        store_in_nf4(copy.deepcopy(tiny("gpt2")))
    model = copy.deepcopy(tiny("qwen3"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[1, 2] = torch.inf
    with pytest.raises(UserError, match=r"up_proj.weight' .* not finite"):
        store_in_nf4(model)
