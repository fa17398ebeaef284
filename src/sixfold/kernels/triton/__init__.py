"""Triton kernels. Importing one needs Triton, which the base install lacks."""
