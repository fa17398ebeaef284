"""Losses that learn from preferences: each is a row of `zoo.py` on one margin.

`loss.py` defines what a row is, `losses.py` has the formulas, `statistics.py` what belongs to a
whole step, and `mixture.py` the weighted sum that a stage trains. `loss.py` and `zoo.py` do not
import torch.
"""
