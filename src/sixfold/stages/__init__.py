"""Stages of a run: the kinds, their artifacts, and the driver that runs a list of them.

The recipe's side is `recipe/stages.py`. Each stage is a run of its own, in `RUN/stages/NAME/`.
"""
