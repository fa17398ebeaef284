"""Forms of the optimizer: equal to float32 AdamW or within a stated distance, with less memory,
and resumable.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tiny import relative
from torch import Tensor, nn

from sixfold.errors import UserError
from sixfold.recipe.schema import TrainerConfig
from sixfold.trainer import lean_adamw
from sixfold.trainer.lean_adamw import LeanAdamW, round_stochastically
from sixfold.trainer.optimizer import make_optimizer, reset_optimizer
from sixfold.trainer.optimizer_state import load_optimizer_tensors, optimizer_tensors

torch.set_num_threads(1)
NUMBERS = 64 * 96 + 96 + 96 * 3 + 3
HALF: dict[str, Any] = {"weights": "bfloat16"}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "offload": {"offload": "optimizer"},
    "8 bits": {"optimizer": "adamw8bit"},
    "8 bits, offload": {"optimizer": "adamw8bit", "offload": "optimizer"},
    "master": HALF,
    "master, offload": HALF | {"offload": "optimizer"},
    "master, 8 bits": HALF | {"optimizer": "adamw8bit"},
    "stochastic": HALF | {"rounding": "stochastic"},
    "stochastic, offload": HALF | {"rounding": "stochastic", "offload": "optimizer"},
    "stochastic, 8 bits": HALF | {"rounding": "stochastic", "optimizer": "adamw8bit"},
}


def settings(form: str, **changed: Any) -> TrainerConfig:
    return TrainerConfig(**{"learning_rate": 1e-3, "weight_decay": 0.1} | FORMS[form] | changed)


def module(form: str = "float32") -> nn.Module:
    """Two layers. One matrix is large enough for 8 bits. All dtypes start from equal weights."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 3)).bfloat16().float()
    return made.bfloat16() if FORMS[form].get("weights") == "bfloat16" else made


def set_gradients(model: nn.Module, seed: int) -> None:
    """Gradient entries of different sizes, with noise."""
    made, sizes = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=made)
        p.grad = (0.5 + noise) * torch.rand(p.shape, generator=sizes) ** 2


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
    """Weights after some steps, as one flat float32 tensor."""
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def trained(form: str, steps: int = 12, seed: int = 0) -> Tensor:
    model = module(form)
    return train(model, make_optimizer(model, settings(form), seed), range(steps))


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state."""
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values())


def test_default_is_torchs_own_optimizer() -> None:
    assert type(make_optimizer(module(), settings("float32"))) is torch.optim.AdamW


@pytest.mark.parametrize("slices", [lean_adamw.SLICE, 1024])
def test_offloaded_float32_has_the_bits_of_the_default(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean_adamw, "SLICE", slices)
    assert torch.equal(trained("offload"), trained("float32"))


def test_master_weights_have_the_bits_of_the_default() -> None:
    """Parameters are the rounded master weights. Without these, small updates would be lost."""
    model, exact = module("master"), module()
    optimizer = make_optimizer(model, settings("master"))
    rounded, expected = (
        train(m, o, range(12))
        for m, o in ((model, optimizer), (exact, make_optimizer(exact, settings("float32"))))
    )
    masters = torch.cat([optimizer.state[p]["master"].flatten() for p in model.parameters()])
    assert torch.equal(masters, expected)
    assert torch.equal(rounded, expected.bfloat16().float())
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("form", "distance"),
    [("8 bits", 0.15), ("8 bits, offload", 0.15), ("master, 8 bits", 0.15), ("stochastic", 0.35)],
)
def test_distance_from_the_default(form: str, distance: float) -> None:
    """The distance is that of weight changes after 12 steps, relative to the default's change."""
    start = torch.cat([p.detach().flatten() for p in module().parameters()])
    change, expected = trained(form) - start, trained("float32") - start
    assert relative(change, expected) < distance


def test_8_bit_moments_are_those_of_torchao() -> None:
    """torchao's optimizer computes the same step without fused kernels. No gradient is near 0:
    torchao rounds their second moments to 0.
    """
    from torchao.optim import AdamW8bit

    ours, theirs = module()[0].weight, module()[0].weight
    start = ours.detach().clone()
    own = make_optimizer(nn.ParameterList([ours]), settings("8 bits"))
    other = AdamW8bit([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(8):
        made = torch.Generator().manual_seed(step)
        gradient = torch.rand(start.shape, generator=made) + 0.5
        gradient *= torch.randn(start.shape, generator=made).sign()
        ours.grad, theirs.grad = gradient, gradient.clone()
        own.step()
        with torch.compiler.set_stance("force_eager"):
            other.step()
    assert relative(ours.detach() - start, theirs.detach() - start) < 1e-3


def test_second_moments_in_8_bits_never_vanish() -> None:
    """Entries far below the largest of their block: an update divided by 0 + epsilon would be
    many times the learning rate.
    """
    matrix = nn.Linear(64, 96, bias=False)
    optimizer = make_optimizer(matrix, settings("8 bits", weight_decay=0.0))
    sizes = torch.logspace(-12, 0, 64).expand(96, 64)
    for step in range(12):
        before = matrix.weight.detach().clone()
        noise = torch.randn(96, 64, generator=torch.Generator().manual_seed(step))
        matrix.weight.grad = noise * sizes
        optimizer.step()
        assert float((matrix.weight.detach() - before).abs().max()) < 5e-3


def test_stochastic_rounding_keeps_the_expectation() -> None:
    """1 + 1/512 lies a quarter of the way from 1 to 1 + 1/128."""
    weight = torch.full((100_000,), 1 + 1 / 512)
    rounded = round_stochastically(weight, 12345)
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.float().tolist()) == {1.0, 1 + 1 / 128}
    share = float((rounded > 1).float().mean())
    assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 100_000))
    exact = torch.tensor([0.0, -1.5, math.inf, -math.inf])
    assert torch.equal(round_stochastically(exact, 1 << 50).float(), exact)
    assert round_stochastically(torch.tensor([math.nan]), 1 << 50).isnan().all()


def test_noise_depends_on_seed_step_and_parameter() -> None:
    """Equal parameters with equal gradients are rounded independently of one another."""
    one, other, again = (trained("stochastic", seed=seed) for seed in (1, 2, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    twins = nn.ParameterList([torch.full((4096,), 1.001).bfloat16() for _ in range(2)])
    optimizer = make_optimizer(twins, settings("stochastic"))
    rounded = []
    for _ in range(2):
        for p in twins:
            p.grad = torch.ones(4096)
        with torch.no_grad():
            for p in twins:
                p.fill_(1.0)
        optimizer.step()
        rounded += [p.detach().clone() for p in twins]
    assert not any(torch.equal(rounded[0], r) for r in rounded[1:])


@pytest.mark.parametrize(
    ("form", "bytes_per_number"),
    [("float32", 8), ("offload", 8), ("8 bits", 2), ("master", 12), ("stochastic", 8)],
)
def test_bytes_of_the_state(form: str, bytes_per_number: float) -> None:
    """Bytes for the large matrix. In 8 bits, a block of 256 numbers has a scale of 4 bytes."""
    model = module(form)
    optimizer = make_optimizer(model, settings(form))
    train(model, optimizer, range(1))
    state = optimizer.state[model[0].weight]
    numbers = 64 * 96
    blocks = 2 * 4 * numbers // 256 if form == "8 bits" else 0
    assert sum(t.nbytes for t in state.values()) == numbers * bytes_per_number + blocks + 4
    kept = {"float32": 1.0, "offload": 1.0, "8 bits": 0.35, "master": 1.5, "stochastic": 1.0}
    assert held(optimizer) <= kept[form] * 8 * NUMBERS + 100


@pytest.mark.parametrize("form", FORMS)
def test_resume_is_bit_exact(form: str) -> None:
    """State is saved as named tensors and loaded. One parameter has never had a gradient."""
    model = module(form)
    model.append(nn.Linear(2, 2).to(model[0].weight.dtype))
    optimizer = make_optimizer(model, settings(form), 7)
    model[2].requires_grad_(False)
    for step in range(4):
        set_gradients(model, step)
        model[2].weight.grad = model[2].bias.grad = None
        optimizer.step()
    model[2].requires_grad_(True)
    saved = {k: t.clone() for k, t in optimizer_tensors(optimizer, model).items()}
    resumed = copy.deepcopy(model)
    fresh = make_optimizer(resumed, settings(form), 7)
    load_optimizer_tensors(fresh, resumed, saved)
    assert optimizer_tensors(fresh, resumed).keys() == saved.keys()
    expected = train(model, optimizer, range(4, 8))
    assert torch.equal(train(resumed, fresh, range(4, 8)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_reset_makes_the_next_steps_those_of_a_new_optimizer(form: str) -> None:
    """Master weights stay, because they are not moments."""
    model = module(form)
    optimizer = make_optimizer(model, settings(form))
    train(model, optimizer, range(4))
    with torch.no_grad():
        for p in model.parameters():
            if "master" in optimizer.state[p]:
                optimizer.state[p]["master"].copy_(p)  # as in a new optimizer
    twin = copy.deepcopy(model)
    reset_optimizer(optimizer)
    assert all(s["step"] == 0 for s in optimizer.state.values())
    fresh = make_optimizer(twin, settings(form))
    assert torch.equal(train(model, optimizer, range(9, 12)), train(twin, fresh, range(9, 12)))


@pytest.mark.parametrize(("old", "new"), [("float32", "8 bits"), ("8 bits", "offload")])
def test_state_of_another_form_is_refused(old: str, new: str) -> None:
    model = module(old)
    optimizer = make_optimizer(model, settings(old))
    train(model, optimizer, range(1))
    other = make_optimizer(model, settings(new))
    with pytest.raises(UserError, match="different optimizer"):
        load_optimizer_tensors(other, model, optimizer_tensors(optimizer, model))
    assert not other.state


def test_offloaded_float32_state_fits_the_default() -> None:
    """`trainer.offload` may change when a run is resumed."""
    model = module()
    optimizer = make_optimizer(model, settings("float32"))
    train(model, optimizer, range(3))
    resumed = copy.deepcopy(model)
    other = make_optimizer(resumed, settings("offload"))
    assert isinstance(other, LeanAdamW)
    load_optimizer_tensors(other, resumed, optimizer_tensors(optimizer, model))
    assert torch.equal(train(model, optimizer, range(3, 5)), train(resumed, other, range(3, 5)))


def test_parameters_need_not_be_contiguous() -> None:
    model, twin = nn.Linear(64, 96), nn.Linear(64, 96)
    twin.load_state_dict(model.state_dict())
    twin.weight.data = twin.weight.data.t().contiguous().t()
    got = train(twin, make_optimizer(twin, settings("offload")), range(3))
    assert torch.equal(got, train(model, make_optimizer(model, settings("float32")), range(3)))
