"""The environment: checks answers and says what they are worth. Imports `types` and `errors` of ours, and never torch.

Cast: `scorer.Environment` is the role; it hands named rewards (`rewards`) to a pool of killable processes (`pool`, `worker`).
The rewards that come with it: `arithmetic`, `math_answers` (with `math_extraction`, `math_numbers`, `math_algebra`) and `gym`.
`preflight` says whether the tasks are worth training on, and whether a reward can be had for nothing.
"""
