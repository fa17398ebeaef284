"""Rewards from a judging model.

`judge.py` sends questions to the model through `client.py` and stores the answers (`store.py`). The
rewards are in `rubric.py`, `reference.py`, `pairwise.py` and `constitution.py`. `critique.py` makes
preference pairs. `defence.py` protects the judge from hostile completions.
"""
