"""vLLM in a separate process as an `OutsideEngine`.

The process may use the interpreter of another environment. `VllmProcess` sends requests and waits
for replies; `vllm_worker.py` runs in the process. Weights are passed as a safetensors file, which
is deleted once the worker has read it. The file is in memory (/dev/shm) if there is enough space.

Invariants: every wait has a time limit, and any failure of a request ends the process. The process
ends with the run, however that ends (`processes/child.py`).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import UserError
from ..processes.child import Child, ChildEnded, ChildError, ChildSilent, last_lines
from ..types import SamplingParams
from .outside_engine import Sampled, stored

START_S = 900.0
"""Time limit for the start. A large model with compiled kernels takes minutes."""

SILENCE_S = 300.0
"""Longest time without a heartbeat. It must cover one engine step or one weight sync."""


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
                f"rollout.backend.python = '{python}': interpreter not found. Give the path of a"
                " Python interpreter that has vllm"
            )
        self._child = Child(
            str(Path(__file__).with_name("vllm_worker.py")),
            python=self._python,
            environment={
                **_ENVIRONMENT,
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                **({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}),
            },
            keeps_output=True,
        )
        with tempfile.TemporaryDirectory(prefix="sixfold-vllm-") as folder:
            config.save_pretrained(folder)
            name = str(dtype).removeprefix("torch.")
            reply = self._ask({"model": folder, "engine": {"dtype": name, **engine}}, START_S)
        self.vllm_version = str(reply["vllm"])
        if not self.vllm_version:
            self.close()
            raise UserError(
                f"rollout.backend.kind = 'vllm': {self._python} does not have vllm. Run pip"
                " install 'sixfold[vllm]', or set rollout.backend.python to an interpreter that"
                " has it"
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

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def _ask(self, request: dict[str, Any], patience_s: float | None = None) -> dict[str, Any]:
        """Send a request and return its answer. Any other outcome ends the process.

        Args:
            request: JSON object; after the first one with the key "do".
            patience_s: longest time without a heartbeat, in seconds. None: SILENCE_S.

        Raises:
            UserError: the request failed, or the process ended or sends no heartbeat.
        """
        patience_s = patience_s or SILENCE_S
        if self._child.closed:
            raise UserError("vLLM's process has ended. Start the run again with --resume")
        with ExitStack() as on_failure:
            on_failure.callback(self._child.close, grace_s=0.0)
            try:
                self._child.send(json.dumps(request).encode(), patience_s)
                reply = dict(json.loads(self._child.receive(patience_s)))
            except ChildError as error:
                raise self._told(error) from error
            on_failure.pop_all()
        return reply

    def _told(self, error: ChildError) -> UserError:
        last = f"Its last output:\n{self._child.last_words()}"
        if isinstance(error, ChildEnded):
            return UserError(f"vLLM's process {error}. Continue with --resume. {last}")
        if isinstance(error, ChildSilent):
            return UserError(f"vLLM's process: {error}. {last}")
        return UserError(f"vLLM failed:\n{last_lines(str(error))}")


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
