"""vLLM processes for tests: the stand-in of `fake_vllm/` everywhere, the real one where
SIXFOLD_VLLM_PYTHON names an interpreter that has it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked_programs import fork_programs
from torch import Tensor

from sixfold.backends.vllm_process import VllmProcess, vllm_config
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import wait_for

FAKE = Path(__file__).parent / "fake_vllm"
ARGUMENTS = {
    "max_model_len": 64,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
}


def use_fake(patch: pytest.MonkeyPatch, fault: str = "", forking: bool = True) -> None:
    """Make `import vllm` in a process started from now on find the stand-in.

    Args:
        patch: undoes it.
        fault: fault of the stand-in. Empty: none.
        forking: fork the process instead of starting an interpreter (`forked_programs.py`).
    """
    fork_programs(patch, forking)
    patch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(FAKE), os.environ.get("PYTHONPATH", "")]))
    )
    patch.setenv("FAKE_VLLM", fault)


def start(
    policy: Policy, python: str = "", dtype: torch.dtype = torch.float32, **more: Any
) -> VllmProcess:
    """A process on the policy's architecture, with no weights of the policy yet.

    Args:
        more: further arguments of `vllm.LLM`.
    """
    process = VllmProcess(
        vllm_config(policy.model.config, type(policy.model).__name__),
        dtype,
        ARGUMENTS | more,
        Renderer(policy.tokenizer, policy.stop_token_ids),
        python,
    )
    process.ready()
    return process


def load(process: VllmProcess, tensors: dict[str, Tensor], version: int) -> None:
    """Call `VllmProcess.load` and wait for its result."""
    wait_for(process.load(tensors, version))


def score(process: VllmProcess, tokens: list[int]) -> list[float]:
    """Call `VllmProcess.score` and wait for its result."""
    return wait_for(process.score(tokens))


def weights(policy: Policy) -> dict[str, Tensor]:
    """The weights as a sync sends them: tied weights under each of their names."""
    return dict(policy.model.named_parameters(remove_duplicate=False))


@torch.no_grad()
def log_probs(policy: Policy, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [T - 1] of all tokens but the first, from the forward pass of transformers."""
    logits = (
        policy.model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float() / temperature
    )
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
