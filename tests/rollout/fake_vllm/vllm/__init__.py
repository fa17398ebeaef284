"""A stand-in for vLLM 0.32: as much of it as `vllm_worker.py` calls, on the model that config.json
describes, one forward of everything a step.

What makes vLLM awkward is kept: weights are random until they are loaded, and a tied output head
has a copy of its own, which loading the embedding alone leaves as it was. Several shards read a
folder, and only once the format of its files is set. FAKE_VLLM in the environment makes it fail:
"die" and "hang" in a step, "slow" steps, "stale" ignores the second load and every later one,
"broken" at import. torch is imported with the first weights, so that a process that fails before
them starts at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .exceptions import VLLMValidationError
from .inputs import TokensPrompt
from .sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__version__ = "0.32.0+fake"
FAULT = os.environ.get("FAKE_VLLM", "")
if FAULT == "broken":
    raise ImportError("libnothing.so: cannot open shared object file")


class LLM:
    """The engine. Arguments that the real one needs are required here."""

    def __init__(
        self, model: str, *, skip_tokenizer_init: bool, load_format: str, generation_config: str,
        logprobs_mode: str, dtype: str, max_model_len: int,
        kv_cache_memory_bytes: int, max_num_seqs: int, max_num_batched_tokens: int,
        enable_prefix_caching: bool, enforce_eager: bool, **more: Any,
    ) -> None:  # fmt: skip
        assert (
            skip_tokenizer_init
            and load_format == "dummy"
            and generation_config == "vllm"
            and logprobs_mode == "processed_logprobs"
            and more.pop("scheduling_policy") == "priority"
        )
        self.can_sleep, self.asleep = more.pop("enable_sleep_mode", False), False
        self.shards, self.files = more.pop("tensor_parallel_size", 1), load_format
        assert (
            more == {"disable_log_stats": True}
            and enforce_eager
            and kv_cache_memory_bytes > 0
            and max_num_batched_tokens >= max_num_seqs
        )
        self.config = json.loads(Path(model, "config.json").read_text())
        self.dtype = dtype
        self.most = max_num_seqs
        self.model: Any = None
        self.longest = max_model_len
        self.llm_engine = Engine(self)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        if method == "update_config":
            self.files = kwargs["overrides"]["load_config"]["load_format"]
            return
        assert method == "reload_weights" and not self.asleep
        if self.shards > 1:
            if self.files != "safetensors":
                raise NotImplementedError(f"Model reloading with `{self.files}` format")
            from safetensors.torch import load_file

            found = sorted(Path(kwargs["weights_path"]).glob("*.safetensors"))
            weights = iter([pair for path in found for pair in load_file(path).items()])
        else:
            weights = kwargs["weights_iterator"]
        if self.model is None or FAULT != "stale":
            self._reload(weights)

    def sleep(self, level: int) -> None:
        assert self.can_sleep and level == 1 and not self.llm_engine.requests
        self.asleep = True
        print("asleep", file=sys.stderr, flush=True)

    def wake_up(self) -> None:
        assert self.asleep
        self.asleep = False

    def _make(self) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        torch.manual_seed(99)
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**self.config), dtype=getattr(torch, self.dtype)
        ).eval()
        self.head = self.model.get_output_embeddings().weight.detach().clone()

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self.model is None:
            self._make()
        targets = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            if name == "lm_head.weight":
                self.head.copy_(tensor)
            else:
                targets[name].copy_(tensor)

    def logits(self, tokens: list[int]) -> Tensor:
        import torch

        return (
            self.model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
            @ self.head.T
        )


class Engine:
    """The part that `LLM.llm_engine` is: requests in, a token each a step, outputs out."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.version = "default"
        self.requests: list[SimpleNamespace] = []

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return reset_running_requests or not self.requests

    def add_request(
        self, key: str, prompt: TokensPrompt, params: SamplingParams, priority: int
    ) -> None:
        if not prompt["prompt_token_ids"] or params.max_tokens < 1:
            raise VLLMValidationError("nothing to sample")
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= self.llm.longest
        self.requests.append(
            SimpleNamespace(
                key=key,
                prompt=prompt["prompt_token_ids"],
                params=params,
                priority=priority,
                noise=None,
                tokens=[],
                logp=[],
                version=[],
                told=0,
            )
        )
        self.requests.sort(key=lambda r: (not r.tokens, r.priority))  # running ones stay

    def abort_request(self, keys: list[str]) -> None:
        self.requests = [r for r in self.requests if r.key not in keys]

    def step(self) -> list[SimpleNamespace]:
        assert not self.llm.asleep, "asked while asleep"
        if FAULT == "die":
            print(
                "Traceback (most recent call last):\nMemoryError: no room for the cache",
                file=sys.stderr,
                flush=True,
            )
            os._exit(3)
        time.sleep({"slow": 0.4, "hang": 600.0}.get(FAULT, 0.0))
        ended = [(r, self._advance(r)) for r in self.requests[: self.llm.most]]
        over = {r.key for r, reason in ended if reason}
        self.requests = [r for r in self.requests if r.key not in over]
        return [
            self._output(r, reason)
            for r, reason in ended
            if reason or r.params.output_kind is RequestOutputKind.DELTA
        ]

    def _advance(self, request: SimpleNamespace) -> str:
        import torch

        params = request.params
        if request.noise is None:
            request.noise = torch.Generator().manual_seed(params.seed or 0)
        logits = self.llm.logits(request.prompt + request.tokens)[-1].float() / (
            params.temperature or 1.0
        )
        logp = logits.log_softmax(-1)
        token = (
            int(torch.multinomial(logp.exp(), 1, generator=request.noise))
            if params.temperature
            else int(logp.argmax())
        )
        request.tokens.append(token)
        request.logp.append(float(logp[token]))
        request.version.append(self.version)
        if token in (params.stop_token_ids or []):
            return "stop"
        return "length" if len(request.tokens) == params.max_tokens else ""

    def _output(self, request: SimpleNamespace, reason: str) -> SimpleNamespace:
        told = request.told if request.params.output_kind is RequestOutputKind.DELTA else 0
        request.told = len(request.tokens)
        spans = [
            SimpleNamespace(version=version, start=i, end=i + 1)
            for i, version in enumerate(request.version)
        ]
        completion = SimpleNamespace(
            token_ids=request.tokens[told:],
            logprobs=SimpleNamespace(logprobs=request.logp[told:]),
            finish_reason=reason or None,
            weight_versions=spans if reason else None,
        )
        scored = None
        if request.params.prompt_logprobs is not None:
            rows = self.llm.logits(request.prompt).float().log_softmax(-1)
            scored = [None] + [
                {t: SimpleNamespace(logprob=float(row[t]))}
                for row, t in zip(rows, request.prompt[1:], strict=False)
            ]
        return SimpleNamespace(
            request_id=request.key,
            outputs=[completion],
            finished=bool(reason),
            prompt_logprobs=scored,
            num_cached_tokens=1,
        )
