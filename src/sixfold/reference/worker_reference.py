"""Reference in a separate process that scores while the environment checks answers.

Parts: `WorkerReference` sends requests and collects replies; `worker.py` is the process;
`shared_weights.py` is the memory that both map. There is only one copy of the weights, and a reset
needs only a message to read them again.

Invariants: at most one batch is being scored, and `score` always returns the result for the batch
that it was given. The process ends when the run ends, for any reason (`processes/child.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batch import Batch, collate
from ..errors import RunFailed
from ..model.empty import Architecture
from ..processes.child import Child, ChildEnded, ChildSilent, RequestFailed
from ..processes.deadline import Deadline
from ..trainer.logprobs import Scoring
from ..types import Group
from .shared_weights import map_tensors, share
from .weights import FrozenWeights
from .worker import FIELDS, KEPT, Setup

_WEIGHTS_CHANGED = b""


class ReferenceFailed(RuntimeError):
    """The scoring process raised an exception. The message states the cause."""


class ReferenceEnded(RunFailed):
    """The scoring process has ended."""


class WorkerReference(FrozenWeights):
    """Frozen copy of the policy, scored by a process with `threads` CPU threads.

    The process uses the policy's device. Values equal those of `FrozenReference`: bit for bit on a
    CPU with the same number of threads, otherwise up to the rounding of sums (1e-6 nats in
    float32).

    Args:
        scoring: sampling temperature, chunk size and precision.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.
        silence_s: longest wait for the scores of one batch, or for the start of the process.
    """

    scorer = None

    def __init__(
        self,
        policy: PreTrainedModel,
        scoring: Scoring,
        max_tokens: int,
        share_prefix: bool,
        threads: int,
        silence_s: float,
    ) -> None:
        parameters = dict(policy.named_parameters())
        buffers = {name: buffer for name, buffer in policy.named_buffers() if buffer.numel()}
        self._file, places = share({**parameters, **buffers})
        shared = map_tensors(self._file.fileno(), places)
        super().__init__({name: shared[name] for name in parameters})
        setup = Setup(
            architecture=Architecture.of(policy),
            weights=self._file.fileno(),
            places=places,
            device=str(next(policy.parameters()).device),
            threads=threads,
            temperature=scoring.temperature,
            chunk=scoring.chunk,
            autocast=(
                "" if scoring.autocast is None else str(scoring.autocast).removeprefix("torch.")
            ),
            max_tokens=max_tokens,
            share_prefix=share_prefix,
        )
        self._child = Child(
            "sixfold.reference.worker",
            environment={"OMP_NUM_THREADS": str(threads)},
            descriptors=[self._file.fileno()],
            keeps_output=True,
        )
        self._deadline = Deadline("the reference process", silence_s)
        self._asked: dict[str, Tensor] | None = None
        # Do not wait: the process loads while the run continues.
        self._send(setup.to_bytes())

    def start(self, groups: Sequence[Group]) -> None:
        self._ask(_fields(collate(groups, scored=False)))

    def score(self, batch: Batch) -> Batch:
        """The batch with ref_logp [B, T], 0 where mask is False.

        Uses the result that `start` began if it was for the same batch.

        Raises:
            ReferenceFailed: if the process raised an exception.
            ReferenceEnded: if it has ended.
        """
        fields = _fields(batch)
        if self._asked is None or not _same(self._asked, fields):
            self._ask(fields)
        body = self._collect()
        return batch.with_(ref_logp=tensors_of(body)["logp"].to(batch.tokens.device))

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's reference weights, in place."""
        self._settle()
        super().load(tensors, state)
        self._send(_WEIGHTS_CHANGED)

    def reset(self, policy: nn.Module) -> None:
        self._settle()
        super().reset(policy)
        self._send(_WEIGHTS_CHANGED)

    def close(self) -> None:
        self._child.close()
        self._file.close()

    def _ask(self, fields: dict[str, Tensor]) -> None:
        self._settle()
        self._send(bytes_of(fields))
        self._asked = fields

    def _settle(self) -> None:
        """Wait for a batch that is being scored: weights must not change during it."""
        if self._asked is not None:
            self._collect()

    def _send(self, body: bytes) -> None:
        """Send a request.

        Raises:
            NoAnswer: if the process does not read it before its deadline.
        """
        try:
            self._child.send(body, self._deadline.seconds)
        except ChildSilent as error:
            self._child.close(grace_s=0.0)
            raise self._deadline.missed() from error

    def _collect(self) -> bytes:
        """Answer to the last request. Earlier answers are empty acknowledgements.

        Raises:
            NoAnswer: if the process does not answer before its deadline.
            ReferenceFailed: if it raised an exception.
            ReferenceEnded: if it has ended.
        """
        self._asked = None
        try:
            return self._child.receive(self._deadline.seconds)
        except ChildSilent as error:
            self._child.close(grace_s=0.0)
            raise self._deadline.missed() from error
        except RequestFailed as error:
            raise ReferenceFailed(f"the reference process failed:\n{error}") from error
        except ChildEnded as error:
            raise ReferenceEnded(
                f"the reference process {error}. Its last output:\n{self._child.last_words()}\nSet"
                " reference.placement = 'inline' to run without it"
            ) from error


def _fields(batch: Batch) -> dict[str, Tensor]:
    host = batch.at_host()
    kept = {name: getattr(host.kept, name) for name in KEPT} if host.kept else {}
    return {name: getattr(host, name) for name in FIELDS} | kept


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
