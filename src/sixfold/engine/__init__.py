"""Embedded inference engine: scheduler, block manager, model runner and sampler.

The engine maps token prompts to token completions. It is independent of tasks, rewards and
training. Within the project it imports `model`, `kernels` and `types` only.
"""
