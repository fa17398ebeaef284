"""Every kernel of the written-out body against a slow version in double precision, and what the
engine builds on: a row's bits are that row's alone, and no kernel reads or writes beside its
tensors."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grid import on_grid
from tests.model.products import check_not_finite, check_product, product, random
from torch import Tensor

from sixfold.kernels.cpu.body_kernels import BodyKernels, body_kernels
from sixfold.kernels.cpu.engine_kernels import load_library

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="no C compiler: every module runs as it is",
)


@pytest.fixture(scope="module")
def kernels() -> BodyKernels:
    found = body_kernels(load_library)
    assert found is not None, "there is a compiler, but it does not make the kernels"
    return found


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# --- products
# --------------------------------------------------------------------------------------------------

OUTPUTS = [[1], [7, 9], [16], [24, 8, 8], [31, 33, 1], [200]]
"""Of layers that read the same input: fewer than a panel, whole panels, and more."""


def test_product_against_the_slow_version(kernels: BodyKernels, threads: int) -> None:
    on_grid(
        partial(check_product, kernels),
        outputs=OUTPUTS,
        depth=[1, 2, 16, 100, 704],
        rows=[1, 2, 3, 5, 6, 7, 13, 96, 203],
    )


def test_weights_are_packed_wherever_their_numbers_lie(kernels: BodyKernels) -> None:
    apart, turned = random(40, 90)[3:30, 5:75], random(70, 20, seed=1).T
    both = kernels.pack([apart, turned], [None, None])
    assert torch.equal(both.panels, kernels.pack([torch.cat([apart, turned])], [None]).panels)
    width = both.panels.shape[2]
    rows = both.panels.transpose(1, 2).reshape(-1, 70)
    assert (
        torch.equal(rows[:47], torch.cat([apart, turned]))
        and not rows[47:].any()
        and both.outputs == 47
        and len(rows) == -(-47 // width) * width
    )


@pytest.mark.slow
@given(
    st.integers(1, 700),
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.integers(1, 90),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**30),
)
@settings(max_examples=120, deadline=None)
def test_bits_of_a_row_do_not_depend_on_other_rows(
    kernels: BodyKernels,
    rows: int,
    outputs: list[int],
    depth: int,
    biased: bool,
    added: bool,
    seed: int,
) -> None:
    """Any number of rows from any first one on, and each layer alone."""
    x, weights = random(rows, depth, seed=seed), [random(n, depth, seed=n) for n in outputs]
    biases = [random(n, seed=n + 1) if biased else None for n in outputs]
    before = random(rows, sum(outputs), seed=3) if added else None
    whole = product(kernels, x, weights, biases, before)
    first = seed % rows
    for last in {first + 1, min(rows, first + 1 + seed % 17), rows}:
        part = None if before is None else before[first:last]
        assert torch.equal(
            product(kernels, x[first:last], weights, biases, part), whole[first:last]
        )
    start = 0
    for n, weight, bias in zip(outputs, weights, biases, strict=True):
        part = None if before is None else before[:, start : start + n]
        assert torch.equal(product(kernels, x, [weight], [bias], part), whole[:, start : start + n])
        start += n


def test_nan_stays_in_its_row_and_column(kernels: BodyKernels) -> None:
    check_not_finite(kernels)


# --- rows
# --------------------------------------------------------------------------------------------------

SIZES = [1, 2, 3, 7, 15, 16, 17, 33, 64, 100, 257, 1000]


@pytest.mark.parametrize("width", SIZES)
def test_rms_norm_against_the_slow_version(kernels: BodyKernels, threads: int, width: int) -> None:
    for rows in (1, 5, 1 + 20_000 // width):
        x, weight = (
            random(rows, width) * torch.logspace(-3, 3, rows)[:, None],
            random(width, seed=1),
        )
        exact = (
            x.double() * (x.double().pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        )
        ours = kernels.rms_norm(x, weight, 1e-6, torch.empty_like(x))
        torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=0)
        for r in {0, rows // 2, rows - 1}:
            assert torch.equal(
                kernels.rms_norm(x[r : r + 1].clone(), weight, 1e-6, torch.empty(1, width)),
                ours[r : r + 1],
            )


@pytest.mark.parametrize("width", SIZES)
def test_silu_mul_against_the_slow_version(kernels: BodyKernels, threads: int, width: int) -> None:
    for rows in (1, 5, 1 + 20_000 // width):
        gate, up = random(rows, width) * 3, random(rows, width, seed=1)
        exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
        ours = kernels.silu_mul(torch.cat([gate, up], dim=1))
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=0)
        for r in {0, rows // 2, rows - 1}:
            assert torch.equal(
                kernels.silu_mul(torch.cat([gate, up], dim=1)[r : r + 1]), ours[r : r + 1]
            )


def test_silu_far_out(kernels: BodyKernels) -> None:
    gate = torch.tensor(
        [-1e30, -1e4, -300.0, -150, -100, -90, -89, -88.5, -88, -50, 0, 50, 88, 90, 300, 1e30]
    )
    ours = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(
        ours[2:].double(), (gate.double() / (1 + (-gate.double()).exp()))[2:], rtol=1e-5, atol=1e-35
    )
    assert (ours[:2] <= 0).all() and (ours[:2] > -1e-7).all()
    assert kernels.silu_mul(torch.tensor([[math.nan, 1.0, 1.0, 1.0]])).isnan().tolist() == [
        [True, False]
    ]


def slow_rotate(x: Tensor, weight: Tensor | None, epsilon: float, angle: Tensor) -> Tensor:
    """One head of one token: pairs (i, i + D / 2) turned by angle [D / 2]."""
    x = x.double()
    if weight is not None:
        x = x * (x.pow(2).mean() + epsilon).rsqrt() * weight.double()
    a, b = x.chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("width", [2, 6, 16, 24, 32, 64, 80, 96, 128, 256])
def test_rotate_against_the_slow_version(
    kernels: BodyKernels, threads: int, width: int, normed: bool
) -> None:
    heads, kv_heads, rows = 3, 1, 2 + 5000 // width
    angles = torch.outer(
        torch.arange(40).double(), 10000 ** (-torch.arange(width // 2).double() / (width // 2))
    )
    table = (angles.cos().float(), angles.sin().float())
    positions = torch.arange(rows) * 7 % 40
    norms = (random(width, seed=2), random(width, seed=3), 1e-6) if normed else None
    qkv = random(rows, (heads + 2 * kv_heads) * width + 5)[:, :-5]  # rows lie apart
    before = qkv.clone()
    kernels.rotate(qkv, heads, kv_heads, norms, table, positions)
    assert torch.equal(
        qkv[:, (heads + kv_heads) * width :], before[:, (heads + kv_heads) * width :]
    )  # values stay
    for r in {0, 1, rows // 2, rows - 1}:
        for h in range(heads + kv_heads):
            weight = norms[h >= heads] if norms else None
            expected = slow_rotate(
                before[r, h * width : (h + 1) * width], weight, 1e-6, angles[positions[r]]
            )  # type: ignore[arg-type]
            torch.testing.assert_close(
                qkv[r, h * width : (h + 1) * width].double(), expected, rtol=1e-5, atol=1e-5
            )
        alone = before[r : r + 1].clone()
        kernels.rotate(alone, heads, kv_heads, norms, table, positions[r : r + 1].clone())
        assert torch.equal(alone, qkv[r : r + 1])
