"""The program of a process with reward models (`processes/program.py`).

The first request names the models as JSON; its answer is empty, or names the problem for which they
cannot be loaded. Every other request is an `Asked`, and its answer the rewards by each model.
"""

from __future__ import annotations

import json
import os

import torch

from ..errors import UserError
from ..model.device import resolve_device
from ..processes.program import Requests
from ..recipe.schema import RewardScoringConfig
from .asked import Asked
from .reward import load_scorers, rewards_of


def serve(requests: Requests) -> None:
    """Answer requests until the parent closes its end."""
    setup = json.loads(next(requests))
    torch.set_num_threads(setup["threads"])
    config = RewardScoringConfig.model_validate_json(json.dumps(setup["config"]))
    try:
        resolve_device(config.device, "environment.reward_model.device")  # of kernels too
        scorers = load_scorers(setup["paths"], config, "environment.rewards")
    except UserError as error:
        requests.answer(json.dumps({"problem": str(error)}).encode())
        return
    requests.answer(b"{}")
    for body in requests:
        try:
            asked = Asked(**json.loads(body))
            answer = {"rewards": [rewards_of(scorer, asked).tolist() for scorer in scorers]}
        except UserError as error:
            requests.answer(json.dumps({"problem": str(error)}).encode())
        except Exception:  # noqa: BLE001  boundary: the parent raises it
            requests.fail()
        else:
            requests.answer(json.dumps(answer).encode())
    os._exit(0)  # nothing to flush, and an interpreter with torch takes a second to shut down
