"""A running `sixfold serve` as a `Generator`, through the server's HTTP interface.

Requests: POST /v1/completions with token ids and the name of the noise, POST /v1/weights, GET
/v1/models, GET /health. This file neither starts nor stops the server, which needs the option
--allow-weight-updates. Weights are passed as a model folder in the directory for temporary files
(TMPDIR). The server must see that folder under the same path.

The server runs the same engine as the process of the trainer does otherwise. On a CPU in float32
its tokens and log-probs are the same, bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..errors import UserError
from ..recipe.schema.backend import KEY_VARIABLE
from ..rollout.generator import Activity, EngineLost, Sampled, SampleKey
from ..types import Kept, SamplingParams
from .json_server import LONG_S, JsonServer, Refused, reach
from .weight_files import check_folder, model_folder

RETRY_S = 0.2
"""Time between two attempts while the server's queue is full."""

PRIORITIES = 1000
"""The server takes priorities from -PRIORITIES to PRIORITIES."""

_START = "sixfold serve MODEL --allow-weight-updates"


class SixfoldServer:
    """Client of the Sixfold server at `url`.

    The server numbers its weights from its start on. This class converts between its versions and
    those of the caller.

    Args:
        url: address of the server.
        config: configuration of the model, in Hugging Face format.
        tokenizer: tokenizer of the policy. The server compares it with its own.
        key: API key of the server; empty for none.
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
        tokenizer: PreTrainedTokenizerBase,
        key: str = "",
        patience_s: float = 0.0,
    ) -> None:
        self.version = -1
        self.given: Path | None = None
        self._staged: Path | None = None
        self._patience_s = patience_s
        self._url = url
        self._config = config
        self._tokenizer = tokenizer
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._server = JsonServer("Sixfold", url, _START, headers)
        self._model = ""
        self._held = 0
        self._versions: dict[int, int] = {}

    def ready(self) -> None:
        """As `Sampler.ready`, by `connect`."""
        reach(self.connect, self._patience_s)

    async def connect(self) -> None:
        """Ask for the name and the version of the served model.

        Raises:
            UserError: the server cannot be reached, or refuses the request.
        """
        try:
            cards = await self._server.ask("GET", "/v1/models")
            health = await self._server.ask("GET", "/health")
            self._model = str(cards["data"][0]["id"])
            self._held = int(health["weight_version"])
        except Refused as error:
            if error.status >= 500:
                raise EngineLost(str(error)) from error
            raise UserError(f"{error}. Its API key belongs into {KEY_VARIABLE}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"the server at {self._url} is not `sixfold serve`: it does not report its model"
                f" and its weights. Start one with {_START}"
            ) from error

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        """As `Generator.generate`. A cancelled request ends its connection: the server aborts it.

        The server keeps priorities within -1000 and 1000.
        """
        origin = len(tokens) - key.offset(len(tokens))
        if params.max_tokens < 1:
            raise ValueError(f"nothing to generate: max_tokens = {params.max_tokens}")
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "noise": {"name": key.name, "sample": key.sample, "origin": origin},
            "seed": params.seed,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(stops),
            "priority": max(-PRIORITIES, min(PRIORITIES, priority)),
            "return_token_ids": True,
        }
        choice = (await self._complete(body, priority))["choices"][0]
        return self._read_completion(choice)

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": 0,
            "temperature": temperature,
            "echo": True,
            "logprobs": 0,
        }
        choice = (await self._complete(body, None))["choices"][0]
        # The first token has no log-prob.
        return [float(logp) for logp in choice["logprobs"]["token_logprobs"][1:]]

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """As `Generator.load`, while requests run. `version` may be any number.

        Raises:
            UserError: the server refuses the weights.
        """
        parts = [self._config, self._tokenizer]
        with model_folder(weights, version, torch.float32, parts) as folder:
            await self.stage(folder, version)
            return await self.swap(version)

    async def stage(self, given: Path, version: int) -> None:
        """As `Sampler.stage`, of a model folder. The server itself reads it in `swap`."""
        check_folder(given, version)
        self._staged = given

    async def swap(self, version: int) -> int:
        """As `load`, of the staged folder."""
        body = {"path": str(self._staged), "version": self._held + 1}
        self._versions[self._held + 1] = version  # tokens may be sampled before the answer
        try:
            reply = await self._server.ask("POST", "/v1/weights", body, LONG_S)
        except Refused as error:
            if error.status >= 500:
                raise EngineLost(str(error)) from error
            why = "" if error.status != 404 else f". Start the server with {_START}"
            raise UserError(f"{error}{why}") from error
        self._held += 1
        self.version, self.given = version, self._staged
        return int(reply["in_flight"])

    async def sleep(self) -> None:
        """Does nothing: the server keeps its memory."""

    def close(self) -> None:
        """End the requests that wait. The server was not started by this process and continues."""
        self._server.close()

    async def _complete(self, body: object, priority: int | None) -> Any:
        """Send a request for a completion. Waits while the server's queue is full."""
        began = time.monotonic()
        while True:
            try:
                return await self._server.ask("POST", "/v1/completions", body, LONG_S, priority)
            except Refused as error:
                if error.status in (400, 413):  # too long, or a wrong parameter
                    raise ValueError(str(error)) from error
                if error.status != 429:
                    raise EngineLost(str(error)) from error
                if time.monotonic() - began > LONG_S:
                    raise EngineLost(
                        f"the queue of the Sixfold server at {self._url} was full for {LONG_S:g} s"
                    ) from error
            await asyncio.sleep(RETRY_S)

    def _read_completion(self, choice: Mapping[str, Any]) -> Sampled:
        kept = choice["kept_tokens"]
        if other := set(choice["weight_versions"]) - self._versions.keys():
            raise EngineLost(
                f"the Sixfold server at {self._url} sampled from weights {min(other)}, which this"
                " run has not loaded. Let no other client change the server's weights"
            )
        return Sampled(
            tokens=[int(token) for token in choice["token_ids"]],
            logp=[float(logp) for logp in choice["token_logprobs"]],
            version=[self._versions[held] for held in choice["weight_versions"]],
            finish_reason=choice["finish_reason"],
            reused=int(choice["reused_tokens"]),
            seconds=float(choice["seconds"]),
            kept=None if kept is None else Kept.from_record(kept),
            text=choice["text"] if choice["stopped"] else None,
        )
