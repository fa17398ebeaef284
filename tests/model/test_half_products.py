"""Products with bfloat16 weights on the CPU.

They are compared with a slow version in double precision, and the bits of a row must not depend on
other rows. Each instruction set is tested: that of this machine, AMX by a stand-in, and float32
arithmetic for processors without bfloat16 instructions.
"""

from __future__ import annotations

import platform
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.grid import on_grid
from tests.model.products import check_not_finite, check_product, product, random

from sixfold.kernels.cpu import engine_kernels
from sixfold.kernels.cpu.body_kernels import BodyKernels, body_kernels

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)

STAND_IN = Path(__file__).with_name("amx_stand_in.h")
FLAGS = engine_kernels.FLAGS
X86 = platform.machine() == "x86_64"
KINDS = {
    "this machine": (),
    "amx": ("-include", str(STAND_IN)),
    "float32": ("-mno-avx512bf16", "-mno-amx-bf16") if X86 else (),
    "float32, narrow": ("-mno-avx512f", "-mno-amx-bf16") if X86 else (),
}


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kernels(request: pytest.FixtureRequest) -> BodyKernels:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_kernels, "FLAGS", (*FLAGS, *KINDS[request.param]))
        found = body_kernels(engine_kernels.load_library)
    assert found is not None
    if request.param == "amx":
        if found._width != 32:
            pytest.skip("AMX comes with AVX-512, which this machine does not have")
        assert found.half_instructions == "amx"
    if request.param.startswith("float32") and X86:
        assert found.half_instructions == "float32"
    return found


@pytest.mark.mostly_nightly(2)
def test_product_against_the_slow_version(kernels: BodyKernels) -> None:
    on_grid(
        partial(check_product, kernels, half=True),
        outputs=[[1], [7, 9], [31, 33, 1], [200]],
        depth=[1, 2, 31, 32, 100, 704],
        rows=[1, 2, 5, 13, 16, 17, 33, 96, 203],
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_a_row_do_not_depend_on_other_rows(kernels: BodyKernels, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weights = random(301, 90), [random(n, 90, seed=n) for n in (5, 70)]
        biases = [random(5, seed=8), None]
        start = random(301, 75, seed=3)
        whole = product(kernels, x, weights, biases, start, half=True)
        for first, last in ((0, 1), (300, 301), (7, 19), (100, 133), (3, 4), (0, 300)):
            part = product(kernels, x[first:last], weights, biases, start[first:last], half=True)
            assert torch.equal(part, whole[first:last]), (first, last)
        alone = product(kernels, x, weights[1:], biases[1:], start[:, 5:], half=True)
        assert torch.equal(alone, whole[:, 5:])
    finally:
        torch.set_num_threads(before)


def test_numbers_are_rounded_as_pytorch_rounds(kernels: BodyKernels) -> None:
    """Numbers are rounded to nearest, ties to even. Infinities and NaN are kept."""
    bits = torch.randint(-(2**31), 2**31, (4000,), generator=torch.Generator().manual_seed(0))
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF])
    numbers = torch.cat([bits, ties]).int().view(torch.float32)
    weight = numbers[:, None]
    panels = kernels.pack([weight], [None], half=True).panels  # [panels, pairs, width, 2]
    ours = panels[:, 0, :, 0].flatten()[: len(numbers)]
    theirs = numbers.bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    exact = ~theirs.isnan()
    assert torch.equal(ours[exact].view(torch.int16), theirs[exact].view(torch.int16))
    rows = torch.empty(len(numbers), 1)
    kernels.product(weight, kernels.pack([torch.ones(1, 1)], [None], half=True), rows)
    fits = exact & (theirs.float().abs() > 1e-37)  # processors take tiny numbers for zeros
    assert torch.equal(rows[fits, 0], theirs[fits].float())


def test_nan_stays_in_its_row_and_column(kernels: BodyKernels) -> None:
    check_not_finite(kernels, half=True)


def test_packed_weights_take_half_the_bytes(kernels: BodyKernels) -> None:
    weight = random(64, 96)
    whole, half = (kernels.pack([weight], [None], half=h) for h in (False, True))
    assert 2 * half.panels.nbytes == whole.panels.nbytes
