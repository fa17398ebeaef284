"""Kernels: C for CPUs (`cpu/`), Triton for GPUs (`triton/`), attention in PyTorch, and RMSNorm with
a hand-written backward pass (`norms`)."""
