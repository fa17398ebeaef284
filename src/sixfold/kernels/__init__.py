"""Kernels: C for CPUs (`cpu/`), Triton for GPUs (`triton/`), and RMSNorm with its own backward pass (`norms`)."""
