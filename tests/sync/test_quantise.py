"""Rounded weights against a table of every number that the format has, in float64; their error
bounds; and which weights of a model are rounded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.kernels.cpu.round_kernels import round_kernels
from sixfold.sync.quantise import (
    E4M3_MAX,
    INT8_MAX,
    LEAST_SCALE,
    Form,
    Quantised,
    quantised_share,
    quantised_weights,
    rounded,
    to_fp8,
    to_int8,
)

SLACK = 1 + 2.0**-20
"""w / scale is rounded to float32 before it is rounded to the format."""

# Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; exponent 0 is subnormal; all bits set is
# NaN, so 448 is the largest.
POSITIVE = [m / 8 * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0 ** (e - 7) for e, m in itertools.product(range(1, 16), range(8))
][:-1]
E4M3 = torch.tensor(sorted({s * x for x in POSITIVE for s in (1, -1)}), dtype=torch.float64)
WHOLE = torch.arange(-127, 128, dtype=torch.float64)

KINDS = (
    "normal",
    "zero row",
    "huge range",
    "outlier",
    "negative zeros",
    "tiny",
    "subnormal",
    "huge",
    "bfloat16",
)


def weights(kind: str, seed: int, rows: int, columns: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=g)
    if kind == "zero row":
        w[seed % rows] = 0
    elif kind == "huge range":
        w *= torch.exp(8 * torch.randn(rows, columns, generator=g))
    elif kind == "outlier":
        w[seed % rows, seed % columns] = 1e4
    elif kind == "negative zeros":
        w[w < 0.5] = -0.0
    elif kind in ("tiny", "subnormal", "huge"):
        w *= {
            "tiny": 1e-33,
            "subnormal": 1e-40,
            "huge": 0.2 * torch.finfo(torch.float32).max / w.abs().max(),
        }[kind] * 5
        w = w.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    return w.bfloat16() if kind == "bfloat16" else w


tensors = st.builds(
    weights, st.sampled_from(KINDS), st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 40)
)
both = pytest.mark.parametrize("quantise", [to_int8, to_fp8])


def nearest_gap(x: Tensor, table: Tensor) -> Tensor:
    """How far the nearest number of the table is, by looking at all of them."""
    return (x[..., None] - table).abs().amin(-1)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.slow
@given(tensors)
@settings(max_examples=300, deadline=None)
def test_every_int8_weight_is_the_nearest_number_and_within_half_a_scale(w: Tensor) -> None:
    q = to_int8(w)
    assert q.numbers.dtype == torch.int8 and q.scale.shape == (w.shape[0], 1)
    values, scale = q.values().double(), q.scale.double()
    assert torch.equal(values, q.numbers.double() * scale), "a product was rounded"
    gap = (values - w.double()).abs()
    assert bool((gap <= scale / 2 * SLACK).all())
    assert bool((gap <= nearest_gap(w.double() / scale, WHOLE) * scale + scale * 1e-4).all())
    largest = w.double().abs().amax(1, keepdim=True)
    assert bool(
        ((scale - largest / INT8_MAX).abs() <= largest / INT8_MAX * 2.0**-8)[
            largest >= INT8_MAX * LEAST_SCALE
        ].all()
    ), "a coarser scale"


@pytest.mark.slow
@given(tensors)
@settings(max_examples=300, deadline=None)
def test_every_fp8_weight_is_the_nearest_number_and_within_a_sixteenth(w: Tensor) -> None:
    q = to_fp8(w)
    assert q.numbers.dtype == torch.float8_e4m3fn and q.scale.shape == ()
    values, scale, exact = q.values().double(), q.scale.double(), w.double()
    assert torch.equal(values, q.numbers.double() * scale), "a product was rounded"
    gap, normal = (values - exact).abs(), (exact / scale).abs() >= 2.0**-6
    assert bool((gap[normal] <= exact[normal].abs() * 2.0**-4 * SLACK).all())
    assert bool((gap[~normal] <= scale * 2.0**-10 * SLACK).all())
    assert bool(
        (gap <= nearest_gap(exact / scale, E4M3) * scale * SLACK + exact.abs() * 1e-6).all()
    )
    assert float(scale) <= max(float(exact.abs().max()) / E4M3_MAX * (1 + 2.0**-8), LEAST_SCALE), (
        "a coarser scale"
    )


@pytest.mark.slow
@both
@given(w=tensors)
@settings(max_examples=300, deadline=None)
def test_quantising_again_changes_no_bit(
    quantise: Callable[[Tensor], Quantised], w: Tensor
) -> None:
    once = quantise(w)
    again = quantise(once.values())
    assert torch.equal(bits(once.values()), bits(again.values()))
    assert torch.equal(bits(once.numbers), bits(again.numbers)) and torch.equal(
        once.scale, again.scale
    )


@both
@given(w=tensors)
@settings(max_examples=50, deadline=None)
def test_what_is_given_is_not_altered(quantise: Callable[[Tensor], Quantised], w: Tensor) -> None:
    before = w.clone()
    made = quantise(w).values()
    assert torch.equal(bits(w), bits(before)) and made.dtype == torch.float32
    made.zero_()
    assert torch.equal(bits(w), bits(before))


def same(x: Tensor, y: Tensor) -> bool:
    """True if all bits are equal, whatever the payload of a NaN."""
    nan = x.isnan()
    return torch.equal(nan, y.isnan()) and torch.equal(bits(x[~nan]), bits(y[~nan]))


@pytest.mark.skipif(round_kernels() is None, reason="needs a C compiler")
@given(w=tensors)
@settings(max_examples=200, deadline=None)
def test_the_fused_pass_gives_the_same_bits(w: Tensor) -> None:
    """PyTorch's operations, one after the other, are the reference."""
    assert same(rounded(w, "int8"), to_int8(w).values())
    assert same(rounded(w, "fp8"), to_fp8(w).values())
    assert same(rounded(w.T, "fp8"), to_fp8(w.T).values()), "a strided matrix"


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_fused_pass_keeps_what_is_not_finite(form: Form, bad: float) -> None:
    w = weights("normal", 5, 300, 70)  # enough numbers for several threads
    w[7, 3] = bad
    plain = (to_int8(w) if form == "int8" else to_fp8(w)).values()
    assert same(rounded(w, form), plain) and bool(plain[7].isnan().all())


def test_the_formats_by_hand() -> None:
    """Scales that are powers of two, so the numbers can be read off."""
    q = to_int8(
        torch.tensor([[127.0, 0.5, 1.5, -2.5, -126.6], [0.25 * 127, 0.0, 0.125, 0.13, -0.25]])
    )
    assert q.scale.tolist() == [[1.0], [0.25]]
    assert q.numbers.tolist() == [[127, 0, 2, -2, -127], [127, 0, 0, 1, -1]]
    q = to_fp8(
        torch.tensor(
            [[448.0, 17.0, 19.0, -1.0625, 0.3], [2.0**-9, 2.0**-10, 2.0**-6, 1.5 * 2.0**-9, -0.0]]
        )
    )
    assert float(q.scale) == 1.0
    assert q.values().tolist() == [
        [448.0, 16.0, 20.0, -1.0, 0.3125],
        [2.0**-9, 0.0, 2.0**-6, 2.0**-8, 0.0],
    ]


def test_every_e4m3_number_stays() -> None:
    assert (
        len(E4M3) == 253 and float(E4M3.max()) == E4M3_MAX
    )  # 256 patterns less two NaN and a second zero
    assert torch.equal(to_fp8(E4M3.float()).values().double(), E4M3)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert set(every[every.isfinite()].tolist()) == set(E4M3.tolist())


def test_channels_are_independent() -> None:
    w = weights("normal", 3, 5, 16)
    alone = to_int8(w).values()
    w[2] *= 1e5
    together = to_int8(w).values()
    assert all(torch.equal(alone[i], together[i]) for i in (0, 1, 3, 4))
    assert not torch.equal(
        to_fp8(weights("normal", 3, 5, 16)).values()[0], to_fp8(w).values()[0]
    ), "fp8 has one scale for the tensor"


def test_channels_may_be_columns() -> None:
    """GPT-2 keeps its matrices [in, out]."""
    w = weights("huge range", 1, 7, 5)
    assert torch.equal(to_int8(w, outputs=1).values(), to_int8(w.T).values().T)
    assert to_int8(w, outputs=1).scale.shape == (1, 5)


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_row_with_a_non_finite_weight_becomes_nan(
    quantise: Callable[[Tensor], Quantised], bad: float
) -> None:
    w = weights("normal", 0, 3, 8)
    w[1, 4] = bad
    assert bool(quantise(w).values()[1].isnan().all())


ROUNDED = {
    "qwen3": r"model\.layers\.\d\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight",
    "llama": r"model\.layers\.\d\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight",
    "gemma": r"model\.layers\.\d\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight",
    "gpt2": r"transformer\.h\.\d\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight",
    "qwen3_moe": r"model\.layers\.\d\.self_attn\.[qkvo]_proj\.weight",
}
"""gemma and gpt2 tie the head to the embeddings, the others have one of their own."""


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("name", ROUNDED)
def test_the_matrices_of_linear_layers_are_rounded_and_nothing_else(
    tiny: Callable[[str], PreTrainedModel], name: str, form: str
) -> None:
    model = tiny(name)
    own, seen, rounded = dict(model.named_parameters()), quantised_weights(model, form), 0
    assert seen.keys() == own.keys()
    for key, weight in own.items():
        if not re.fullmatch(ROUNDED[name], key):
            assert seen[key] is weight, key
            continue
        assert weight.dim() == 2
        rounded += weight.numel()
        outputs = 1 if name == "gpt2" else 0
        expected = (
            to_int8(weight.detach(), outputs).values()
            if form == "int8"
            else to_fp8(weight.detach()).values()
        )
        assert torch.equal(seen[key], expected) and not torch.equal(seen[key], weight), key
        assert seen[key].untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
    assert (
        quantised_share(model) == pytest.approx(rounded / sum(p.numel() for p in own.values()))
        and 0 < quantised_share(model) < 1
    )
