"""RLOO: REINFORCE, leave one out (Kool, van Hoof, Welling 2019; for language models
arXiv:2402.14740).

    A_i = r_i - mean_{j != i} r_j  =  K / (K - 1) (r_i - mean)          loss = - (1 / B) sum_i A_i
    sum_t log pi(o_it)

Patches REINFORCE in advantage. The baseline of a sample is the mean of the others. Since r_i is not
in its own baseline the gradient stays unbiased, where the mean of all K is short by the factor (K
- 1) / K. No ratio, no clip, no std, no length norm. It costs K >= 2 samples a prompt, and its scale
  is the reward's: rewards times 100 are a learning rate times 100.

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


if __name__ == "__main__":
    from ..run.shared_task import main

    main("rloo")
