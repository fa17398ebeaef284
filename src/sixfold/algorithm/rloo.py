"""RLOO: REINFORCE, leave one out (arXiv:2402.14740).

First described by Kool, van Hoof, Welling 2019.

    A_i  = r_i - mean_{j != i} r_j  =  K / (K - 1) (r_i - mean)
    loss = - (1 / B) sum_i A_i sum_t log pi(o_it)

Patches REINFORCE in advantage. The baseline of a sample is the mean reward of the other samples.
Because r_i is not in its own baseline, the gradient is unbiased. With the mean of all K samples it
would be too small by the factor (K - 1) / K. There is no ratio, no clip, no std and no
normalisation by length.

It costs K >= 2 samples per prompt. Its scale is that of the rewards: multiplying the rewards by 100
is like multiplying the learning rate by 100.

Runs alone on the shared task: python -m sixfold.algorithm.rloo
"""

from __future__ import annotations

from dataclasses import replace

from .method import Method
from .reinforce import REINFORCE

RLOO: Method = replace(
    REINFORCE,
    name="rloo",
    patches="reinforce",
    paper="arXiv:2402.14740 eq. 8",
    advantage="leave_one_out",
)
