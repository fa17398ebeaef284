"""Attention on a GPU: what each kernel is asked, equality with a dense oracle, and no N x
N table.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import fused_kernels
import pytest
import torch
from fused_kernels import register_gpu
from phantom import largest_tensor
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sixfold.kernels import chunked_attention
from sixfold.kernels.attention import AttentionLayer, causal_attention
from sixfold.kernels.span_attention import choose_kernel
from sixfold.trainer.checkpointing import keep_result
from sixfold.trainer.segments import Segment, plan_calls, plan_spans

# The same oracles on a GPU, where there is one.
DEVICE = torch.device("cuda") if torch.cuda.is_available() else register_gpu()

# A prompt of 5 with three completions (one token, and longer ones), a lone text, a prompt of one
# token.
SEGMENTS = [
    Segment(0, 5),
    Segment(5, 6, 0, 5),
    Segment(6, 13, 0, 5),
    Segment(13, 22, 0, 5),
    Segment(22, 30),
    Segment(30, 31),
    Segment(31, 35, 30, 31),
]
LENGTH = 35
SINKS = torch.tensor([-1.5, 0.0, 1.0, 2.5])
KERNELS = [
    *(
        AttentionLayer(0),
        AttentionLayer(0, scale=0.3),
        AttentionLayer(0, window=4),
        AttentionLayer(0, softcap=2.0),
        AttentionLayer(0, window=3, softcap=1.5),
    ),
    *(AttentionLayer(0, sinks=SINKS), AttentionLayer(0, scale=0.3, window=4, sinks=SINKS)),
]
NAMES = ["plain", "scale", "window", "softcap", "window-softcap", "sinks", "window-sinks"]


def on(device: torch.device | str, kernel: AttentionLayer) -> AttentionLayer:
    """The kernel with its sinks, a parameter, on the device."""
    return (
        kernel
        if kernel.sinks is None
        else replace(kernel, sinks=kernel.sinks.detach().to(device).requires_grad_())
    )


def row(
    heads: int = 4, kv_heads: int = 2, size: int = 6, length: int = LENGTH, seed: int = 0
) -> list[Tensor]:
    """q, k, v and a gradient of the output, as a model's layer has them: [1, H, N, D]."""
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, h, length, size, generator=made) for h in (heads, kv_heads, kv_heads, heads)
    ]


def dense(
    q: Tensor, k: Tensor, v: Tensor, segments: list[Segment], kernel: AttentionLayer
) -> Tensor:
    """The slow way: one mask of the whole row, in float64. [1, H, N, D] -> [1, N, H, D]."""
    seen = torch.zeros(q.shape[2], q.shape[2], dtype=torch.bool)
    place = torch.zeros(q.shape[2], dtype=torch.long)
    for s in segments:
        place[s.start : s.stop] = s.prefix + torch.arange(s.length)
        seen[s.start : s.stop, s.start : s.stop] = True
        seen[s.start : s.stop, s.prefix_start : s.prefix_stop] = True
    gap = place[:, None] - place
    seen &= (gap >= 0) & (gap < (kernel.window or 10**9))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).double() for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * (kernel.scale or q.shape[-1] ** -0.5)
    if kernel.softcap:
        scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if kernel.sinks is not None:
        scores = torch.cat(
            [scores, kernel.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1
        )
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def with_gradients(attend, tensors: list[Tensor], device: torch.device | str) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Output and gradients of q, k and v, on the CPU."""
    *inputs, grad = (x.detach().to(device) for x in tensors)
    for x in inputs:
        x.requires_grad_()
    out = attend(*inputs)
    out.backward(grad.transpose(1, 2).to(out.dtype))
    return [x.cpu().double() for x in (out.detach(), *(x.grad for x in inputs))]


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float32_equals_the_dense_oracle(kernel: AttentionLayer, kv_heads: int) -> None:
    tensors = row(kv_heads=kv_heads)
    plan, on_gpu, on_cpu = plan_spans(SEGMENTS, DEVICE), on(DEVICE, kernel), on("cpu", kernel)
    ours = with_gradients(lambda q, k, v: plan.attend(q, k, v, on_gpu), tensors, DEVICE)
    truth = with_gradients(lambda q, k, v: dense(q, k, v, SEGMENTS, on_cpu), tensors, "cpu")
    if on_gpu.sinks is not None and on_cpu.sinks is not None:
        ours, truth = (
            [*ours, on_gpu.sinks.grad.cpu().double()],
            [
                *truth,
                on_cpu.sinks.grad.double(),
            ],
        )
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_bfloat16_equals_the_dense_oracle_up_to_its_rounding(kernel: AttentionLayer) -> None:
    tensors = [x.bfloat16() for x in row(size=16)]
    plan, on_gpu = plan_spans(SEGMENTS, DEVICE), on(DEVICE, kernel)
    ours = with_gradients(lambda q, k, v: plan.attend(q, k, v, on_gpu), tensors, DEVICE)
    truth = with_gradients(lambda q, k, v: dense(q, k, v, SEGMENTS, kernel), tensors, "cpu")
    for a, b in zip(ours, truth, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


def test_the_plans_of_cpu_and_gpu_agree() -> None:
    """Random rows: what the CPU's calls and buckets give is what one call of spans gives."""
    rng = random.Random(0)
    for trial in range(5):
        segments, at = [], 0
        for _ in range(3):
            prompt = (at, at := at + rng.randint(1, 6))
            segments.append(Segment(*prompt))
            for _ in range(rng.randint(0, 3)):
                segments.append(Segment(at, at := at + rng.randint(1, 8), *prompt))
        q, k, v, _ = row(length=at, seed=trial)
        for kernel in KERNELS:
            ours = plan_spans(segments, DEVICE).attend(
                q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), on(DEVICE, kernel)
            )
            theirs = plan_calls(segments, torch.device("cpu")).attend(q, k, v, kernel)
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_batches_of_equal_rows(kernel: AttentionLayer) -> None:
    """Without a layout a model's rows are a batch: the same numbers on both devices."""
    q, k, v = (torch.cat([x, x.flip(2)]) for x in row()[:3])
    ours = causal_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), on(DEVICE, kernel))
    torch.testing.assert_close(ours.cpu(), causal_attention(q, k, v, kernel), atol=1e-5, rtol=1e-5)


def test_values_may_be_of_another_size_than_keys() -> None:
    q, k, v, _ = row(size=6)
    wide = torch.cat([v, v.flip(-1)], -1)
    plan = plan_spans(SEGMENTS, DEVICE)
    for kernel in KERNELS:
        ours = plan.attend(q.to(DEVICE), k.to(DEVICE), wide.to(DEVICE), on(DEVICE, kernel))
        torch.testing.assert_close(
            ours.cpu().double(), dense(q, k, wide, SEGMENTS, kernel), atol=1e-5, rtol=1e-5
        )


def test_autocast_computes_in_its_dtype_whatever_comes() -> None:
    """Rotated queries and keys come as float32 under autocast; flash would refuse them."""
    q, k, v, _ = (x.to(DEVICE) for x in row(size=16))
    plan = plan_spans(SEGMENTS, DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        for kernel in KERNELS:
            assert plan.attend(q, k, v.bfloat16(), on(DEVICE, kernel)).dtype is torch.bfloat16


EVERY = frozenset({"flash", "efficient", "chunked"})
OLD = EVERY - {"flash"}
BF16, F32 = torch.bfloat16, torch.float32
CHOICES = [
    ((EVERY, BF16, 128, None, None), "flash"),
    ((EVERY, BF16, 128, 512, None), "flash"),
    ((EVERY, torch.float16, 256, None, None), "flash"),
    ((EVERY, BF16, 208, None, None), "efficient"),
    ((EVERY, BF16, 576, None, None), "efficient"),
    ((EVERY, BF16, 576, 512, None), "chunked"),
    ((EVERY, BF16, 128, None, 50.0), "chunked"),
    ((EVERY, F32, 128, None, None), "efficient"),
    ((EVERY, F32, 128, 512, None), "chunked"),
    ((EVERY, torch.float64, 128, None, None), "chunked"),
    ((OLD, BF16, 128, None, None), "efficient"),
    ((frozenset({"chunked"}), BF16, 128, None, None), "chunked"),
]


@pytest.mark.parametrize(("asked", "choice"), CHOICES)
def test_choice_of_kernel(asked: tuple, choice: str) -> None:  # type: ignore[type-arg]
    assert choose_kernel(*asked) == choice


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("table", [1 << 24, 40])
def test_the_chunked_gradient_is_exact(
    sunk: bool, softcap: float | None, window: int | None, table: int,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """In float64 on the CPU, in one chunk and in chunks of one or a few queries."""
    monkeypatch.setattr(chunked_attention, "TABLE", table)
    made = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, h, 3, dtype=torch.float64, generator=made).requires_grad_()
        for n, h in ((9, 4), (13, 2), (13, 2))
    )
    lengths, sinks = ((4, 8), (5, 5)), [SINKS.double().requires_grad_()] if sunk else []

    def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        return chunked_attention.chunked_attention(q, k, v, lengths, 0.7, window, softcap, *sinks)

    assert torch.autograd.gradcheck(attend, (q, k, v, *sinks), fast_mode=True)


LONG = 8192
LONG_KERNELS = [
    *((BF16, AttentionLayer(0)), (F32, AttentionLayer(0)), (F32, AttentionLayer(0, window=1000))),
    (BF16, AttentionLayer(0, softcap=2.0, sinks=torch.ones(1))),
]
LONG_SEGMENTS = [Segment(0, 2048), Segment(2048, 5120, 0, 2048), Segment(5120, LONG, 0, 2048)]


@pytest.mark.parametrize(("dtype", "kernel"), LONG_KERNELS)
def test_no_table_of_n_by_n_at_8192_tokens(
    dtype: torch.dtype, kernel: AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither made, nor kept by selective checkpointing; masks counted as well."""
    monkeypatch.setattr(chunked_attention, "TABLE", 1 << 21)
    # The numbers do not matter here, and to stand in for the kernels takes long.
    monkeypatch.setattr(
        fused_kernels,
        "_forward",
        lambda q, *_: (torch.zeros_like(q), torch.zeros(q.shape[1], len(q))),
    )
    monkeypatch.setattr(
        fused_kernels, "_backward", lambda grad, q, k, v, *_: (q.clone(), k.clone(), v.clone())
    )
    q, k, v, grad = (x.to(DEVICE, dtype) for x in row(1, 1, 8, LONG))
    for x in (q, k, v):
        x.requires_grad_()
    kept: Counter[str] = Counter()

    def policy(context, op, *args, **kwargs):  # type: ignore[no-untyped-def]
        wanted = keep_result(context, op, *args, **kwargs)
        kept[op.name().split("::")[1]] += wanted.name == "MUST_SAVE" and not context.is_recompute
        return wanted

    kernel = on(DEVICE, kernel)
    with largest_tensor() as seen:
        plan = plan_spans(LONG_SEGMENTS, DEVICE)
        out = checkpoint(
            lambda *x: plan.attend(*x, kernel),
            q,
            k,
            v,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        out.backward(grad.transpose(1, 2))
    assert seen.elements <= LONG * LONG // 32, seen
    assert (
        sum(
            kept[name]
            for name in ("_varlen_attn", "_efficient_attention_forward", "chunked_attention")
        )
        == 1
    )


def test_selective_checkpointing_keeps_no_scores() -> None:
    """A batched product is kept if it is no larger than its factors: an expert's, not a table of
    scores.
    """
    bmm = torch.ops.aten.bmm.default
    q, k = torch.empty(2, 64, 8), torch.empty(2, 8, 64)
    scores, v = torch.empty(2, 64, 64), torch.empty(2, 64, 8)
    assert keep_result(None, bmm, q, k).name == "PREFER_RECOMPUTE"
    assert keep_result(None, bmm, scores, v).name == "MUST_SAVE"
    assert keep_result(None, torch.ops.aten.mm.default, q[0], k[0]).name == "MUST_SAVE"
