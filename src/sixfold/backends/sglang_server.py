"""A running SGLang server as a `Generator`, through the server's HTTP interface.

Requests: POST /generate (token ids in, token ids and log-probs out), POST /abort_request, POST
/update_weights_from_disk, GET /get_model_info, GET /health. This file neither starts nor stops the
server. Weights are passed as a checkpoint folder in the directory for temporary files (TMPDIR). The
server must see that folder under the same path.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import UserError
from ..renderer.renderer import Renderer
from ..rollout.generator import Activity, EngineLost, GeneratorClosed, Sampled, SampleKey
from ..rollout.stop_watch import cut_sampled
from ..seeds import sample_seed
from ..types import FinishReason, SamplingParams
from .json_server import LONG_S, JsonServer, Refused, reach
from .weight_files import check_folder, model_folder

_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
_START = "python -m sglang.launch_server --model-path MODEL --port PORT"


class SglangServer:
    """Client of the SGLang server at `url`.

    Args:
        url: address of the server.
        config: configuration of the model, in Hugging Face format.
        dtype: dtype in which weights are passed to the server.
        renderer: decodes completions, to find stop strings.
        patience_s: longest time that `ready` waits for the server, in seconds.

    Attributes:
        version: version of the server's weights; -1 before the first `load`.
        given: the published weights that it has. None before the first.
        activity: None: the server does not report it.
    """

    activity: Activity | None = None

    def __init__(
        self,
        url: str,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        renderer: Renderer,
        patience_s: float = 0.0,
    ) -> None:
        self.version = -1
        self.given: Path | None = None
        self._staged: Path | None = None
        self._patience_s = patience_s
        self._url = url
        self._config = config
        self._dtype = dtype
        self._renderer = renderer
        self._server = JsonServer("SGLang", url, _START)

    def ready(self) -> None:
        """As `Sampler.ready`, by `check`."""
        reach(self.check, self._patience_s)

    async def check(self) -> None:
        """Check the server before the first request.

        Raises:
            UserError: the server cannot be reached or is not SGLang, or it would end completions at
                another token than the run. `ignore_eos` would switch off all end tokens in SGLang.
        """
        eos = self._renderer.tokenizer.eos_token_id
        if eos is not None and eos not in self._renderer.stop_token_ids:
            raise UserError(
                "rollout.stop_tokens: SGLang ends every completion at the tokenizer's end token"
                f" {self._renderer.piece(eos)!r} too. Add it to the list, or use another backend"
            )
        await self._ask("GET", "/health")

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        """As `Generator.generate`. A cancelled request is aborted in the server.

        The server ignores seeds unless it was started with --enable-deterministic-inference.
        """
        offset = key.offset(len(tokens))
        request = secrets.token_hex(16)
        drawn = {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k or -1,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(stops),
            "skip_special_tokens": False,
            "no_stop_trim": True,  # the stop token is sampled, so the completion must include it
            "sampling_seed": sample_seed(params.seed, key.name, key.sample, offset),
        }
        body = {
            "rid": request,
            "input_ids": list(tokens),
            "sampling_params": drawn,
            "return_logprob": True,
            **({"priority": priority} if priority else {}),  # SGLang's rule is the same
        }
        try:
            reply = await self._sample(body, priority)
        except asyncio.CancelledError:
            with suppress(UserError, GeneratorClosed):
                await self._ask("POST", "/abort_request", {"rid": request})
            raise
        return cut_sampled(_read_completion(reply["meta_info"]), self._renderer, stops)

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs [len(tokens) - 1] of all tokens but the first.

        The server also samples one token after them, which is discarded.

        Raises:
            ValueError: `temperature` is not 1. SGLang scores prompts at temperature 1 only.
        """
        if temperature != 1.0:
            raise ValueError(f"temperature = {temperature:g}: SGLang scores at temperature 1 only")
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = (await self._sample(body, None))["meta_info"]
        # The first token has no log-prob.
        return [float(logp) for logp, _, _ in meta["input_token_logprobs"][1:]]

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Make the server load a checkpoint folder in place.

        SGLang first waits until its running requests have ended, so none continues with new
        weights.

        Returns:
            0.

        Raises:
            UserError: the server does not report the new version afterwards.
        """
        with model_folder(weights, version, self._dtype, [self._config]) as folder:
            await self.stage(folder, version)
            return await self.swap(version)

    async def stage(self, given: Path, version: int) -> None:
        """As `Sampler.stage`, of a checkpoint folder. The server itself reads it in `swap`."""
        check_folder(given, version)
        self._staged = given

    async def swap(self, version: int) -> int:
        """As `load`, of the staged folder."""
        path = str(self._staged)
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        reply = await self._ask("POST", "/update_weights_from_disk", body, LONG_S)
        if not reply["success"]:
            raise UserError(f"SGLang at {self._url} did not load the weights: {reply['message']}")
        held = (await self._ask("GET", "/get_model_info"))["weight_version"]
        if held != str(version):
            raise UserError(
                f"SGLang at {self._url} reports weights '{held}' after '{version}' were loaded"
            )
        self.version, self.given = version, self._staged
        return 0

    async def sleep(self) -> None:
        """Does nothing: the server keeps its memory."""

    def close(self) -> None:
        """End the requests that wait. The server was not started by this process and continues."""
        self._server.close()

    async def _sample(self, body: object, priority: int | None) -> Any:
        try:
            return await self._server.ask("POST", "/generate", body, LONG_S, priority)
        except Refused as error:
            if error.status == 400:  # too long, or a wrong parameter
                raise ValueError(str(error)) from error
            raise EngineLost(str(error)) from error

    async def _ask(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> Any:
        try:
            return await self._server.ask(method, path, body, timeout_s)
        except Refused as error:
            raise (UserError if error.status < 500 else EngineLost)(str(error)) from error


def _read_completion(meta: Mapping[str, Any]) -> Sampled:
    """One completion, from its `meta_info`, where each log-prob comes with its token id."""
    tokens = [int(token) for _, token, _ in meta["output_token_logprobs"]]
    spans = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": len(tokens)}
    ]
    return Sampled(
        tokens=tokens,
        logp=[float(logp) for logp, _, _ in meta["output_token_logprobs"]],
        version=[
            _number(span["version"]) for span in spans for _ in range(span["start"], span["end"])
        ],
        finish_reason=_FINISHED[meta["finish_reason"]["type"]],
        reused=int(meta["cached_tokens"]),
        seconds=float(meta["e2e_latency"]),
    )


def _number(version: str) -> int:
    """Version of weights, as `load` named it.

    Raises:
        EngineLost: the server has weights that `load` has not passed.
    """
    if not version.isdecimal():
        raise EngineLost(
            f"SGLang sampled from weights '{version}', which this run has not loaded. Let no other"
            " client change the server's weights"
        )
    return int(version)
