"""Sixfold's side of `dpo_step.py`: `sixfold train` on a recipe with a stage of kind preference."""

from __future__ import annotations

import sys

from sft_job import BETA
from sft_step_sixfold import train

if __name__ == "__main__":
    path, reference = sys.argv[1:]
    changes = f'preference.reference = "{reference}"\npreference.beta = {BETA}\n'
    train(path, "preference", changes)
