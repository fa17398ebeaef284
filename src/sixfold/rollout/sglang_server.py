"""A running SGLang server as an `OutsideEngine`, through the server's HTTP interface.

Requests: POST /generate (token ids in, token ids and log-probs out), POST
/update_weights_from_disk, GET /get_model_info, GET /health. This file neither starts nor stops the
server. Weights are passed as a checkpoint folder in the directory for temporary files (TMPDIR). The
server must see that folder under the same path.
"""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import UserError
from ..types import FinishReason, SamplingParams
from .outside_engine import Sampled, stored

SHORT_S = 30.0
LONG_S = 1800.0
"""Time limits: SHORT_S for a status request, LONG_S for a batch of completions or a weight sync."""

_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}

# Ignore proxy settings of the environment: the user's address must be reached directly.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class SglangServer:
    """Client of the SGLang server at `url`.

    Args:
        url: address of the server, without a path.
        config: configuration of the model, in Hugging Face format.
        dtype: dtype in which weights are passed to the server.

    Raises:
        UserError: the server cannot be reached, refuses a request, or does not answer with JSON in
            time. Later calls raise it too.
    """

    def __init__(self, url: str, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self.version = -1
        self._url = url
        self._config = config
        self._dtype = dtype
        self._request("GET", "/health", None, SHORT_S)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Sampled]:
        """As `OutsideEngine.generate`, with all prompts in one request.

        The server ignores seeds unless it was started with --enable-deterministic-inference.
        """
        drawn = {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k or -1,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "stop_token_ids": list(params.stop_token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,  # the stop token is sampled, so the completion must include it
        }
        body = {
            "input_ids": [list(p) for p in prompts],
            "sampling_params": [{**drawn, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        return [
            self._sampled(reply["meta_info"])
            for reply in self._request("POST", "/generate", body, LONG_S)
        ]

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Make the server load a checkpoint folder in place.

        Raises:
            UserError: the server does not report the new version afterwards.
        """
        with tempfile.TemporaryDirectory(prefix="sixfold-weights-") as folder:
            own, _ = stored(weights, self._dtype)  # a checkpoint stores tied weights once
            save_file(own, Path(folder, "model.safetensors"), metadata={"format": "pt"})
            self._config.save_pretrained(folder)
            body = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
            reply = self._request("POST", "/update_weights_from_disk", body, LONG_S)
        if not reply["success"]:
            raise UserError(f"SGLang at {self._url} did not load the weights: {reply['message']}")
        held = self._request("GET", "/get_model_info", None, SHORT_S)["weight_version"]
        if held != str(version):
            raise UserError(
                f"SGLang at {self._url} reports weights '{held}' after '{version}' were loaded"
            )
        self.version = version

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs [len(tokens) - 1] of all tokens but the first, at temperature 1.

        The server also samples one token after them, which is discarded.
        """
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = self._request("POST", "/generate", body, LONG_S)["meta_info"]
        # The first token has no log-prob.
        return [float(logp) for logp, _, _ in meta["input_token_logprobs"][1:]]

    def close(self) -> None:
        """Does nothing: the server was not started by this process."""

    def _sampled(self, meta: Mapping[str, Any]) -> Sampled:
        """One completion, from its `meta_info`, where each log-prob comes with its token id."""
        tokens = [int(token) for _, token, _ in meta["output_token_logprobs"]]
        spans = meta.get("weight_versions") or [
            {"version": meta["weight_version"], "start": 0, "end": len(tokens)}
        ]
        return Sampled(
            tokens=tokens,
            logp=[float(logp) for logp, _, _ in meta["output_token_logprobs"]],
            version=[
                int(span["version"]) for span in spans for _ in range(span["start"], span["end"])
            ],
            finish_reason=_FINISHED[meta["finish_reason"]["type"]],
            reused=int(meta["cached_tokens"]),
            seconds=float(meta["e2e_latency"]),
        )

    def _request(self, method: str, path: str, body: object, timeout_s: float) -> Any:
        """Send a request and return the parsed JSON answer, or None if the answer is empty.

        Args:
            method: HTTP method.
            path: path of the request, starting with a slash.
            body: sent as JSON; None for no body.
            timeout_s: longest wait for the answer, in seconds.

        Raises:
            UserError: the server cannot be reached, refuses, or does not answer with JSON in time.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with _opener.open(request, timeout=timeout_s) as reply:
                text = reply.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise UserError(
                f"SGLang at {self._url} answered {method} {path} with {error.code}: {said}"
            ) from error
        except TimeoutError as error:
            raise UserError(
                f"SGLang at {self._url} did not answer {method} {path} within {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise UserError(
                f"no SGLang server at {self._url} ({error}). Start one with python -m"
                " sglang.launch_server --model-path MODEL --port PORT"
            ) from error
        except ValueError as error:
            raise UserError(
                f"the server at {self._url} did not answer {method} {path} with JSON, so it is"
                f" not SGLang: {error}"
            ) from error
