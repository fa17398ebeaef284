"""vLLM in a separate process as an `OutsideEngine`.

The process may use the interpreter of another environment. `VllmProcess` sends requests and waits
for replies; `vllm_worker.py` runs in the process. Weights are passed as a safetensors file, which
is deleted once the worker has read it. The file is in memory (/dev/shm) if there is enough space.

Invariants:

- Every wait has a time limit.
- Any failure of a request ends the process, so a reply is never matched to the wrong request.
- The process is started by exec in its own process group, so Ctrl-C in the terminal does not reach
  it. The run finishes its step and then closes the process.
- The process ends with the run, even after `kill -9` of the run.
"""

from __future__ import annotations

import copy
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import UserError
from ..types import SamplingParams
from .outside_engine import Sampled, stored

START_S = 900.0
"""Time limit for the start. A large model with compiled kernels takes minutes."""

SILENCE_S = 300.0
"""Longest time without a heartbeat. It must cover one engine step or one weight sync."""

_LAST_LINES = 5


class VllmProcess:
    """A running vLLM process.

    Args:
        config: configuration of the model, in Hugging Face format.
        dtype: dtype of the model's weights.
        engine: arguments of `vllm.LLM`.
        python: interpreter of an environment with vLLM; empty for this process's interpreter.
        threads: number of CPU threads.
        devices: CUDA_VISIBLE_DEVICES of the process; None to leave it unchanged.
        sleep: put vLLM to sleep after each `generate` and `score`. The next request wakes it.

    Raises:
        UserError: vLLM is not installed or does not start. Later calls raise it if the process ends
            or sends no heartbeat for too long.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        engine: Mapping[str, Any],
        python: str = "",
        threads: int = 1,
        devices: str | None = None,
        sleep: bool = False,
    ) -> None:
        self.version = -1
        self._dtype = dtype
        self._sleep = sleep
        self._python = python or sys.executable
        if shutil.which(self._python) is None:
            raise UserError(
                f"rollout.backend.python = '{python}': no such interpreter; give the path of a"
                " python that has vllm"
            )
        # A file, not a pipe: nobody reads a pipe, so it would fill up and block the process.
        self._log = tempfile.TemporaryFile(prefix="sixfold-vllm-log-")  # noqa: SIM115
        self._unread = b""
        self._open = True
        self._process, self._requests, self._replies = self._spawn(threads, devices)
        with tempfile.TemporaryDirectory(prefix="sixfold-vllm-") as folder:
            config.save_pretrained(folder)
            name = str(dtype).removeprefix("torch.")
            self.vllm_version = str(
                self._ask(
                    {"do": "start", "model": folder, "engine": {"dtype": name, **engine}}, START_S
                )["vllm"]
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Sampled]:
        """As `OutsideEngine.generate`. The noise of each completion depends only on its seed."""
        drawn = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "stop_token_ids": list(params.stop_token_ids),
        }
        request = {
            "do": "generate",
            "prompts": [list(p) for p in prompts],
            "seeds": list(seeds),
            "params": drawn,
        }
        samples = [Sampled(**sample) for sample in self._ask(request)["samples"]]
        self._rest()
        return samples

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """As `OutsideEngine.load`. The weights are passed in the dtype of this engine.

        vLLM uses the old weights until the call begins, and the new ones once it has returned.
        """
        own, tied = stored(weights, self._dtype)
        with tempfile.TemporaryDirectory(
            prefix="sixfold-weights-", dir=_memory(sum(t.nbytes for t in own.values()))
        ) as folder:
            path = Path(folder, "model.safetensors")
            save_file(own, path)
            self._ask({"do": "load", "path": str(path), "tied": tied, "version": version})
        self.version = version

    def score(self, tokens: Sequence[int]) -> list[float]:
        """As `OutsideEngine.score`."""
        logp = list(self._ask({"do": "score", "tokens": list(tokens)})["logp"])
        self._rest()
        return logp

    def _rest(self) -> None:
        """Free vLLM's GPU memory for the trainer, if the recipe sets `rollout.backend.sleep`."""
        if self._sleep:
            self._ask({"do": "sleep"})

    def close(self, grace_s: float = 5.0) -> None:
        """End the process: close its pipe, wait `grace_s` seconds, then kill it."""
        if not self._open:
            return
        self._open = False
        os.close(self._requests)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            # Kill the process group: vLLM's child processes must end too.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._replies)
        self._log.close()

    def _ask(self, request: dict[str, Any], patience_s: float | None = None) -> dict[str, Any]:
        """Send a request and return its reply. Any other outcome ends the process.

        Args:
            request: JSON object with the key "do".
            patience_s: longest time without a heartbeat, in seconds. None: SILENCE_S.

        Raises:
            UserError: the request failed, or the process ended or sends no heartbeat.
        """
        patience_s = patience_s or SILENCE_S
        if not self._open:
            raise UserError("vLLM's process has ended: start the run again with --resume")
        try:
            self._write(json.dumps(request).encode() + b"\n", patience_s)
            while not (reply := self._read(patience_s)):
                pass  # an empty object is a heartbeat
            if "error" in reply:
                raise self._refusal(reply)
            return reply
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def _write(self, data: bytes, patience_s: float) -> None:
        """Write all of `data`. Raises UserError if the process stops reading for `patience_s`."""
        rest = memoryview(data)
        try:
            while rest:
                if not select.select([], [self._requests], [], patience_s)[1]:
                    raise self._silence(patience_s)
                rest = rest[os.write(self._requests, rest) :]
        except BrokenPipeError as error:
            raise self._death() from error

    def _read(self, patience_s: float) -> dict[str, Any]:
        """Read the next line as a JSON object. Raises UserError if none comes in `patience_s`."""
        until = time.monotonic() + patience_s
        while b"\n" not in self._unread:
            if not select.select([self._replies], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._silence(patience_s)
            data = os.read(self._replies, 1 << 20)
            if not data:
                raise self._death()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def _refusal(self, reply: Mapping[str, Any]) -> UserError:
        if reply["missing"]:
            return UserError(
                f"rollout.backend.kind = 'vllm': {self._python} has no vllm: pip install"
                " 'sixfold[vllm]', or give the interpreter of an environment that has it:"
                " 'vllm:/path/to/python'"
            )
        return UserError(f"vLLM failed:\n{_tail(reply['error'])}")

    def _silence(self, patience_s: float) -> UserError:
        return UserError(
            f"vLLM's process has given no sign of life for {patience_s:g} s; it said"
            f" last:\n{self._last_words()}"
        )

    def _death(self) -> UserError:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return UserError(f"vLLM's process closed its pipe; it said last:\n{self._last_words()}")
        how = f"ended with exit code {code}" + (
            f" ({signal.Signals(-code).name})" if code < 0 else ""
        )
        memory = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        return UserError(
            f"vLLM's process {how}{memory}: go on with --resume. It said"
            f" last:\n{self._last_words()}"
        )

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 8192))
        return _tail(self._log.read().decode(errors="replace"))

    def _spawn(self, threads: int, devices: str | None) -> tuple[subprocess.Popen[bytes], int, int]:
        """Start the process.

        Returns:
            The process, the descriptor to write requests to, and the descriptor to read replies
            from.
        """
        requests_read, requests = os.pipe()
        replies, replies_write = os.pipe()
        os.set_blocking(requests, False)
        script = str(Path(__file__).with_name("vllm_worker.py"))
        try:
            process = subprocess.Popen(
                # -P: otherwise files next to the script would shadow installed modules
                [
                    self._python,
                    "-P",
                    script,
                    str(requests_read),
                    str(replies_write),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(requests_read, replies_write),
                process_group=0,
                env={
                    **_ENVIRONMENT,
                    **os.environ,
                    "OMP_NUM_THREADS": str(threads),
                    **({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}),
                },
            )
        finally:
            os.close(requests_read)
            os.close(replies_write)
        return process, requests, replies


_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine in our process, not in a child of it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else its threads are pinned to cores that we use
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # all files of the model that it needs are passed to it
}
"""Environment defaults of the process. The user's environment overrides them."""


def vllm_config(config: PreTrainedConfig, architecture: str) -> PreTrainedConfig:
    """Copy of the configuration with the architecture's name.

    vLLM needs the name, and a model made from scratch does not have it.
    """
    own = copy.deepcopy(config)
    own.architectures = [architecture]
    return own


def _memory(size: int) -> str | None:
    """Folder for a file of `size` bytes: /dev/shm if it has the space, else None for the default.

    The check is needed because a container's /dev/shm often has only 64 MB.
    """
    shared = Path("/dev/shm")
    return (
        str(shared)
        if shared.is_dir() and shutil.disk_usage(shared).free > 1.1 * size + (1 << 20)
        else None
    )


def _tail(text: str) -> str:
    return (
        "\n".join(f"  {line}" for line in text.strip().splitlines()[-_LAST_LINES:]) or "  (nothing)"
    )
