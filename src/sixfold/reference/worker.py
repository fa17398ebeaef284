"""The program of a scoring process (`processes/program.py`).

The first request is the model as JSON (see `Setup`); its answer is empty. A later empty request
reports that the weights have changed; its answer is empty too. Every other request is a batch, and
its answer is the batch's log-probs, both as safetensors.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from ..batch import Batch, KeptSets
from ..model.empty import Architecture, copy_buffers
from ..model.half_weights import store_in_bfloat16
from ..processes.program import Requests
from ..trainer.logprobs import Scoring, score_batch
from .shared_weights import DTYPES, Place, map_tensors

FIELDS = ("tokens", "mask", "lengths", "prompt_lengths", "group")
"""Fields of a batch that decide its log-probs. KEPT is added if sampling was truncated."""
KEPT = ("ids", "start", "count")


@dataclass(frozen=True)
class Setup:
    """The model to build, and how it scores.

    Attributes:
        weights: file descriptor of the shared tensors.
        places: their locations in it.
        chunk: positions per chunk of logits.
        autocast: name of a dtype. Empty: the dtype of the weights.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.
    """

    architecture: Architecture
    weights: int
    places: list[Place]
    device: str
    threads: int
    temperature: float
    chunk: int
    autocast: str
    max_tokens: int
    share_prefix: bool

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Setup:
        """The inverse of `to_bytes`."""
        record = json.loads(data)
        return cls(
            **{
                **record,
                "architecture": Architecture(**record["architecture"]),
                "places": [Place(*place) for place in record["places"]],
            }
        )


class Scorer:
    """The frozen model in this process, on weights that the parent maps too."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._setup = setup
        self._shared = map_tensors(setup.weights, setup.places)
        self._model = setup.architecture.build(
            "reference.placement = 'inline', which builds no second model"
        )
        self._model.to(setup.device)  # type: ignore[arg-type]
        copy_buffers(self._model, self._shared)
        self._scoring = Scoring(
            setup.temperature, setup.chunk, DTYPES[setup.autocast] if setup.autocast else None
        )
        self.take_weights()
        if any(p.dtype == torch.bfloat16 for p in self._model.parameters()):
            store_in_bfloat16(self._model)

    def take_weights(self) -> None:
        """Use the current shared weights: in place on a CPU, as a copy on another device."""
        for name, parameter in self._model.named_parameters():
            parameter.data = self._shared[name].to(self._setup.device)

    def score(self, fields: dict[str, Tensor]) -> Tensor:
        """Log-probs [B, T] of the batch with the given FIELDS, and KEPT if present."""
        nothing = torch.zeros(fields["tokens"].shape)
        kept = KeptSets(*(fields[name] for name in KEPT)) if KEPT[0] in fields else None
        layout: dict[str, Any] = {name: fields[name] for name in FIELDS}
        batch = Batch(**layout, old_logp=nothing, version=nothing, rewards=nothing, kept=kept).to(
            self._setup.device
        )
        return score_batch(
            self._model, batch, self._scoring, self._setup.max_tokens, self._setup.share_prefix
        ).cpu()


def serve(requests: Requests) -> None:
    """Answer requests until the parent closes its end."""
    scorer = Scorer(Setup.from_bytes(next(requests)))
    requests.answer()
    for body in requests:
        try:
            if body:
                reply = bytes_of({"logp": scorer.score(tensors_of(body))})
            else:
                scorer.take_weights()
                reply = b""
        except Exception:  # noqa: BLE001  boundary: the parent raises it
            requests.fail()
        else:
            requests.answer(reply)
    os._exit(0)  # nothing to flush, and an interpreter with torch takes a second to shut down
