"""Every CPU kernel against a slow version in double precision, and what the engine builds on: a
row's bits are that row's alone, and no kernel reads or writes beside its tensors."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.kernels.cpu.engine_kernels import FLAGS, HEADER, CPUKernels, cpu_kernels

COMPILER = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler: the engine runs on PyTorch's operations"
)
BELOW_ONE = 1 - 2.0**-53


@pytest.fixture(scope="module")
def kernels() -> CPUKernels:
    found = cpu_kernels()
    assert found is not None, "there is a compiler, but it does not make the kernels"
    return found


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- attention
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The arguments of one paged attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    pools: tuple[Tensor, Tensor]
    slots: Tensor
    table: Tensor
    positions: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None

    def run(self, kernels: CPUKernels) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Result and pools after it; those of the call stay as they are."""
        pools = (self.pools[0].clone(), self.pools[1].clone())
        where = (self.slots, self.table, self.positions)
        attention = kernels.attention(
            pools, where, self.q.shape[1], self.scale, self.window, self.softcap, self.sinks
        )
        return kernels.paged_attention((self.q, self.k, self.v), attention), pools


def make_call(
    width: int,
    groups: int,
    kv_heads: int,
    block: int,
    ends: list[int],
    seed: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: float | None = None,
) -> Call:
    """sinks: how far they spread; None: there are none.

    Rows at positions `ends`; an end one above the row's before it goes on with that row's sequence.
    Whatever a row may not look at is NaN.
    """
    sequences: list[int] = []
    for i, end in enumerate(ends):
        sequences.append(sequences[-1] if i and end == ends[i - 1] + 1 else i)
    columns = max(ends) // block + 1
    blocks = len(ends) * columns + 1
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed)).view(
        len(ends), columns
    )
    table = order[torch.tensor(sequences)].contiguous()
    pools = (
        torch.full((kv_heads, blocks, block, width), math.nan),
        torch.full((kv_heads, blocks, block, width), math.nan),
    )
    at = torch.tensor(ends)
    slots = table[torch.arange(len(ends)), at // block] * block + at % block
    for i, end in enumerate(ends):
        if sequences[i] == i:  # what the sequence has in the cache
            known = torch.arange(end)
            filled = table[i, known // block] * block + known % block
            for side, pool in enumerate(pools):
                pool.view(kv_heads, -1, width)[:, filled] = random(
                    kv_heads, end, width, seed=seed + i + side
                )
    rows = random(len(ends), (groups + 2) * kv_heads * width + 3, seed=seed)[:, :-3]
    q, k, v = (
        part.unflatten(1, (-1, width))
        for part in rows.split([n * kv_heads * width for n in (groups, 1, 1)], dim=1)
    )
    sunk = None if sinks is None else sinks * random(groups * kv_heads, seed=seed + 1)
    return Call(q, k, v, pools, slots, table, at, 1.3 * width**-0.5, window, softcap, sunk)


def slow_attention(call: Call) -> Tensor:
    """Row by row, head by head, in double precision."""
    kv_heads, _, block, width = call.pools[0].shape
    keys, values = (pool.double().view(kv_heads, -1, width) for pool in call.pools)
    keys[:, call.slots], values[:, call.slots] = (
        call.k.double().transpose(0, 1),
        call.v.double().transpose(0, 1),
    )
    out = torch.empty(call.q.shape, dtype=torch.float64)
    for r, (row, end) in enumerate(zip(call.q.double(), call.positions.tolist(), strict=True)):
        seen = torch.arange(max(0, end - call.window + 1) if call.window else 0, end + 1)
        slots = call.table[r, seen // block] * block + seen % block
        for h, query in enumerate(row):
            own = h // (len(row) // kv_heads)
            scores = keys[own, slots] @ query * call.scale
            if call.softcap:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            extra = scores.new_empty(0) if call.sinks is None else call.sinks[h, None].double()
            out[r, h] = torch.cat([scores, extra]).softmax(0)[: len(scores)] @ values[own, slots]
    return out


def check_attention(kernels: CPUKernels, call: Call, tolerance: float = 5e-6) -> None:
    out, pools = call.run(kernels)
    torch.testing.assert_close(out.double(), slow_attention(call), rtol=0, atol=tolerance)
    for pool, before, new in zip(pools, call.pools, (call.k, call.v), strict=True):
        expected = before.clone()
        expected.view(len(pool), -1, pool.shape[-1])[:, call.slots] = new.transpose(0, 1)
        assert torch.equal(
            pool.nan_to_num(7.5), expected.nan_to_num(7.5)
        )  # the new tokens, and nothing else


def narrow(call: Call) -> Call:
    """The same call with bfloat16 pools."""
    return replace(call, pools=(call.pools[0].bfloat16(), call.pools[1].bfloat16()))


def check_narrow(kernels: CPUKernels, call: Call) -> None:
    """Attention over bfloat16 pools is exactly attention over float32 pools of the same numbers, up
    to the order of sums.
    """
    k, v = call.k.bfloat16().float(), call.v.bfloat16().float()
    pools = (call.pools[0].bfloat16().float(), call.pools[1].bfloat16().float())
    out, written = narrow(call).run(kernels)
    exact = slow_attention(replace(call, k=k, v=v, pools=pools))
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=5e-6)
    for pool, before, new in zip(written, call.pools, (k, v), strict=True):
        expected = before.bfloat16()
        expected.view(len(pool), -1, pool.shape[-1])[:, call.slots] = new.bfloat16().transpose(0, 1)
        assert torch.equal(pool.nan_to_num(7.5), expected.nan_to_num(7.5))


@pytest.mark.parametrize("width", [16, 48, 64, 128])
@pytest.mark.parametrize(("groups", "kv_heads"), [(1, 3), (3, 1), (4, 2), (8, 1)])
def test_bfloat16_pools_against_the_slow_version(
    kernels: CPUKernels, width: int, groups: int, kv_heads: int
) -> None:
    for block, window in ((1, None), (3, 17), (16, None), (256, 40)):
        ends = [0, 1, 2, 15, 16, 40, 41, 255, 256]
        call = make_call(width, groups, kv_heads, block, ends, seed=block, window=window)
        check_narrow(kernels, call)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("width", [16, 32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize(("groups", "kv_heads"), [(1, 3), (2, 2), (3, 1), (4, 2), (8, 1)])
def test_attention_against_the_slow_version(
    kernels: CPUKernels, width: int, groups: int, kv_heads: int
) -> None:
    for block in (1, 3, 16, 256):
        check_attention(
            kernels,
            make_call(
                width, groups, kv_heads, block, [0, 1, 2, 15, 16, 40, 41, 255, 256], seed=block
            ),
        )


@pytest.mark.mostly_slow(11)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 41, 42, 1000])
@pytest.mark.parametrize(("width", "groups"), [(64, 2), (48, 3), (32, 8)])
def test_attention_with_a_window_against_the_slow_version(
    kernels: CPUKernels, width: int, groups: int, window: int
) -> None:
    for block in (1, 3, 16):
        check_attention(
            kernels,
            make_call(
                width,
                groups,
                2,
                block,
                [0, 1, 14, 15, 16, 17, 39, 40, 41],
                seed=window,
                window=window,
            ),
        )


@pytest.mark.slow
@given(
    width=st.sampled_from([16, 32, 48, 64, 80, 128]),
    groups=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    block=st.integers(1, 20),
    ends=st.lists(st.integers(0, 70), min_size=1, max_size=7),
    seed=st.integers(0, 1000),
    window=st.one_of(st.none(), st.integers(1, 80)),
    softcap=st.one_of(st.none(), st.sampled_from([0.5, 5.0, 50.0])),
    sinks=st.one_of(st.none(), st.sampled_from([0.0, 1.5, 100.0])),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_attention_against_the_slow_version(**shape: object) -> None:
    found = cpu_kernels()
    assert found is not None
    check_attention(found, make_call(**shape))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [32, 48, 64])
def test_attention_with_extreme_scores_against_the_slow_version(
    kernels: CPUKernels, width: int
) -> None:
    call = make_call(width, 2, 1, 16, [63], seed=4)
    signs = torch.where(torch.arange(64) % 2 == 0, 80.0, -80.0)
    call.pools[0].view(-1, width)[
        call.table[0, :4].repeat_interleave(16) * 16 + torch.arange(64) % 16
    ] = signs[:, None] / width
    even = replace(
        call, q=torch.ones(1, 2, width), k=torch.full((1, 1, width), -80.0 / width), scale=1.0
    )
    check_attention(kernels, even, tolerance=1e-5)
    one = replace(
        even, k=torch.full((1, 1, width), 3e4), scale=1.0
    )  # its score is a million: the others count for nothing
    out, _ = one.run(kernels)
    assert torch.equal(out[0, 0], one.v[0, 0]) and torch.equal(out[0, 1], one.v[0, 0])
    out, _ = replace(even, q=torch.full((1, 2, width), math.nan)).run(kernels)
    assert bool(out.isnan().all())


def same_on_two_threads(
    kernels: CPUKernels, call: Call, times: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Out and pools of the call on one thread, whose bits `times` calls on two threads must give
    again.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        out, pools = call.run(kernels)
        torch.set_num_threads(2)
        for _ in range(times):
            assert torch.equal(call.run(kernels)[0], out)
    finally:
        torch.set_num_threads(before)
    return out, pools


@pytest.mark.parametrize("width", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_rows_attention_is_the_same_bits_in_any_company(
    kernels: CPUKernels, width: int, groups: int, kept: torch.dtype
) -> None:
    call = make_call(width, groups, 2, 16, [5, 6, 7, 33, 100, 31, 64, 64], seed=1)
    call = narrow(call) if kept is torch.bfloat16 else call
    out, pools = same_on_two_threads(kernels, call, times=5)
    written = replace(call, pools=pools)
    for r in range(len(call.q)):
        alone = {
            name: getattr(written, name)[r : r + 1]
            for name in ("q", "k", "v", "slots", "table", "positions")
        }
        wider = torch.cat(
            [alone["table"], torch.zeros(1, 9, dtype=torch.int64)], dim=1
        )  # in company with a longer one its table is wider
        for change in (alone, {**alone, "table": wider}):
            assert torch.equal(replace(written, **change).run(kernels)[0], out[r : r + 1])
    backwards = {
        name: getattr(written, name).flip(0)
        for name in ("q", "k", "v", "slots", "table", "positions")
    }
    assert torch.equal(replace(written, **backwards).run(kernels)[0], out.flip(0))


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Block size, and of each row (whose first blocks it begins with, how many of them, its
    position).
    """
    block, rows = draw(st.integers(1, 20)), []
    for i in range(draw(st.integers(2, 20))):
        parent = draw(st.sampled_from([i, max(0, i - 1), 0]))
        most = (
            rows[parent][2] // block if parent < i else 0
        )  # full blocks only: into the last one the parent writes
        blocks = draw(st.integers(0, most))
        rows.append((parent, blocks, draw(st.integers(blocks * block, blocks * block + 40))))
    return block, rows


@pytest.mark.slow
@given(
    trees(),
    st.sampled_from([16, 48, 64]),
    st.integers(1, 5),
    st.integers(1, 2),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_attention_over_shared_blocks_is_the_same_bits_as_over_ones_own(
    tree: tuple[int, list[tuple[int, int, int]]],
    width: int,
    groups: int,
    kv_heads: int,
    window: int | None,
    seed: int,
) -> None:
    found = cpu_kernels()
    assert found is not None
    block, rows = tree
    call = make_call(width, groups, kv_heads, block, [end for *_, end in rows], seed, window)
    table = call.table.clone()
    for i, (parent, blocks, _) in enumerate(rows):
        table[i, :blocks] = table[parent, :blocks]
    call = replace(call, table=table)
    check_attention(found, call)
    check_narrow(found, call)
    for made in (call, narrow(call)):
        out, pools = made.run(found)
        for r in range(len(rows)):
            alone = {
                name: getattr(call, name)[r : r + 1]
                for name in ("q", "k", "v", "slots", "table", "positions")
            }
            assert torch.equal(replace(made, pools=pools, **alone).run(found)[0], out[r : r + 1])


@pytest.mark.slow
def test_two_threads_do_not_share_their_scores(kernels: CPUKernels) -> None:
    call = make_call(48, 1, 2, 16, list(range(0, 900, 15)), seed=3)
    same_on_two_threads(kernels, call, times=10)


# --- sampling
# --------------------------------------------------------------------------------------------------


def draw(
    kernels: CPUKernels, logits: Tensor, temperature: float, noise: float
) -> tuple[int, float]:
    tokens, logp = kernels.sample(
        logits[None], torch.tensor([temperature]), torch.tensor([noise], dtype=torch.float64)
    )
    return int(tokens), float(logp)


@pytest.mark.mostly_slow(8)
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 150_001])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.7, 1.0, 50.0, 1e6])
def test_draws_against_the_slow_version(
    kernels: CPUKernels, threads: int, vocabulary: int, temperature: float
) -> None:
    rows = 3
    logits = random(rows, vocabulary + 2, seed=vocabulary)[:, :-2] * 4
    logits[:, 1::3] = -math.inf
    probabilities = (logits.double() / (temperature or 1.0)).softmax(1)
    until = probabilities.cumsum(1)
    for noise in (0.0, 0.2, 0.5, 0.999, BELOW_ONE):
        tokens, logp = kernels.sample(
            logits,
            torch.full((rows,), temperature),
            torch.full((rows,), noise, dtype=torch.float64),
        )
        for r, token in enumerate(tokens.tolist()):
            assert token % 3 != 1, "minus infinity was drawn"
            assert float(logp[r]) == pytest.approx(
                float(probabilities[r, token].log()), abs=1e-5, rel=1e-6
            )
            if temperature == 0:
                assert token == int(logits[r].argmax())
            else:
                assert (
                    until[r, token] - probabilities[r, token] - 1e-6
                    <= noise
                    <= until[r, token] + 1e-6
                )
            alone = kernels.sample(
                logits[r : r + 1].clone(),
                torch.tensor([temperature]),
                torch.tensor([noise], dtype=torch.float64),
            )
            assert (int(alone[0]), float(alone[1])) == (token, float(logp[r]))


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 200, 4096])
def test_equal_logits_share_the_noise_equally(kernels: CPUKernels, vocabulary: int) -> None:
    for noise in (0.0, 1 / 3, 0.5, 0.75, BELOW_ONE):
        for level in (0.0, -1e30, 3e38):
            token, logp = draw(kernels, torch.full((vocabulary,), level), 0.7, noise)
            assert token == int(noise * vocabulary)
            assert logp == pytest.approx(-math.log(vocabulary), abs=1e-6)


@pytest.mark.parametrize("vocabulary", [65, 128, 200, 1000])
def test_extreme_noise_samples_possible_tokens(kernels: CPUKernels, vocabulary: int) -> None:
    """Not a token of probability 0 before the first or behind the last that has any, wherever those
    are.
    """
    for first in range(0, vocabulary - 1, 7):
        logits = torch.full((vocabulary,), -math.inf)
        logits[first], logits[min(first + 70, vocabulary - 1)] = 1.0, 3.0
        assert draw(kernels, logits, 1.0, 0.0)[0] == first
        token, logp = draw(kernels, logits, 1.0, BELOW_ONE)
        assert token == min(first + 70, vocabulary - 1) and logp == pytest.approx(
            -math.log1p(math.exp(-2)), abs=1e-6
        )
        far = logits.clone()
        far[first] = -100.0  # below what single precision adds to the sum
        assert draw(kernels, far, 1.0, 0.0)[0] == draw(kernels, far, 1.0, BELOW_ONE)[0] == token


def test_noise_near_one_never_falls_off_the_end(kernels: CPUKernels) -> None:
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (64, 65, 100, 500):
        logits = torch.randn(400, vocabulary, generator=generator) * 3
        logits[:, vocabulary - vocabulary // 3 :] = -math.inf
        noise = 1 - 2.0**-53 * torch.randint(1, 5, (400,), generator=generator).double()
        tokens, logp = kernels.sample(logits, torch.ones(400), noise)
        assert bool(logp.isfinite().all()) and int(tokens.max()) < vocabulary - vocabulary // 3


def test_greedy_takes_the_first_of_the_best(kernels: CPUKernels) -> None:
    logits = random(300)
    logits[[70, 130, 299]] = 9.0
    assert draw(kernels, logits, 0.0, 0.9)[0] == 70
    logits[130] = float(np.nextafter(np.float32(9.0), np.float32(10.0)))
    assert draw(kernels, logits, 0.0, 0.0)[0] == 130
    near = torch.tensor(
        [1e-3, float(np.nextafter(np.float32(1e-3), np.float32(1.0)))]
    )  # as exponentials both are 1
    assert draw(kernels, near, 0.0, 0.0)[0] == 1


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-44])
def test_a_tiny_temperature_is_greedy(kernels: CPUKernels, temperature: float) -> None:
    logits = random(200) * 5
    for noise in (0.0, 0.5, BELOW_ONE):
        assert draw(kernels, logits, temperature, noise) == (int(logits.argmax()), 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocabulary", [1, 64, 65, 300])
def test_without_a_distribution_a_token_of_the_vocabulary_comes_out_with_logp_nan(
    kernels: CPUKernels, vocabulary: int, temperature: float
) -> None:
    """The trainer leaves out an update whose loss is not finite; an index beyond the vocabulary
    would end the process.
    """
    broken = [torch.full((vocabulary,), math.nan), torch.full((vocabulary,), -math.inf)]
    for at in {0, vocabulary // 2, vocabulary - 1}:
        for value in (math.nan, math.inf):
            broken.append(random(vocabulary).index_fill(0, torch.tensor([at]), value))
    for logits in broken:
        for noise in (0.0, 0.5, BELOW_ONE):
            token, logp = draw(kernels, logits, temperature, noise)
            assert 0 <= token < vocabulary and math.isnan(logp)


def test_a_rare_token_is_as_frequent_as_it_should_be(kernels: CPUKernels) -> None:
    """Forty thousand tokens of probability 1e-7 beside one: a running sum in single precision would
    lose them.
    """
    logits = torch.full((40_001,), math.log(1e-7))
    logits[0] = math.log(1 - 4e-3)
    for part in (0.1, 0.5, 0.9):
        assert draw(kernels, logits, 1.0, 1 - 4e-3 * (1 - part))[0] == pytest.approx(
            40_000 * part, abs=30
        )


# --- the exponential
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_exponential_is_right_to_two_units_in_the_last_place(tmp_path: Path) -> None:
    wrapper = tmp_path / "exponential.c"
    beginning = HEADER.read_text()
    wrapper.write_text(
        beginning + "void run(const float *x, float *y, i64 n) { for (i64 i = 0; i < n; i++) y[i] ="
        " exp_(x[i]); }"
    )
    subprocess.run(
        [str(COMPILER), *FLAGS, "-w", "-shared", str(wrapper), "-o", str(tmp_path / "e.so"), "-lm"],
        check=True,
    )
    library = ctypes.CDLL(str(tmp_path / "e.so"))

    def exponential(x: np.ndarray) -> np.ndarray:
        y = np.empty_like(x)
        library.run(
            x.ctypes.data_as(ctypes.c_void_p),
            y.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(x)),
        )
        return y

    bits = np.arange(
        0, 0x42B00000, 1009, dtype=np.uint32
    )  # floats of [0, 88], evenly by representation
    x = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    x = x[x >= np.float32(-87.3)]
    exact = np.exp(x.astype(np.float64))
    assert float((np.abs(exponential(x) - exact) / np.spacing(exact.astype(np.float32))).max()) < 2
    edges = np.array(
        [
            -87.3,
            np.nextafter(np.float32(-87.3), np.float32(-88)),
            -88,
            -104,
            -1e30,
            -np.inf,
            0,
            -0.0,
        ],
        dtype=np.float32,
    )
    ours = exponential(edges)
    assert (
        ours[0] >= np.finfo(np.float32).tiny
        and ours[1:6].tolist() == [0] * 5
        and ours[6:8].tolist() == [1, 1]
    )
    assert np.isnan(exponential(np.full(19, np.nan, dtype=np.float32))).all()
