"""Reward models: a scalar head on a body, trained on comparisons or labels, and used as a reward.

rows.py        rows of comparisons, and the score of each row
losses.py      per-pair and per-completion losses
objective.py   loss of a step, and the report on held-out comparisons
quality.py     figures of the report
calibration.py offset, scale and length slope, stored with the model
model.py       make, save and load
scorer.py      scores of completions
reward.py      reward models among `environment.rewards`
asked.py       what they are asked
worker_models.py, worker.py  reward models in a process of their own
served.py      reward models that servers score with
step_*.py      the same of process reward models, whose scores are read at the end of every step
"""
