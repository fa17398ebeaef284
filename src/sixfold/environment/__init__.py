"""The environment: checks answers and gives rewards. It imports `types` and `errors`, never torch.

`scorer.Environment` implements the role. It runs named rewards (`rewards`) in a pool of killable
processes (`pool`, `worker`). Built-in rewards: `arithmetic`, `maths/` and `gym`. `preflight` says
whether the tasks are worth training on, and whether rewards can be earned without solving them.
"""
