"""Code rewards: the candidate runs in a sandbox, and the trusted side compares its outputs.

`reward` has the rewards `code` and `code_fraction`. `fences` extracts the code from a completion,
`task_tests` reads the tests of a task, `candidate` runs the code on inputs, `compare` judges
outputs, and `verifier` combines them. `harness` and `test_program` run inside the sandbox.

Invariants:

- Expected values never enter the sandbox of the candidate: it gets inputs and returns values.
- The sandbox of the candidate sends claims about outputs. Code that forges replies gains nothing,
  because it would have to know the right outputs.
- Values cross as size-capped JSON with exact types (`wire`), never as objects.
- A failure of the sandbox or of the tests is an infrastructure error, never a reward.
"""
