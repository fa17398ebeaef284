"""Models that are only sampled from: which device and dtype they get, and that bfloat16 weights
compute what transformers computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sixfold.commands.generate import Options, generate
from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy, load_policy
from sixfold.model.split_check import Context
from sixfold.recipe.schema import ModelConfig
from sixfold.run import sampling_model
from sixfold.run.sampling_model import load_for_sampling, sampling_dtype, stored_precision
from sixfold.types import SamplingParams

PROMPT = [9, 12, 7, 30, 11]
ASKED: dict[str, Any] = dict(prompt="12+7=", max_tokens=4, seed=1)


@pytest.fixture(scope="module")
def saved(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    policy.save(folder)
    return folder


@pytest.mark.parametrize(
    ("asked", "device", "stored", "dtype"),
    [
        ("auto", "cpu", "bfloat16", torch.float32),
        ("auto", "cuda", "bfloat16", torch.bfloat16),
        ("auto", "cuda:1", "float16", torch.bfloat16),
        ("auto", "cuda", "float32", torch.float32),
        ("auto", "cuda", "", torch.float32),
        ("bfloat16", "cpu", "float32", torch.bfloat16),
        ("float32", "cuda", "bfloat16", torch.float32),
    ],
)
def test_the_dtype(asked: str, device: str, stored: str, dtype: torch.dtype) -> None:
    assert sampling_dtype(asked, device, stored) == dtype


def test_a_run_says_its_precision_and_else_config_json_does(saved: Path, tmp_path: Path) -> None:
    assert stored_precision(str(saved), str(saved)) == "float32"
    for key in ("dtype", "torch_dtype"):
        (tmp_path / "config.json").write_text(json.dumps({key: "bfloat16"}))
        assert stored_precision(str(tmp_path), str(tmp_path)) == "bfloat16"
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    (run / "recipe.toml").write_text('[run]\nprecision = "bfloat16"\n')
    for path in (run, checkpoint):
        assert stored_precision(str(path), str(saved)) == "bfloat16"
    assert stored_precision(str(tmp_path / "nothing"), str(tmp_path / "nothing")) == ""


@pytest.mark.slow
def test_bfloat16_weights_compute_what_transformers_computes(saved: Path) -> None:
    """Greedy, and each log-prob to bfloat16's rounding. No weight stays in float32; the rotary
    angles do.
    """
    policy = load_for_sampling(str(saved), "cpu", "bfloat16", "MODEL")
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in policy.model.buffers()} == {torch.float32}
    engine = Engine(CausalLM(policy.model), kv_tokens=64)
    engine.add("t", PROMPT, SamplingParams(max_tokens=12, temperature=0.0), [0])
    (ours,) = engine.run()
    assert {side.dtype for side in engine.runner.cache.tensors()} == {torch.bfloat16}
    theirs = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        logp = (
            theirs(torch.tensor([ours.tokens]))
            .logits[0]
            .float()
            .log_softmax(-1)[len(PROMPT) - 1 : -1]
        )
    drawn = logp.gather(-1, torch.tensor(ours.tokens[len(PROMPT) :])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours.logp), drawn, rtol=0, atol=0.05)


def test_float32_is_the_module_as_it_was(saved: Path, policy: Policy) -> None:
    loaded = load_for_sampling(str(saved), "auto", "auto", "MODEL")
    for p, q in zip(loaded.model.parameters(), policy.model.parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(p.cpu(), q)


def test_generate_takes_a_device_and_a_precision(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, torch.dtype]] = []

    def loading(config: ModelConfig, *, device: str, dtype: torch.dtype, **rest: object) -> Policy:
        seen.append((device, dtype))
        return load_policy(config, device="cpu", dtype=dtype, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling_model, "load_policy", loading)
    generate(Options(model=str(saved), **ASKED, precision="bfloat16", device="cpu"))
    monkeypatch.setattr(sampling_model, "resolve_device", lambda asked, setting: "cuda")
    monkeypatch.setattr(sampling_model, "stored_precision", lambda path, folder: "bfloat16")
    generate(Options(model=str(saved), **ASKED))
    assert seen == [("cpu", torch.bfloat16), ("cuda", torch.bfloat16)]


def test_a_gpu_that_is_not_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"--device = 'cuda:3': no CUDA device.*--device cpu"):
        generate(Options(model=str(saved), **ASKED, device="cuda:3"))


def test_shorter_context_is_reported_once_on_loading(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not on standard output, which holds the completions of `generate`."""
    note = "Qwen3ForCausalLM changes its rotary frequencies"
    monkeypatch.setattr("sixfold.model.loading.check_split", lambda model: Context(64, note))
    generate(Options(model=str(saved), **ASKED, device="cpu"))
    out, err = capsys.readouterr()
    assert (out, err.count(note)) == ("", 1)
