"""The program of vLLM's process (`processes/program.py`).

It runs under vLLM's interpreter. It imports only the standard library, vllm and vllm's
dependencies, and nothing of Sixfold: the environment may have other versions of every package.

Messages are JSON objects. The first request is

    model (folder with config.json), engine (arguments of vllm.LLM)
              -> vllm: its version; empty if it is not installed

Later ones have a number `id` and a key "do". They run together. Replies have the same `id`, and
`last` if no other follows:

    generate  prompt [id], params (of vllm.SamplingParams), priority, stream
              -> tokens, logp, version, finish_reason, reused, seconds: new tokens after every step
                 with `stream`, else all at the end
    score     tokens [id]
              -> logp of all tokens but the first, at temperature 1
    load      path (safetensors), tied {name: name in the file}, version
              -> running: number of running requests
    sleep     -> nothing. The next request wakes vLLM.
    abort     ends the request with this number, if it still runs
              -> aborted: true

A request that can never run is answered with `refused`: the reason. Any other exception ends the
process. Empty notes are heartbeats.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..processes.program import Requests

BEAT_S = 1.0
FIRST = 1 << 30
"""Priority of scores. A weight sync waits for the probe's, while other requests are queued."""


def _check_sums(path: str, weights: dict[str, Any]) -> None:
    """Check tensors against the checksums in their file (`weight_files.checksum`)."""
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        sums = file.metadata()
    for name, tensor in weights.items():
        what = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        if sums.get(f"crc32 {name}") != str(zlib.crc32(data, zlib.crc32(what))):
            raise ValueError(f"the weights are torn or altered: '{name}' differs from its checksum")


@dataclass
class Running:
    """A request in the engine.

    Attributes:
        number: its number.
        started: when it arrived, by `time.perf_counter`.
        scored: the tokens to score; empty for a request that samples.
    """

    number: int
    started: float
    scored: list[int]


class Sampler:
    """vLLM's engine in this process.

    The caller steps it, so requests, weights and versions change only between steps.

    Args:
        model: folder with config.json.
        engine: arguments of `vllm.LLM`.
    """

    def __init__(self, model: str, engine: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        self._llm = LLM(
            model,
            skip_tokenizer_init=True,  # token ids in, token ids out
            load_format="dummy",  # `load` provides the weights
            generation_config="vllm",  # else the model's own sampling settings (top-p) would apply
            logprobs_mode="processed_logprobs",  # "raw" log-probs ignore the temperature
            enforce_eager=current_platform.is_cpu(),
            scheduling_policy="priority",
            disable_log_stats=True,
            **engine,
        )
        self._engine = self._llm.llm_engine
        self._shards = int(engine.get("tensor_parallel_size", 1))
        if self._shards > 1:  # else "dummy" weights cannot be reloaded from a folder
            files = {"load_config": {"load_format": "safetensors"}}
            self._llm.collective_rpc("update_config", kwargs={"overrides": files})
        self._most = int(engine["max_num_seqs"])
        self._longest = int(engine["max_model_len"])
        self._asleep = False
        self._version = -1
        self._running: dict[str, Running] = {}

    @property
    def busy(self) -> bool:
        """True if a step has work to do."""
        return bool(self._running)

    def take(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Start or carry out a request. Returns the reply if there is one now."""
        number, do = int(request.pop("id")), str(request.pop("do"))
        if do == "abort":
            if self._running.pop(str(number), None) is not None:
                self._engine.abort_request([str(number)])
            return {"id": number, "last": True, "aborted": True}
        if do == "sleep":
            return {"id": number, "last": True, **self._sleep()}
        from vllm.exceptions import VLLMValidationError

        self._wake()
        if do == "load":
            return {"id": number, "last": True, **self._load(**request)}
        try:
            self._generate(number, **request) if do == "generate" else self._score(
                number, **request
            )
        except (
            ValueError,
            VLLMValidationError,
        ) as error:  # of this request alone: too long, or a wrong parameter
            self._running.pop(str(number), None)
            return {"id": number, "last": True, "refused": str(error)}
        return None

    def step(self) -> list[dict[str, Any]]:
        """Compute one step. Returns the replies that it produced."""
        replies = []
        for output in self._engine.step():
            running = self._running.get(output.request_id)
            if running is None:  # aborted meanwhile
                continue
            if output.finished:
                del self._running[output.request_id]
            if running.scored:
                replies.append(_scores(running, output))
            elif output.finished or output.outputs[0].token_ids:
                replies.append(_part(running, output, self._version))
        return replies

    def _sleep(self) -> dict[str, Any]:
        """Move the weights to host memory and drop the KV cache."""
        if self._running:
            return {"refused": "vLLM cannot sleep while requests run. Wait for them first"}
        self._llm.sleep(level=1)
        self._asleep = True
        return {}

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _load(self, path: str, tied: dict[str, str], version: int) -> dict[str, Any]:
        """Load weights and clear the KV cache. Later tokens are marked with the new version.

        Args:
            path: safetensors file. If several GPUs share each weight matrix, its folder also has
                the tied tensors by their further names.
            tied: further name of a tied tensor -> its name in the file.
            version: version of the weights.

        Raises:
            ValueError: if a tensor differs from its checksum. This ends the process.
        """
        from safetensors.torch import load_file

        weights = load_file(path)
        _check_sums(path, weights)
        # Running requests lose their keys and values too, and compute them again: otherwise blocks
        # in use would stay in the prefix cache, with values of the old weights.
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(
                "the prefix cache could not be cleared, so old keys and values would be used"
                " with new weights"
            )
        # Not model.load_weights: on CPUs, parameters are repacked after loading and lose their
        # loader.
        if self._shards > 1:  # an iterator cannot be sent to other processes
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_path": os.path.dirname(path)}
            )
        else:
            # On a CPU, a tied output head has its own repacked copy of the weight. The copy would
            # keep the old values unless the head is loaded by its name.
            weights |= {name: weights[stored_as] for name, stored_as in tied.items()}
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(weights.items())}
            )
        self._engine.set_weight_version(str(version))
        self._version = version
        return {"running": min(len(self._running), self._most)}

    def _generate(
        self,
        number: int,
        prompt: list[int],
        params: dict[str, Any],
        priority: int,
        stream: bool,
    ) -> None:
        """Add a request. Equal prompts share the prefix cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if len(prompt) + params["max_tokens"] > self._longest:  # vLLM would cut the completion
            raise ValueError(
                f"{len(prompt)} tokens and max_tokens = {params['max_tokens']} exceed"
                f" max_model_len = {self._longest}"
            )
        asked = SamplingParams(
            logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True, **params
        )
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        self._add(Running(number, time.perf_counter(), []), prompt, asked, kind, priority)

    def _score(self, number: int, tokens: list[int]) -> None:
        """Add a request for log-probs. vLLM also samples one token, which is discarded."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        kind = RequestOutputKind.FINAL_ONLY
        self._add(Running(number, time.perf_counter(), tokens), tokens, asked, kind, FIRST)

    def _add(
        self, running: Running, prompt: list[int], params: Any, kind: Any, priority: int
    ) -> None:
        from vllm.inputs import TokensPrompt

        params.output_kind = kind
        key = str(running.number)
        self._running[key] = running
        # A smaller number is served first in vLLM.
        self._engine.add_request(
            key, TokensPrompt(prompt_token_ids=prompt), params, priority=-priority
        )


def _part(running: Running, output: Any, version: int) -> dict[str, Any]:
    """Reply with new tokens. vLLM reports their versions only at the end of a request."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    spans = completion.weight_versions or []
    versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    return {
        "id": running.number,
        "last": output.finished,
        "tokens": tokens,
        "logp": list(completion.logprobs.logprobs),
        "version": versions[-len(tokens) :] if spans and tokens else [version] * len(tokens),
        "finish_reason": completion.finish_reason,
        "reused": output.num_cached_tokens or 0,
        "seconds": time.perf_counter() - running.started,
    }


def _scores(running: Running, output: Any) -> dict[str, Any]:
    found, tokens = output.prompt_logprobs[1:], running.scored[1:]
    logp = [entry[token].logprob for entry, token in zip(found, tokens, strict=True)]
    return {"id": running.number, "last": True, "logp": logp}


class Heart:
    """Sends replies, and a heartbeat at most once per BEAT_S seconds.

    It beats between steps, so a step that hangs sends no heartbeat.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._last = time.monotonic()

    def send(self, reply: dict[str, Any]) -> None:
        self._requests.note(json.dumps(reply).encode())

    def beat(self) -> None:
        """Send a heartbeat if the last one is at least BEAT_S seconds old."""
        if time.monotonic() - self._last >= BEAT_S:
            self._last = time.monotonic()
            self._requests.note()


def work(sampler: Sampler, inbox: SimpleQueue[bytes | None], heart: Heart) -> None:
    """Take requests and step the engine, until the parent closes its end."""
    while True:
        while not sampler.busy or not inbox.empty():
            body = inbox.get()
            if body is None:
                return
            reply = sampler.take(json.loads(body))
            if reply is not None:
                heart.send(reply)
        for reply in sampler.step():
            heart.send(reply)
        heart.beat()


def serve(requests: Requests) -> None:
    """Answer requests until the parent closes its end."""
    setup = json.loads(next(requests))
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        requests.answer(b'{"vllm": ""}')
        return
    sampler, heart = Sampler(**setup), Heart(requests)
    requests.answer(json.dumps({"vllm": vllm.__version__}).encode())
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    # In a thread: if nobody read the pipe during a step, the parent would wait for it.
    threading.Thread(target=_receive, args=(requests, inbox), daemon=True).start()
    work(sampler, inbox, heart)
    os._exit(0)  # nothing to flush, and a normal exit with torch loaded takes a second


def _receive(requests: Requests, inbox: SimpleQueue[bytes | None]) -> None:
    for body in requests:
        inbox.put(body)
    inbox.put(None)
