"""Rewards of a reward model that vLLM itself serves, under the interpreter that SIXFOLD_VLLM_PYTHON
names (`make vllm`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comparisons import random_reward_model, saved
from test_reward_models_elsewhere import CHAT, CONFIG, arguments, called
from tests.conftest import make_tiny

from sixfold.http_client import NoReply
from sixfold.model.attention import NAME
from sixfold.model.loading import Policy
from sixfold.model.scratch import character_tokenizer
from sixfold.reward_model.model import load_reward_model
from sixfold.reward_model.reward import reward_model
from sixfold.reward_model.scorer import Scorer

PYTHON = os.environ.get("SIXFOLD_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="SIXFOLD_VLLM_PYTHON names no interpreter with vllm: make vllm"
)
START_S = 600.0
CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with heads of 32, the smallest size that vLLM supports on a CPU."""
    model = make_tiny("qwen3", head_dim=32, num_attention_heads=2)
    model.set_attn_implementation(NAME)
    tokenizer = character_tokenizer("0123456789+-=*/ abcdefghijklmnop")
    own = Policy(model, tokenizer, 256, (int(tokenizer.eos_token_id),), "")
    return saved(random_reward_model(own=own), own, tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Address of a vLLM server of the reward model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"model": folder, "host": "127.0.0.1", "port": port, "runner": "pooling"}
    options |= {"dtype": "float32", "max-model-len": CONTEXT, "kv-cache-memory-bytes": 64 << 20}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager"],
        env={**os.environ, **quiet, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    try:
        until = time.monotonic() + START_S
        while server.poll() is None and time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.5)
        assert server.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def values(reward: Any, given: dict[str, Any]) -> list[float | None]:
    return [getattr(one, "value", one) for one in called(reward, given)]


@pytest.mark.parametrize("prompt", [CHAT, (*CHAT, {"role": "assistant", "content": "1"})])
def test_scores_are_those_of_the_model_in_the_run(url: str, folder: Path, prompt: Any) -> None:
    given = arguments(folder, prompt, same_tokens=False)
    here = values(reward_model([str(folder)], CONFIG), given)
    assert values(reward_model([url], CONFIG), given) == pytest.approx(here, abs=1e-4)


def test_plain_prompts_are_scored_as_whole_texts(url: str, folder: Path) -> None:
    given = arguments(folder)
    given["rendered_prompt"] = given["prompts"]
    scorer = Scorer(load_reward_model(str(folder), "cpu"), 4096)
    ids = [scorer.spelled(f"1+2={text}") for text in given["completions"]]
    here = [float(scorer.rewards(one[:1], [one[1:]])[0]) for one in ids]
    assert values(reward_model([url], CONFIG), given) == pytest.approx(here, abs=1e-4)


def test_a_text_beyond_the_context_costs_only_itself(url: str, folder: Path) -> None:
    for prompt in ("1+2=", CHAT):
        given = arguments(folder, prompt, same_tokens=False)
        if prompt == "1+2=":
            given["rendered_prompt"] = given["prompts"]
        reward, long = reward_model([url], CONFIG), "5" * CONTEXT
        whole = values(reward, given)
        given["completions"][1] = (
            long if prompt == "1+2=" else [{"role": "assistant", "content": long}]
        )
        assert values(reward, given) == [pytest.approx(whole[0]), None, pytest.approx(whole[2])]
        given["completions"] = [given["completions"][1]] * 3
        with pytest.raises(NoReply, match="maximum context length"):
            values(reward, given)
