"""A running SGLang server, by its own HTTP interface, as an `OutsideEngine`.

Requests: POST /generate (token ids in, token ids and log-probs out), POST /update_weights_from_disk, GET /get_model_info, GET /health. The server
is somebody else's: it is neither started nor ended here. Weights go over as a checkpoint folder among the temporary files (TMPDIR), which the
server must see under the same path.
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
"""How long a question, and how long a batch of completions or a load of weights may take."""

_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}

# An address that the user gave is asked as it stands: not through a proxy that the environment names for the web.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class SglangServer:
    """The server at `url`. config: of the model, in Hugging Face form. dtype: of the weights that are handed over.

    Raises UserError where the server cannot be reached, refuses, or answers otherwise than agreed.
    """

    def __init__(self, url: str, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self.version = -1
        self._url = url
        self._config = config
        self._dtype = dtype
        self._request("GET", "/health", None, SHORT_S)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]) -> list[Sampled]:
        """One completion of each prompt, all in one request. Seeds are heeded by a server with --enable-deterministic-inference, else ignored."""
        drawn = {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k or -1,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "stop_token_ids": list(params.stop_token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,  # the stop token was sampled, so it is part of the completion
        }
        body = {
            "input_ids": [list(p) for p in prompts],
            "sampling_params": [{**drawn, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
        }
        return [self._sampled(reply["meta_info"]) for reply in self._request("POST", "/generate", body, LONG_S)]

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Have the server load a checkpoint folder in place. Raises UserError unless it then says that it has the new number."""
        with tempfile.TemporaryDirectory(prefix="sixfold-weights-") as folder:
            own, _ = stored(weights, self._dtype)  # a checkpoint has tied weights once, and its config says that they are
            save_file(own, Path(folder, "model.safetensors"), metadata={"format": "pt"})
            self._config.save_pretrained(folder)
            body = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
            reply = self._request("POST", "/update_weights_from_disk", body, LONG_S)
        if not reply["success"]:
            raise UserError(f"SGLang at {self._url} did not load the weights: {reply['message']}")
        held = self._request("GET", "/get_model_info", None, SHORT_S)["weight_version"]
        if held != str(version):
            raise UserError(f"SGLang at {self._url} says that it has weights '{held}' after loading '{version}'")
        self.version = version

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of every token but the first, at temperature 1; the one token sampled after them is thrown away."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = self._request("POST", "/generate", body, LONG_S)["meta_info"]
        return [float(logp) for logp, _, _ in meta["input_token_logprobs"][1:]]  # the first token has none

    def close(self) -> None:
        """Nothing to end: the server is not ours."""

    def _sampled(self, meta: Mapping[str, Any]) -> Sampled:
        """One completion from its meta_info: each log-prob comes with its token's id."""
        tokens = [int(token) for _, token, _ in meta["output_token_logprobs"]]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
        return Sampled(
            tokens=tokens,
            logp=[float(logp) for logp, _, _ in meta["output_token_logprobs"]],
            version=[int(span["version"]) for span in spans for _ in range(span["start"], span["end"])],
            finish_reason=_FINISHED[meta["finish_reason"]["type"]],
            reused=int(meta["cached_tokens"]),
            seconds=float(meta["e2e_latency"]),
        )

    def _request(self, method: str, path: str, body: object, timeout_s: float) -> Any:
        """The answer as JSON; nothing for an empty one."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with _opener.open(request, timeout=timeout_s) as reply:
                text = reply.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise UserError(f"SGLang at {self._url} answered {method} {path} with {error.code}: {said}") from error
        except TimeoutError as error:
            raise UserError(f"SGLang at {self._url} has not answered {method} {path} within {timeout_s:g} s") from error
        except OSError as error:
            raise UserError(
                f"no SGLang server at {self._url} ({error}): start one with python -m sglang.launch_server --model-path MODEL --port PORT"
            ) from error
        except ValueError as error:
            raise UserError(f"what answers {method} {path} at {self._url} is no SGLang server: {error}") from error
