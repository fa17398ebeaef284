"""vLLM serves an adapter that Sixfold trained: per request, and merged at a sync."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from vllm_processes import score, start

from sixfold.model.loading import Policy, load_policy, origin_of
from sixfold.recipe.schema import LoraConfig, ModelConfig, ScratchConfig
from sixfold.sync.versioned import VersionedSync

PYTHON = os.environ.get("SIXFOLD_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="SIXFOLD_VLLM_PYTHON names no interpreter with vllm: make vllm"
)
SIZES = ScratchConfig(
    hidden_size=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate_size=64, context=64
)
TOKENS = [7, 9, 11, 6, 30, 8, 21, 40]
LIMIT = 1e-4
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    base, adapter, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    llm = LLM(base, dtype="float32", enable_lora=True, max_lora_rank=8, max_model_len=64,
              enforce_eager=True, max_num_seqs=2, kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for request in (None, LoRARequest("trained", 1, adapter)):
        out = llm.generate({"prompt_token_ids": tokens}, params, lora_request=request)[0]
        table = out.prompt_logprobs[1:]
        found.append([p[t].logprob for p, t in zip(table, tokens[1:])])
    print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Path, Path]:
    """A policy with a trained adapter, the folder of its base and that of the adapter."""
    folder = tmp_path_factory.mktemp("saved")
    base, adapter = folder / "base", folder / "adapter"
    plain = load_policy(ModelConfig(scratch=SIZES), seed=3, device="cpu")
    with torch.no_grad():
        for p in plain.model.parameters():
            if p.dim() > 1:
                p.mul_(4.0)
    plain.save(base)
    config = ModelConfig(path=str(base), lora=LoraConfig(rank=8, alpha=16.0))
    policy = load_policy(config, seed=0, device="cpu").with_lora(
        config, origin_of(str(base), ""), 0
    )
    assert policy.lora
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.lora.weights().values():
            p.normal_(0, 0.1, generator=rng)
    adapter.mkdir()
    policy.save(adapter)
    return policy, base, adapter


def own_log_probs(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        table = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    return table.gather(-1, tokens[0, 1:, None])[:, 0]


def test_vllm_serves_the_saved_adapter(saved: tuple[Policy, Path, Path], tmp_path: Path) -> None:
    policy, base, adapter = saved
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    done = subprocess.run(
        [PYTHON, str(script), str(base), str(adapter), json.dumps(TOKENS)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    off, on = (torch.tensor(x) for x in json.loads(lines[0].removeprefix("FOUND ")))
    assert (off - own_log_probs(policy.plain)).abs().max() < LIMIT
    assert (on - own_log_probs(policy.model)).abs().max() < LIMIT
    assert (on - off).abs().max() > 0.1


def test_a_sync_hands_merged_weights_to_vllm(saved: tuple[Policy, Path, Path]) -> None:
    policy, _, _ = saved
    process = start(policy, PYTHON)
    VersionedSync(policy.model, process, 1, LIMIT, 64, policy.lora).refresh()
    theirs = torch.tensor(score(process, TOKENS))
    process.close()
    assert (theirs - own_log_probs(policy.model)).abs().max() < LIMIT
