"""What runs in vLLM's own process, under vLLM's own interpreter: `python -P vllm_worker.py REQUESTS REPLIES PARENT` (two descriptors, a process id).

It imports the standard library, vllm and what vllm brings, and nothing of ours: its environment has other versions of everything.

Protocol: JSON, one object a line. Every request {"do": ...} has one reply; lines that are `{}` come in between, as a sign of life.

    start     model (folder with config.json), engine (arguments of vllm.LLM)   -> vllm: its version
    load      path (safetensors), tied {name: name in it}, version              -> tensors: how many
    generate  prompts [[id]], seeds [int], params (of vllm.SamplingParams)      -> samples, in the order of the prompts
    sleep                                                                       -> asleep: true; the next request wakes it
    score     tokens [id]                                                       -> logp, of every token but the first, at temperature 1

A request that fails is answered with {"error": text, "missing": whether vllm is not installed}. It ends when the parent closes its end, and is killed
when the parent dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

BEAT_S = 1.0
PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent goes, however it goes (Linux): a step of vLLM reads no pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before this could be asked for
            os._exit(1)


def write_line(descriptor: int, message: dict[str, Any]) -> None:
    """One JSON object and a newline. Raises BrokenPipeError when nobody reads."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


class Sampler:
    """vLLM's engine in this process: its step loop is ours, so requests, weights and versions change between steps only."""

    def __init__(self, model: str, engine: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        self._llm = LLM(
            model,
            skip_tokenizer_init=True,  # token ids in, token ids out
            load_format="dummy",  # weights come by `load`
            generation_config="vllm",  # not the model's own top-p and the like
            logprobs_mode="processed_logprobs",  # those of the sampled distribution; "raw" leaves the temperature out
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
        return {"asleep": True}  # an empty reply would be a sign of life

    def wake(self) -> None:
        """Undo `sleep`, if it is asleep."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def load(self, path: str, tied: dict[str, str], version: int) -> dict[str, Any]:
        """Take over weights, forget the keys and values of the old ones, and stamp tokens with the number from now on."""
        from safetensors.torch import load_file

        weights = load_file(path)
        # On a CPU a tied output head keeps a repacked copy of its own, which stays as it was unless the head is loaded by name.
        weights |= {name: weights[stored_as] for name, stored_as in tied.items()}
        # Not model.load_weights: on CPUs the parameters are repacked after loading and have no loader any more.
        if self._shards > 1:  # an iterator cannot go to other processes
            from safetensors.torch import save_file

            save_file({name: weights[name].clone() for name in tied}, os.path.join(os.path.dirname(path), "tied.safetensors"))
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": os.path.dirname(path)})
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied: it would mix old keys and values into new samples")
        self._llm.llm_engine.set_weight_version(str(version))
        return {"tensors": len(weights)}

    def generate(self, prompts: list[list[int]], seeds: list[int], params: dict[str, Any], beat: Callable[[], None]) -> dict[str, Any]:
        """One completion a prompt. Each is a request of its own, with a seed of its own; shared prompts meet in the prefix cache."""
        from vllm import SamplingParams

        keys = [str(i) for i in range(len(prompts))]
        fixed = dict(logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True, **params)
        done = self._run(keys, prompts, [SamplingParams(seed=seed, **fixed) for seed in seeds], beat)
        return {"samples": [_sample(*done[key]) for key in keys]}

    def score(self, tokens: list[int], beat: Callable[[], None]) -> dict[str, Any]:
        """Log-probs of a given sequence; the one token sampled after it is thrown away."""
        from vllm import SamplingParams

        done = self._run(["score"], [tokens], [SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)], beat)
        found = done["score"][0].prompt_logprobs[1:]
        return {"logp": [entry[token].logprob for entry, token in zip(found, tokens[1:], strict=True)]}

    def _run(self, keys: Sequence[str], prompts: list[list[int]], params: list[Any], beat: Callable[[], None]) -> dict[str, tuple[Any, float]]:
        """Step until every request has ended: key -> (vLLM's output, seconds)."""
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
        "version": [int(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)],
        "finish_reason": completion.finish_reason,
        "reused": output.num_cached_tokens or 0,
        "seconds": seconds,
    }


class Heart:
    """Says at most once in BEAT_S seconds that work goes on. Called between steps, so a step that hangs falls silent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last = time.monotonic()

    def beat(self) -> None:
        """A sign of life, if it is time for one."""
        if time.monotonic() - self._last >= BEAT_S:
            self._last = time.monotonic()
            write_line(self._descriptor, {})


class Worker:
    """Answers one request at a time."""

    def __init__(self, replies: int) -> None:
        self._heart = Heart(replies)
        self._sampler: Sampler | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request, whatever comes of it."""
        what = request.pop("do")
        try:
            if self._sampler is None:
                return self._start(**request)
            if what == "sleep":
                return self._sampler.sleep()
            self._sampler.wake()
            if what == "load":
                return self._sampler.load(**request)
            work = self._sampler.generate if what == "generate" else self._sampler.score
            return work(beat=self._heart.beat, **request)
        except Exception as error:  # noqa: BLE001  the boundary: the parent raises it
            missing = isinstance(error, ModuleNotFoundError) and error.name == "vllm"
            return {"error": traceback.format_exc(), "missing": missing}

    def _start(self, **setup: Any) -> dict[str, Any]:
        import vllm

        self._sampler = Sampler(**setup)
        return {"vllm": vllm.__version__}


def main() -> None:
    """Entry point of the process."""
    die_with(int(sys.argv[3]))
    replies = int(sys.argv[2])
    worker = Worker(replies)
    with os.fdopen(int(sys.argv[1]), "rb") as requests, suppress(BrokenPipeError):  # the parent went while this was at work
        for line in requests:
            write_line(replies, worker.answer(json.loads(line)))
    os._exit(0)  # there is nothing to flush, and an interpreter with torch takes a second to end


if __name__ == "__main__":
    main()
