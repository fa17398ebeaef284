"""Roofline of the output head: sums by hand, and what it says about an H100."""

from __future__ import annotations

import pytest

from sixfold_planning.head_time import HeadKernel, head_kernels, head_time

H100 = {"flops_per_second": 989e12, "bytes_per_second": 3.35e12}


def parts(kernels: tuple[HeadKernel, ...]) -> dict[str, tuple[float, float]]:
    return {kernel.name: (kernel.flops, kernel.moved) for kernel in kernels}


def small(chunk: int, *, trained: bool = True) -> dict[str, tuple[float, float]]:
    """5 tokens, 8 vocabulary entries, 3 hidden numbers of 2 bytes: weight 24, logits 40, states 15.

    A product has 2 x 5 x 8 x 3 = 240 FLOPs.
    """
    return parts(
        head_kernels(tokens=5, vocabulary=8, hidden=3, width=2, chunk=chunk, trained=trained)
    )


def test_whole_logits_by_hand() -> None:
    assert small(0) == {
        "logits": (240, 2 * (24 + 15 + 40)),
        "log-softmax": (160, 40 * 2 + 40 * 4),
        "gradient of logits": (80, 40 * 4 + 40 * 2),
        # Two products read the gradient; one reads the weights and writes 15, one reads 15 and
        # writes a float32 weight gradient.
        "backward products": (480, 2 * 40 * 2 + 2 * 24 + 2 * 15 + 2 * 15 + 4 * 24),
    }


def test_chunks_of_two_tokens_by_hand() -> None:
    """Chunks of 2, 2 and 1 tokens: the weights are read three times, 4 tokens computed again."""
    assert small(2) == {
        "logits": (240, 2 * (3 * 24 + 15 + 40)),
        "log-softmax": (160, 40 * 2),
        "logits again": (2 * 4 * 24, 2 * (2 * 24 + 4 * 3 + 4 * 8)),
        "gradient of logits": (80, 40 * 2 + 40 * 2),
        "backward products": (480, 2 * 40 * 2 + 3 * 24 * 2 + 2 * 15 + 2 * 15 + 4 * 24 * (3 + 2)),
    }


def test_a_frozen_head_has_no_gradient_of_its_weight() -> None:
    assert small(0, trained=False)["backward products"] == (240, 2 * 40 + 2 * 24 + 2 * 15)
    assert small(2, trained=False)["backward products"] == (240, 2 * 40 + 3 * 2 * 24 + 2 * 15)


def test_one_chunk_computes_nothing_again() -> None:
    assert "logits again" not in small(5) and "logits again" not in small(9)
    assert sum(flops for flops, _ in small(5).values()) == sum(
        flops for flops, _ in small(0).values()
    )


def llama(chunk: int, tokens: int = 8192) -> tuple[HeadKernel, ...]:
    return head_kernels(
        tokens=tokens, vocabulary=128256, hidden=4096, width=2, chunk=chunk, trained=True
    )


def test_products_are_limited_by_compute_and_the_softmax_by_memory() -> None:
    """L25: the products of training are compute-bound, cross-entropy is memory-bound."""
    bound = {kernel.name for kernel in llama(1024) if kernel.memory_bound(**H100)}
    assert bound == {"log-softmax", "gradient of logits"}


def test_small_chunks_read_the_weights_too_often() -> None:
    """A chunk of c tokens has about c FLOPs per byte, and the knee of an H100 is at 295."""
    for chunk, memory in ((128, True), (256, True), (512, False)):
        logits = next(kernel for kernel in llama(chunk) if kernel.name == "logits")
        assert logits.memory_bound(**H100) is memory
    fine, usual = (head_time(llama(chunk), **H100).seconds for chunk in (64, 1024))
    assert fine > 2 * usual


def test_chunks_cost_a_third_more_flops_and_save_traffic() -> None:
    tokens = 1 << 20
    whole, chunked = (head_time(llama(chunk, tokens), **H100) for chunk in (0, 4096))
    assert chunked.flops / whole.flops == pytest.approx(4 / 3, rel=0.005)
    assert chunked.memory_seconds < whole.memory_seconds
    # 12 bytes per logit: 2 + 4 read or written by log-softmax, 4 + 2 by its gradient.
    assert whole.memory_seconds == pytest.approx(tokens * 128256 * 12 / 3.35e12)
    assert chunked.memory_seconds == pytest.approx(tokens * 128256 * 6 / 3.35e12)
    products = 6 * tokens * 128256 * 4096 / 989e12
    assert whole.seconds == pytest.approx(products + whole.memory_seconds)
