"""Arithmetic of planning: memory, time and cost of a run before it starts. No torch.

Formulas take bytes, seconds, tokens and floating-point operations, without prefixes: 1 GB is 1e9.
Names say where a table has other units, such as `memory_gb`. Some names mean the same everywhere:
`arch` is the model, `device` the accelerator, `cluster` the devices, `work` the work of a step,
`inputs` the recipe with model and work, and `k` the fitted constants.
"""
