"""A scoring process: `python -m sixfold.reference.worker REQUESTS REPLIES WEIGHTS`.

The arguments are file descriptors. Protocol: a message is a letter, a length and that many bytes.
Every request has one reply.

Requests: M, the model as JSON (see `Setup`); B, a batch (safetensors); W, the weights have changed.
Replies: L, log-probs (safetensors); K, done; E, an error as text.

The process ends when the parent's end of the pipe closes, however the parent ended.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..batch import Batch, KeptSets
from ..model.attention import NAME, register
from ..trainer.logprobs import Scoring, score_batch
from .shared_weights import DTYPES, Place, mapped

HEADER = struct.Struct("!cQ")
FIELDS = ("tokens", "mask", "lengths", "prompt_lengths", "group")
"""Fields of a batch that decide its log-probs. KEPT is added if sampling was truncated."""
KEPT = ("ids", "start", "count")


@dataclass(frozen=True)
class Setup:
    """The model to build, and how it scores.

    Attributes:
        architecture: class name of the parent's model.
        config: configuration of the Hugging Face model, as JSON.
        places: locations of the shared tensors.
        parameters: names of the parameters, in order.
        device: device of the model.
        threads: CPU threads.
        temperature: sampling temperature.
        chunk: positions per chunk of logits.
        autocast: name of a dtype. Empty: the dtype of the weights.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.
    """

    architecture: str
    config: dict[str, Any]
    places: list[Place]
    parameters: list[str]
    device: str
    threads: int
    temperature: float
    chunk: int
    autocast: str
    max_tokens: int
    share_prefix: bool

    def to_bytes(self) -> bytes:
        """The setup as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Setup:
        """The inverse of `to_bytes`."""
        record = json.loads(data)
        return cls(**{**record, "places": [Place(*place) for place in record["places"]]})


def send(descriptor: int, letter: bytes, body: bytes = b"") -> None:
    """Write one message.

    Raises:
        BrokenPipeError: if the reader has closed its end.
    """
    message = memoryview(HEADER.pack(letter, len(body)) + body)
    while message:
        message = message[os.write(descriptor, message) :]


def receive(stream: IO[bytes]) -> tuple[bytes, bytes] | None:
    """The next message, or None if the other side has closed its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    letter, length = HEADER.unpack(header)
    body = stream.read(length)
    return (letter, body) if len(body) == length else None


class Scorer:
    """The frozen model in this process, on weights that the parent maps too."""

    def __init__(self, setup: Setup, descriptor: int) -> None:
        torch.set_num_threads(setup.threads)
        self._setup = setup
        self._shared = mapped(descriptor, setup.places)
        self._model = _build(setup).to(setup.device)  # type: ignore[arg-type]
        for name, buffer in self._model.named_buffers():
            if name in self._shared:
                buffer.copy_(self._shared[name])
        self._scoring = Scoring(
            setup.temperature, setup.chunk, DTYPES[setup.autocast] if setup.autocast else None
        )
        self.take_weights()

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


def _build(setup: Setup) -> PreTrainedModel:
    """Build the architecture with random weights.

    Raises:
        ValueError: if its class or parameters differ from those of the parent's model.
    """
    register()
    config = AutoConfig.for_model(**setup.config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    if type(model).__name__ != setup.architecture or names != setup.parameters:
        raise ValueError(
            f"{setup.architecture} cannot be built from its configuration alone:"
            " reference.placement = 'inline' needs no second one"
        )
    model.set_attn_implementation(NAME)
    return model.requires_grad_(False).eval()


def serve(requests: IO[bytes], replies: int, weights: int) -> None:
    """Answer requests until the parent closes its end."""
    scorer: Scorer | None = None
    while message := receive(requests):
        letter, body = message
        try:
            if scorer is None:
                scorer, reply = Scorer(Setup.from_bytes(body), weights), (b"K", b"")
            elif letter == b"W":
                scorer.take_weights()
                reply = b"K", b""
            else:
                reply = b"L", bytes_of({"logp": scorer.score(tensors_of(body))})
        except Exception:  # noqa: BLE001  boundary: the parent raises it
            reply = b"E", traceback.format_exc().encode()
        send(replies, *reply)
        if scorer is None:
            return  # without a model no request can be answered


def main() -> None:
    """Entry point of the process."""
    # BrokenPipeError: the parent ended while this process was scoring.
    with os.fdopen(int(sys.argv[1]), "rb") as requests, suppress(BrokenPipeError):
        serve(requests, int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # nothing to flush, and an interpreter with torch takes a second to shut down


if __name__ == "__main__":
    main()
