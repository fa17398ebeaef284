"""The program of vLLM's process (`processes/program.py`).

It runs under vLLM's interpreter. It imports only the standard library, vllm and vllm's
dependencies, and nothing of Sixfold: the environment may have other versions of every package.

Requests and answers are JSON objects. The first request is

    model (folder with config.json), engine (arguments of vllm.LLM)
              -> vllm: its version; empty if it is not installed

Later ones have a key "do":

    load      path (safetensors), tied {name: name in the file}, version
              -> tensors: their number
    generate  prompts [[id]], seeds [int], params (of vllm.SamplingParams)
              -> samples, in the order of the prompts
    sleep     -> nothing. The next request wakes vLLM.
    score     tokens [id]
              -> logp of all tokens but the first, at temperature 1

Notes between answers are heartbeats. An exception ends the process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..processes.program import Requests

BEAT_S = 1.0


class Sampler:
    """vLLM's engine in this process.

    This class runs the step loop, so requests, weights and versions change only between steps.

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
            disable_log_stats=True,
            **engine,
        )
        self._shards = int(engine.get("tensor_parallel_size", 1))
        self._asleep = False

    def sleep(self) -> dict[str, Any]:
        """Move the weights to host memory and drop the KV cache."""
        self._llm.sleep(level=1)
        self._asleep = True
        return {}

    def wake(self) -> None:
        """Undo `sleep`. Does nothing if vLLM is awake."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def load(self, path: str, tied: dict[str, str], version: int) -> dict[str, Any]:
        """Load weights and clear the prefix cache. Later tokens are marked with the new version.

        Args:
            path: safetensors file. It is in a folder that only this load uses.
            tied: further name of a tied tensor -> its name in the file.
            version: version of the weights.
        """
        from safetensors.torch import load_file

        weights = load_file(path)
        # On a CPU, a tied output head has its own repacked copy of the weight. The copy would keep
        # the old values unless the head is loaded by its name.
        weights |= {name: weights[stored_as] for name, stored_as in tied.items()}
        # Not model.load_weights: on CPUs, parameters are repacked after loading and lose their
        # loader.
        if self._shards > 1:  # an iterator cannot be sent to other processes
            from safetensors.torch import save_file

            save_file(
                {name: weights[name].clone() for name in tied},
                os.path.join(os.path.dirname(path), "tied.safetensors"),
            )
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_path": os.path.dirname(path)}
            )
        else:
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(weights.items())}
            )
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "the prefix cache could not be cleared, so old keys and values would be used"
                " with new weights"
            )
        self._llm.llm_engine.set_weight_version(str(version))
        return {"tensors": len(weights)}

    def generate(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        params: dict[str, Any],
        beat: Callable[[], None],
    ) -> dict[str, Any]:
        """Sample one completion per prompt. Equal prompts share the prefix cache.

        Args:
            prompts: token ids of each prompt. Each is a separate request.
            seeds: one seed per prompt.
            params: arguments of `vllm.SamplingParams`.
            beat: called after every engine step.
        """
        from vllm import SamplingParams

        keys = [str(i) for i in range(len(prompts))]
        fixed = dict(logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True, **params)
        done = self._run(
            keys, prompts, [SamplingParams(seed=seed, **fixed) for seed in seeds], beat
        )
        return {"samples": [_sample(*done[key]) for key in keys]}

    def score(self, tokens: list[int], beat: Callable[[], None]) -> dict[str, Any]:
        """Log-probs of all tokens but the first.

        vLLM also samples one token after the sequence, which is discarded.

        Args:
            tokens: token ids, length T.
            beat: called after every engine step.

        Returns:
            {"logp": T - 1 log-probs at temperature 1}.
        """
        from vllm import SamplingParams

        done = self._run(
            ["score"],
            [tokens],
            [SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)],
            beat,
        )
        found = done["score"][0].prompt_logprobs[1:]
        return {
            "logp": [entry[token].logprob for entry, token in zip(found, tokens[1:], strict=True)]
        }

    def _run(
        self,
        keys: Sequence[str],
        prompts: list[list[int]],
        params: list[Any],
        beat: Callable[[], None],
    ) -> dict[str, tuple[Any, float]]:
        """Step the engine until every request has ended.

        Args:
            keys: one id per request.
            prompts: token ids of each request.
            params: `vllm.SamplingParams` of each request.
            beat: called after every engine step.

        Returns:
            Key -> (vLLM's output, seconds until the request ended).
        """
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        started, engine = time.perf_counter(), self._llm.llm_engine
        for key, prompt, one in zip(keys, prompts, params, strict=True):
            one.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(key, TokensPrompt(prompt_token_ids=prompt), one)
        done: dict[str, tuple[Any, float]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[output.request_id] = output, time.perf_counter() - started
            beat()
        return done


def _sample(output: Any, seconds: float) -> dict[str, Any]:
    (completion,) = output.outputs
    return {
        "tokens": list(completion.token_ids),
        "logp": completion.logprobs.logprobs,
        "version": [
            int(span.version)
            for span in completion.weight_versions
            for _ in range(span.start, span.end)
        ],
        "finish_reason": completion.finish_reason,
        "reused": output.num_cached_tokens or 0,
        "seconds": seconds,
    }


class Heart:
    """Sends a heartbeat at most once per BEAT_S seconds.

    It is called between steps, so a step that hangs sends no heartbeat.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._last = time.monotonic()

    def beat(self) -> None:
        """Send a heartbeat if the last one is at least BEAT_S seconds old."""
        if time.monotonic() - self._last >= BEAT_S:
            self._last = time.monotonic()
            self._requests.note()


def answer(sampler: Sampler, heart: Heart, do: str, **request: Any) -> dict[str, Any]:
    """The answer to a request."""
    if do == "sleep":
        return sampler.sleep()
    sampler.wake()
    if do == "load":
        return sampler.load(**request)
    work = sampler.generate if do == "generate" else sampler.score
    return work(beat=heart.beat, **request)


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
    for body in requests:
        requests.answer(json.dumps(answer(sampler, heart, **json.loads(body))).encode())
    os._exit(0)  # nothing to flush, and a normal exit with torch loaded takes a second
