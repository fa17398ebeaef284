"""The GPU kernels against the PyTorch code that they stand for. In Triton's interpreter, on the
CPU; on a GPU with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import END, VOCABULARY
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine import model_runner, quantised_cache, sampler
from sixfold.engine.engine import Engine
from sixfold.engine.quantised_cache import dequantise, quantise
from sixfold.engine.sequence import Chunk, Request, Ticket
from sixfold.engine.shared_prefixes import find_shared_prefixes
from sixfold.kernels.attention import AttentionLayer
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

pytest.importorskip("triton")  # there is none for macOS and Windows

from sixfold.engine import triton_layout
from sixfold.kernels.triton import attention as triton_kernels
from sixfold.kernels.triton.attention import decode_attention, fused_sample, units_of, write_int8

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
KERNELS = [
    AttentionLayer(0),
    AttentionLayer(0, scale=0.3, window=20),
    AttentionLayer(0, softcap=2.0),
]


def with_sinks(
    kernel: AttentionLayer, heads: int, dtype: torch.dtype = torch.float32
) -> AttentionLayer:
    """The same with sinks far from 0, which take from a tenth to nine tenths of the weight."""
    return replace(kernel, sinks=torch.linspace(-1, 7, heads, device=DEVICE, dtype=dtype))


class Cached:
    """Five sequences over shuffled blocks: rows 1 to 3 begin like row 0, rows 2 and 3 go on alike.
    Some slots hold garbage.
    """

    def __init__(
        self, group: int, d: int, block_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(group * d + block_size)
        self.q = torch.randn(5, 2 * group, d, dtype=dtype, device=DEVICE)
        width = 192 // block_size
        self.pools = torch.randn(2, 2, 5 * width + 3, block_size, d, dtype=dtype, device=DEVICE)
        self.table = torch.randperm(5 * width)[: 5 * width].view(5, width)
        common = 45 // block_size
        self.table[1:4, :common] = self.table[0, :common]
        self.table[3, : 2 * common] = self.table[2, : 2 * common]
        self.positions = torch.tensor([width * block_size - 1, 60, 100, 95, 3])
        shared = find_shared_prefixes(self.table.numpy(), self.positions.numpy(), block_size)
        assert len(shared.members) >= 1
        self.shared = [torch.as_tensor(x, device=DEVICE) for x in shared]
        self.nothing = [self.shared[0][:0], self.shared[1][:0], torch.zeros_like(self.shared[2])]
        self.table, self.positions = self.table.to(DEVICE), self.positions.to(DEVICE)

    def run(self, kernel: AttentionLayer, cascade: bool = True) -> Tensor:
        units = units_of(self.positions, *(self.shared if cascade else self.nothing))
        return decode_attention(self.q, *self.pools, self.table, self.positions, units, kernel)

    def expected(self, kernel: AttentionLayer, pools: Tensor | None = None) -> Tensor:
        """One dense attention in float64."""
        keys, values = (
            (self.pools if pools is None else pools)
            .double()[:, :, self.table]
            .flatten(3, 4)
            .transpose(1, 2)
        )
        at = torch.arange(keys.shape[2], device=DEVICE)
        seen = at <= self.positions[:, None]
        if kernel.window:
            seen &= self.positions[:, None] - at < kernel.window
        return kernel.attend(self.q.double()[:, :, None], keys, values, seen[:, None, None])[
            :, :, 0
        ]


@pytest.mark.mostly_nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "group", "d", "block_size"),
    [
        (KERNELS[0], 1, 16, 16),
        (KERNELS[1], 1, 16, 16),
        (KERNELS[1], 3, 24, 5),
        (KERNELS[2], 3, 24, 5),
        (KERNELS[0], 7, 32, 1),
    ],
)
def test_decode_attention_is_dense_attention(
    kernel: AttentionLayer, group: int, d: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cached(group, d, block_size)
    for cascade in (False, True):
        torch.testing.assert_close(
            cached.run(kernel, cascade).double(), cached.expected(kernel), rtol=0, atol=1e-5
        )
    monkeypatch.setattr(triton_kernels, "LEAST_SPLIT", 40)
    torch.testing.assert_close(
        cached.run(kernel).double(), cached.expected(kernel), rtol=0, atol=1e-5
    )


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "split", "dtype"),
    [
        (KERNELS[0], 40, torch.bfloat16),  # of the sinks: the parts are float32
        (KERNELS[1], 256, torch.float32),
        (KERNELS[2], 40, torch.float32),
    ],
    ids=["plain", "window", "softcap"],
)
def test_sinks_are_one_more_part(
    kernel: AttentionLayer, split: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "LEAST_SPLIT", split)
    cached, kernel = Cached(3, 24, 5), with_sinks(kernel, 6, dtype)
    for cascade in (False, True):
        out = cached.run(kernel, cascade).double()
        torch.testing.assert_close(out, cached.expected(kernel), rtol=0, atol=1e-5)
        assert (out - cached.expected(replace(kernel, sinks=None))).abs().max() > 0.1


@pytest.mark.slow
def test_bfloat16_is_right_to_its_rounding() -> None:
    """Products and sums are float32. Two roundings to 8 bits are not: of the weights, which sum to
    1, and of the result, no larger than the largest value. Each is off by 2**-9 of that at most."""
    for group, block_size in ((1, 16), (7, 5)):
        cached = Cached(group, 64, block_size, torch.bfloat16)
        gap = (
            (cached.run(AttentionLayer(0)).double() - cached.expected(AttentionLayer(0)))
            .abs()
            .max()
        )
        assert 1e-5 < gap <= 2 * 2**-9 * cached.pools[1].abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_int8_cache_is_read_with_its_scales(kernel: AttentionLayer) -> None:
    cached = Cached(3, 24, 5)
    numbers, scales = quantise(
        cached.pools * torch.linspace(0.5, 2, cached.pools.shape[2], device=DEVICE)[:, None, None]
    )
    units = units_of(cached.positions, *cached.shared)
    out = decode_attention(
        cached.q, *numbers, cached.table, cached.positions, units, kernel, (scales[0], scales[1])
    )
    expected = cached.expected(kernel, dequantise(numbers, scales, torch.float32))
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_int8_write_is_quantise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(2, 7, 24, device=DEVICE) * torch.logspace(-5, 5, 7, device=DEVICE)[:, None]
    ).to(dtype)
    x[0, 2] = 0
    slots = torch.tensor([9, 0, 3, 17, 4, 5, 11], device=DEVICE)
    pool, scales = (
        torch.full((2, 5, 4, 24), 77, dtype=torch.int8, device=DEVICE),
        torch.zeros(2, 5, 4, 1, device=DEVICE),
    )
    write_int8(x, slots, pool, scales)
    numbers, expected = quantise(x)
    assert torch.equal(pool.flatten(1, 2)[:, slots], numbers) and torch.equal(
        scales.flatten(1, 2)[:, slots], expected
    )
    others = [i for i in range(20) if i not in slots.tolist()]
    assert (pool.flatten(1, 2)[:, others] == 77).all() and (
        scales.flatten(1, 2)[:, others] == 0
    ).all()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [61, 1024, 2500, 13000])
def test_the_sampler_draws_what_sample_draws(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(24, vocabulary, device=DEVICE) * 3
    noise = torch.rand(24, dtype=torch.float64).tolist()
    noise[:2] = [0.0, 1 - 2**-53]
    logits[0, 0] = -1e4  # its probability is 0, so noise 0 must pass it by
    logits[4, : vocabulary // 2] = -torch.inf  # of 13,000 tokens, a whole chunk that is not drawn
    logits[6, [5, vocabulary - 1]] = 50.0  # greedy: the first of two that are equal
    params = [
        SamplingParams(max_tokens=1, temperature=(1.0, 0.7, 0.0, 1.3)[i % 4]) for i in range(24)
    ]
    temperatures = torch.tensor([p.temperature for p in params], device=DEVICE)
    first, again = (
        fused_sample(logits, temperatures, torch.tensor(noise, dtype=torch.float64, device=DEVICE))
        for _ in range(2)
    )
    tokens, logp, _ = sampler._sample(logits, params, noise, [[]] * 24)
    assert torch.equal(first[0], tokens) and len(set(tokens.tolist())) > 12
    torch.testing.assert_close(first[1], logp, rtol=0, atol=1e-5)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("qwen3", "auto"), ("gemma2", "int8"), ("deepseek_v3", "auto"), ("gpt_oss", "auto")],
)
def test_an_engine_on_the_kernels_draws_the_same_tokens(
    name: str,
    kv_dtype: str,
    tiny: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw() -> dict[tuple[str, int], tuple[list[int], list[float]]]:
        model = CausalLM(tiny(name).to(DEVICE))
        engine = Engine(model, kv_tokens=400, block_size=4, kv_dtype=kv_dtype)  # type: ignore[arg-type]
        for i, prompt in enumerate(([3] * 9, [3] * 8 + [4] * 5)):
            engine.add(
                str(i),
                prompt,
                SamplingParams(
                    max_tokens=3, temperature=0.8, stop_token_ids=(END,), seed=VOCABULARY
                ),
                [0, 1],
            )
        return {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}

    expected = draw()
    cascades: list[int] = []

    def counting(*inputs: Tensor) -> list[triton_kernels.Units]:
        units = units_of(*inputs)
        cascades.append(len(units) - 1)
        return units

    for module in (model_runner, sampler, quantised_cache):
        monkeypatch.setattr(module, "triton_serves", lambda device: True)
    monkeypatch.setattr(triton_kernels, "units_of", counting)
    drawn = draw()
    assert sum(cascades) == 2  # of the decodes; prompts have units of their own
    assert {key: tokens for key, (tokens, _) in drawn.items()} == {
        key: tokens for key, (tokens, _) in expected.items()
    }
    for key, (_, logp) in drawn.items():
        np.testing.assert_allclose(
            logp, expected[key][1], rtol=0, atol=1e-4 if kv_dtype == "int8" else 1e-5
        )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv_dtype"), [("gemma2", "auto"), ("qwen3", "int8")])
def test_prompts_on_the_kernels_get_the_same_logits(
    name: str,
    kv_dtype: str,
    tiny: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole, in pieces behind what the cache holds, and one token alone, which is padded."""
    model = CausalLM(tiny(name).to(DEVICE))
    seen: list[int] = []

    def logits(chunked: bool) -> list[Tensor]:
        cache = (quantised_cache.Int8KVCache if kv_dtype == "int8" else model_runner.KVCache)(40, 4)
        runner = model_runner.ModelRunner(model, cache, None)
        found = []
        for texts in ([[5] * 1], [[2, 3, 4] * 5, [9] * 18, [8, 7]]):
            tickets = [
                Ticket(
                    Request("", text, SamplingParams(max_tokens=1), [0]),
                    text,
                    blocks=list(range(12 * i, 12 * i + 8)),
                )
                for i, text in enumerate(texts)
            ]
            cuts = [0, 11, 13] if chunked and len(texts) > 1 else [0]
            for start, stop in zip(cuts, [*cuts[1:], 99], strict=True):
                chunks = [
                    Chunk(t, t.blocks, start, min(stop, len(t.tokens)), start)
                    for t in tickets
                    if start < len(t.tokens)
                ]
                found.append(runner.prefill(chunks, everywhere=True))
        return [torch.cat(found[1:]), found[0]]

    expected = [logits(chunked) for chunked in (False, True)]
    attend = triton_kernels.decode_attention

    def counting(q: Tensor, *args: Any) -> Tensor:
        seen.append(len(q))
        return attend(q, *args)

    for module in (model_runner, quantised_cache):
        monkeypatch.setattr(module, "triton_serves", lambda device: True)
    monkeypatch.setattr(triton_layout, "decode_attention", counting)
    for chunked, theirs in zip((False, True), expected, strict=True):
        for ours, other in zip(logits(chunked), theirs, strict=True):
            torch.testing.assert_close(
                ours, other, rtol=0, atol=3e-4 if kv_dtype == "int8" else 1e-5
            )
    assert {35, 24, 16} <= set(seen)
    assert len(seen) == 2 * (2 + 4), (
        "one call for each layer of a forward, however long the prompts"
    )


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sixfold.kernels.triton import attention as kernels

def compiled(kernel, constants, **signature):
    names = kernel.arg_names
    types = {
        name: "constexpr" if name in constants else signature.get(name, "i32") for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

# otherwise there is a kernel for each 1 and multiple of 16
assert {"columns", "first_part", "parts", "split_keys"} <= set(kernels._attend.do_not_specialize)
positions = dict.fromkeys(("table", "positions", "members", "begin", "end"), "*i64")
numbers = dict(
    q="*bf16", keys="*i8", values="*i8", key_scales="*fp32", value_scales="*fp32", out="*fp32",
    lse="*fp32", scale="fp32", softcap="fp32"
)
shape = dict(
    MEMBERS=8, GROUP=2, ROWS=16, D=64, WIDTH=64, BLOCK_SIZE=16,
    TILE=64, INT8=True, SOFTCAP=True, WINDOW=True
)
assert compiled(kernels._attend, shape, **positions, **numbers)
numbers.update(keys="*bf16", values="*bf16")
plain = shape | dict(INT8=False, SOFTCAP=False, WINDOW=False)
assert compiled(kernels._attend, plain, **positions, **numbers)
merge = dict(PARTS=4, D=64, WIDTH=64)
assert compiled(kernels._merge, merge, out="*fp32", lse="*fp32", merged="*bf16")
pools = dict(x="*bf16", slots="*i64", pool="*i8", scales="*fp32")
assert compiled(kernels._write_int8, dict(D=64, WIDTH=64), **pools)
floats = dict.fromkeys(("logits", "temperatures", "tops", "sums", "logps"), "*fp32")
drawn = floats | dict(bests="*i32", masses="*fp64", noise="*fp64", tokens="*i64")
sizes = dict(CHUNK=4096, TILE=1024)
assert compiled(kernels._sum_chunk, sizes, **drawn)
assert compiled(kernels._weigh_chunk, sizes | dict(CHUNKS=64), **drawn)
assert compiled(kernels._draw, sizes | dict(CHUNKS=64), **drawn)
"""


SPILLS = """
import sys
sys.path.insert(0, sys.argv[1])
from spills import stack_bytes

cases = ("bfloat16", 8, 7, 128), ("bfloat16", 8, 7, 64), ("float32", 1, 6, 128)
for dtype, members, group, d in cases:
    stack, launch = stack_bytes(90, dtype, members, group, d)
    assert stack <= 64, (dtype, members, group, d, launch, stack)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_kernels_spill_no_registers(tmp_path: Path) -> None:
    """With 4 warps and tiles of 64 keys the first of these kept 1,528 bytes a thread in memory."""
    benchmarks = Path(__file__).parents[2] / "benchmarks" / "gpu"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SPILLS, str(benchmarks)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_triton_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    """The interpreter takes Python that the compiler refuses: types that change in a loop, names it
    may not read.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
