"""How fast this machine multiplies matrices, measured in the run whose results it is held
against.
"""

from __future__ import annotations

import time

THREADS = 2
SUSTAINED_S = 2.0


def matmul_gflops() -> float:
    """Best rate of a float32 matmul in GFLOP/s: a large square one, and the benchmark model's own
    shapes on 4096 tokens.
    """
    import torch

    torch.set_num_threads(THREADS)
    best = 0.0
    for m, k, n in ((2048, 2048, 2048), (4096, 256, 704), (4096, 704, 256), (4096, 256, 256)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        a @ b
        for _ in range(10):
            start = time.perf_counter()
            a @ b
            best = max(best, 2 * m * k * n / (time.perf_counter() - start) / 1e9)
    return best


def sustained_gflops() -> list[float]:
    """Rates of a large float32 matmul in GFLOP/s, call after call for SUSTAINED_S. Beside other
    tenants a machine gives its best rate for a tenth of a second and much less for longer, and no
    engine does all its work in the best tenth."""
    import torch

    torch.set_num_threads(THREADS)
    a, rates, n = torch.randn(1024, 1024), [], 1024
    end = time.perf_counter() + SUSTAINED_S
    while (start := time.perf_counter()) < end:
        a @ a
        rates.append(2 * n**3 / (time.perf_counter() - start) / 1e9)
    return rates
