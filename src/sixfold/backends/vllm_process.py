"""vLLM in a separate process as a `Generator`.

The process may use the interpreter of another environment. `VllmProcess` sends requests, which run
together; `vllm_worker.py` runs in the process. Weights are passed as a safetensors file, which is
deleted once the worker has read it. The file is in memory (/dev/shm) if there is enough space.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import UserError
from ..processes.child import Child, ChildEnded, ChildError, ChildSilent, last_lines
from ..renderer.renderer import Renderer
from ..rollout.generator import Activity, EngineLost, Sampled, SampleKey
from ..seeds import sample_seed
from ..types import SamplingParams
from .process_link import Call, Link
from .weight_files import MODEL_FILE, check_folder, weights_folder

START_S = 900.0
"""Time limit for the start. A large model with compiled kernels takes minutes."""

SILENCE_S = 300.0
"""Longest time without a heartbeat. It must cover one engine step or one weight sync."""


Published = tuple[Path, dict[str, str]]
"""Folder with weights, and for every further name of a tied tensor the name it is stored under."""


@contextmanager
def published(
    weights: Mapping[str, Tensor], version: int, dtype: torch.dtype, shards: int
) -> Iterator[Published]:
    """Weights for vLLM processes, in memory if there is room. They are deleted afterwards.

    Args:
        weights: tensors named as in a checkpoint.
        version: version of the weights.
        dtype: dtype of the engines.
        shards: GPUs that share each weight matrix. Several read the whole folder, so it also has
            the tied tensors by their further names.
    """
    with weights_folder(weights, version, dtype, in_memory=True) as (folder, tied):
        if shards > 1 and tied:
            again = {name: weights[name].detach().to("cpu", dtype).clone() for name in tied}
            save_file(again, folder / "tied.safetensors")
        yield folder, tied


class VllmProcess:
    """A vLLM process, as a `Generator` or as one of several `Samplers`. It starts at once.

    Args:
        config: configuration of the model, in Hugging Face format.
        dtype: dtype of the model's weights.
        engine: arguments of `vllm.LLM`.
        renderer: decodes completions, to find stop strings.
        python: interpreter of an environment with vLLM; empty for this process's interpreter.
        threads: number of CPU threads.
        devices: CUDA_VISIBLE_DEVICES of the process; None to leave it unchanged.
        sleep: put vLLM to sleep in `sleep`. The next request wakes it.

    Attributes:
        version: version of vLLM's weights; -1 before the first `load`.
        given: the published weights that it has. None before the first.
        activity: None: vLLM does not report it.

    Raises:
        UserError: the interpreter is not there. Later calls raise EngineLost if the process ends or
            sends no heartbeat for too long.
    """

    activity: Activity | None = None

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        engine: Mapping[str, Any],
        renderer: Renderer,
        python: str = "",
        threads: int = 1,
        devices: str | None = None,
        sleep: bool = False,
    ) -> None:
        self.version = -1
        self.given: Published | None = None
        self._staged: Published | None = None
        self._config = config
        self._engine = {"dtype": str(dtype).removeprefix("torch."), **engine}
        self._dtype = dtype
        self._renderer = renderer
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
        self._link: Link | None = None

    def ready(self) -> None:
        """Wait until vLLM can be asked. A second call does nothing.

        Raises:
            UserError: the interpreter does not have vLLM.
            EngineLost: vLLM does not start.
        """
        if self._link is None:
            try:
                self.vllm_version = self._start()
            except BaseException:
                self._child.close(grace_s=0.0)
                raise
            self._link = Link("vLLM", self._child, lambda: SILENCE_S, self._engine_lost)

    def _start(self) -> str:
        with tempfile.TemporaryDirectory(prefix="sixfold-vllm-") as folder:
            self._config.save_pretrained(folder)
            request = {"model": folder, "engine": self._engine}
            try:
                self._child.send(json.dumps(request).encode(), START_S)
                version = str(json.loads(self._child.receive(START_S))["vllm"])
            except ChildError as error:
                raise self._engine_lost(error) from error
        if not version:
            raise UserError(
                f"rollout.backend.kind = 'vllm': {self._python} does not have vllm. Run pip"
                " install 'sixfold[vllm]', or set rollout.backend.python to an interpreter that"
                " has it"
            )
        return version

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        """As `Generator.generate`. The noise of a completion depends only on its seed.

        The seed is a function of `params.seed`, `key` and the position of the first sampled token.
        """
        offset = key.offset(len(tokens))
        drawn = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop_token_ids": list(params.stop_token_ids),
            "seed": sample_seed(params.seed, key.name, key.sample, offset),
        }
        request = {
            "do": "generate",
            "prompt": list(tokens),
            "params": drawn,
            "priority": priority,
            "stream": bool(stops),
        }
        async with self._call(request) as call:
            return await self._collect(call, stops)

    async def _collect(self, call: Call, stops: Sequence[str]) -> Sampled:
        """Put a completion together from its parts, and end it at the first stop string."""
        reader = self._renderer.stream(stops)
        tokens: list[int] = []
        logp: list[float] = []
        version: list[int] = []
        stopped = False
        while not stopped:
            part = await call.reply()
            used = reader.push(part["tokens"]) if stops else None
            tokens += part["tokens"][:used]
            logp += part["logp"][:used]
            version += part["version"][:used]
            stopped = used is not None or bool(stops and part["last"] and reader.finish())
            if part["last"]:
                break
        return Sampled(
            tokens,
            logp,
            version,
            "stop" if stopped else part["finish_reason"],
            part["reused"],
            part["seconds"],
            text=reader.text if stopped else None,
        )

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """As `Generator.score`.

        Raises:
            ValueError: `temperature` is not 1. vLLM scores prompts at temperature 1 only.
        """
        if temperature != 1.0:
            raise ValueError(f"temperature = {temperature:g}: vLLM scores at temperature 1 only")
        async with self._call({"do": "score", "tokens": list(tokens)}) as call:
            return list((await call.reply())["logp"])

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """As `Generator.load`. The weights are passed in the dtype of this engine.

        Running requests continue. vLLM first drops their keys and values, and computes them again
        with the new weights.
        """
        shards = int(self._engine.get("tensor_parallel_size", 1))
        with published(weights, version, self._dtype, shards) as given:
            await self.stage(given, version)
            return await self.swap(version)

    async def stage(self, given: Published, version: int) -> None:
        """As `Sampler.stage`, but the tensors are not read: `swap` does, and checks their sums."""
        check_folder(given[0], version)
        self._staged = given

    async def swap(self, version: int) -> int:
        """As `load`, of the staged weights. The process ends if it refuses them."""
        assert self._staged is not None
        folder, tied = self._staged
        path = str(folder / MODEL_FILE)
        request = {"do": "load", "path": path, "tied": tied, "version": version}
        async with self._call(request) as call:
            running = int((await call.reply())["running"])
        self.version, self.given = version, self._staged
        return running

    async def sleep(self) -> None:
        """Put vLLM to sleep if the recipe sets `rollout.backend.sleep`."""
        if self._sleep:
            async with self._call({"do": "sleep"}) as call:
                await call.reply()

    def close(self) -> None:
        if self._link is None:
            self._child.close(grace_s=0.0)
        else:
            self._link.close()

    def _call(self, request: Mapping[str, Any]) -> AbstractAsyncContextManager[Call]:
        if self._link is None:
            raise RuntimeError("vLLM is not ready")
        return self._link.call(request)

    def _engine_lost(self, error: ChildError) -> EngineLost:
        last = f"Its last output:\n{self._child.last_words()}"
        if isinstance(error, ChildEnded):
            return EngineLost(f"vLLM's process {error}. Continue with --resume. {last}")
        if isinstance(error, ChildSilent):
            return EngineLost(f"vLLM's process: {error}. {last}")
        return EngineLost(f"vLLM failed:\n{last_lines(str(error))}")


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
