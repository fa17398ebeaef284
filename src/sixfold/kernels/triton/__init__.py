"""Triton kernels. Importing them needs Triton, which the base install does not include."""
