"""Arithmetic of planning: memory, time and cost of a run before it starts. No torch.

Formulas take bytes, seconds, tokens and floating-point operations, without prefixes: 1 GB is 1e9.
Names say where a table has other units, such as `memory_gb`.
"""
