"""How old the samples of an asynchronous run may get.

Groups are numbered from 0 in the order of the task stream: step s of a synchronous run trains the
groups (s - 1) P to s P - 1, with P groups per step. With staleness S, more groups may be open:

    admission   group g may start once  g < trained + (S + 1) P
                (the capacity of AReaL, arXiv:2505.24298, with accepted = trained, also after a
                resume, so a resume starts no burst)
    window      a step takes finished groups from the W oldest numbers that are not trained
                (torchtitan's windowed FIFO)

Nothing is dropped for its age or its length, so trained samples are as long as sampled ones. A
group is dropped for its rewards alone: all its checks failed (`rollout.max_failures`), or its
rewards are equal (`algorithm.dynamic_sampling`). Then a later group takes its place.

**Bound.** The age of a group is the number of steps that end between its start and the step that
trains it. It is at most S + ceil((W - 1) / P). When group g starts, trained > g - (S + 1) P, and
trained is a multiple of P, so at least floor(g / P) - S steps have ended. Group g is trained at the
latest when it is the oldest. Then all g before it are trained, and at most W - 1 after it. So the
step that trains it begins when at most floor((g + W - 1) / P) steps have ended. The difference is
at most S + ceil((W - 1) / P). With S = 0 only the P groups of the step are open, and the age is 0.

With D groups dropped so far, g may start once g < trained + D + (S + 1) P. All dropped ones have
smaller numbers, so with g - D for g the group starts by the same rule. D only grows, so at most
(g - D) + W - 1 groups are trained before g is, and the bound holds.
"""

from __future__ import annotations


def window_groups(per_step: int, staleness: int, share: float) -> int:
    """Groups of the window (W), at least one.

    Args:
        per_step: groups per step (P).
        staleness: S.
        share: share of the (S + 1) P open groups.
    """
    return max(1, int(share * (staleness + 1) * per_step))


def largest_age(per_step: int, staleness: int, window: int) -> int:
    """Bound of the age of a group when it is trained, in steps.

    Args:
        per_step: groups per step (P).
        staleness: S.
        window: groups of the window (W).
    """
    return staleness + -(-(window - 1) // per_step) if staleness else 0


def replayed_groups(share: float, new: int) -> int:
    """Groups that a step replays, if the buffer has as many.

    Args:
        share: share of the step's groups that are replayed.
        new: new groups of the step.
    """
    return round(share / (1 - share) * new)
