"""The environment: what gives rewards. No torch.

What an author writes: an episode of several turns (`episode`), or a reward function in one of the
forms that `callables` tells apart; it may return a `Grade`. `registry` has the rows by which
packages add theirs, `named` finds those of a user. `base` is the contract of the role, which
`sixfold.checks` implements. `preflight` says whether the tasks are worth training on, and whether
rewards can be earned without solving them.
"""
