"""Data: load tasks from a file, a folder, the hub or a generator. Does not import torch.

`sources` loads, `files` reads, `rows` makes tasks.
"""
