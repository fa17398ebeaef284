"""Reference in a separate process that scores while the environment checks answers.

Parts: `WorkerReference` sends requests and collects replies; `worker.py` is the process;
`shared_weights.py` is the memory that both map. There is only one copy of the weights, and a reset
needs only a message to read them again.

Invariants: at most one batch is being scored, and `score` always returns the result for the batch
that it was given. The process is started by exec: a fork would inherit torch's threads and the
run's lock. It has its own process group, so Ctrl-C at the terminal does not reach it; the run
finishes its step, then closes it. The process ends when its pipe closes, so it does not outlive the
run even after `kill -9`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch, collate
from ..trainer.logprobs import Scoring
from ..types import Group
from .shared_weights import mapped, share
from .weights import FrozenWeights
from .worker import FIELDS, KEPT, Setup, receive, send


class ReferenceFailed(RuntimeError):
    """The scoring process failed or died. The message says how."""


class WorkerReference(FrozenWeights):
    """Frozen copy of the policy, scored by a process with `threads` CPU threads.

    The process uses the policy's device. Values equal those of `FrozenReference`: bit for bit on a
    CPU with the same number of threads, otherwise up to the rounding of sums (1e-6 nats in
    float32).

    Args:
        policy: the model to copy.
        scoring: sampling temperature, chunk size and precision.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.
        threads: CPU threads of the process.
    """

    scorer = None

    def __init__(
        self,
        policy: PreTrainedModel,
        scoring: Scoring,
        max_tokens: int,
        share_prefix: bool,
        threads: int,
    ) -> None:
        parameters = dict(policy.named_parameters())
        buffers = {name: buffer for name, buffer in policy.named_buffers() if buffer.numel()}
        self._file, places = share({**parameters, **buffers})
        shared = mapped(self._file.fileno(), places)
        super().__init__({name: shared[name] for name in parameters})
        setup = Setup(
            architecture=type(policy).__name__,
            config=json.loads(policy.config.to_json_string(use_diff=False)),
            places=places,
            parameters=list(parameters),
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
        self._process, self._requests, self._replies = _spawn(self._file.fileno(), threads)
        self._open = True
        self._owed = 0
        self._asked: dict[str, Tensor] | None = None
        self._send(b"M", setup.to_bytes())  # do not wait: the process loads while the run continues

    def start(self, groups: Sequence[Group]) -> None:
        """Begin to score the groups in the background."""
        self._ask(_fields(collate(groups, scored=False)))

    def score(self, batch: Batch) -> Batch:
        """The batch with ref_logp [B, T], 0 where mask is False.

        Uses the result that `start` began if it was for the same batch.

        Raises:
            ReferenceFailed: if the process failed or died.
        """
        fields = _fields(batch)
        if self._asked is None or not _same(self._asked, fields):
            self._ask(fields)
        body = self._collect()
        self._asked = None
        return batch.with_(ref_logp=tensors_of(body)["logp"].to(batch.tokens.device))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a checkpoint's reference weights, in place."""
        self._settle()
        super().load(tensors)
        self._send(b"W")

    def reset(self, policy: PreTrainedModel) -> None:
        """Copy the policy's weights into the reference, in place."""
        self._settle()
        super().reset(policy)
        self._send(b"W")

    def close(self, grace_s: float = 1.0) -> None:
        """End the process: close its pipe, then kill it after `grace_s` seconds."""
        if not self._open:
            return
        self._open = False
        os.close(self._requests)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._file.close()

    def _ask(self, fields: dict[str, Tensor]) -> None:
        self._settle()
        self._send(b"B", bytes_of(fields))
        self._asked = fields

    def _settle(self) -> None:
        """Wait for a batch that is being scored.

        Weights must not change during it, and its reply must not answer another request.
        """
        if self._asked is not None:
            self._collect()
            self._asked = None

    def _send(self, letter: bytes, body: bytes = b"") -> None:
        try:
            send(self._requests, letter, body)
        except BrokenPipeError as error:
            if self._owed:
                self._collect()  # raises the error that the process sent before it ended
            raise self._death() from error
        self._owed += 1

    def _collect(self) -> bytes:
        """Body of the reply to the last request. Earlier replies only say that they are done."""
        while True:
            message = receive(self._replies)
            if message is None:
                raise self._death()
            self._owed -= 1
            if message[0] == b"E":
                self._asked = None
                raise ReferenceFailed(f"the reference's process failed:\n{message[1].decode()}")
            if not self._owed:
                return message[1]

    def _death(self) -> ReferenceFailed:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return ReferenceFailed("the reference's process closed its pipe")
        how = f"ended with exit code {code}" + (
            f" ({signal.Signals(-code).name})" if code < 0 else ""
        )
        memory = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        return ReferenceFailed(
            f"the reference's process {how}{memory}: go on with --resume, or without it by"
            " reference.placement = 'inline'"
        )


def _fields(batch: Batch) -> dict[str, Tensor]:
    host = batch.at_host()
    kept = {name: getattr(host.kept, name) for name in KEPT} if host.kept else {}
    return {name: getattr(host, name) for name in FIELDS} | kept


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _spawn(weights: int, threads: int) -> tuple[subprocess.Popen[bytes], int, IO[bytes]]:
    """Start the process.

    Returns:
        (process, descriptor for requests, stream of replies).
    """
    requests_read, requests = os.pipe()
    replies, replies_write = os.pipe()
    # -P: a file in the working directory must not shadow a module.
    module = ["-P", "-m", "sixfold.reference.worker"]
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    try:
        process = subprocess.Popen(
            [sys.executable, *module, str(requests_read), str(replies_write), str(weights)],
            stdin=subprocess.DEVNULL,
            pass_fds=(requests_read, replies_write, weights),
            process_group=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
        )
    finally:
        os.close(requests_read)
        os.close(replies_write)
    return process, requests, os.fdopen(replies, "rb")
