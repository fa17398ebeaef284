"""Rewards that a judging model gives.

`judge.py` asks the model, through `client.py`, and remembers its answers (`store.py`). The forms of
judging are `rubric.py`, `reference.py`, `pairwise.py` and `constitution.py`; `critique.py` makes
preference pairs. `defence.py` treats a completion as data that may be hostile.
"""
