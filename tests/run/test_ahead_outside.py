"""vLLM and servers that sample ahead of the trainer: every token carries the version of the weights
that sampled it, also where new weights reach a running request.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold.commands.train import run as train
from sixfold.errors import UserError
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig
from sixfold.recipe.toml import load_recipe, parse_recipe
from sixfold.report.rollouts import read_rollouts
from sixfold.run.start import train_run
from sixfold.types import Task
from tests.server.serving import running

from ..forked_programs import OF_A_RUN, fork_programs
from .processes import metrics, tiny_recipe
from .test_placement import bits, trained

FAKE = Path(__file__).parents[1] / "rollout/fake_vllm"
# Few requests run at a time, so groups end one after another, while others have begun.
AHEAD: dict[str, Any] = dict(
    run__steps=4, rollout__staleness=2, rollout__window=1.0, rollout__max_new_tokens=50,
    checkpoint__every=1, checkpoint__keep=9, sft__steps=2, trainer__learning_rate=0.01,
    # With heads of 8, the last bit of a log-prob depends on the number of rows of a step.
    model__scratch__head_dim=16,
)  # fmt: skip


def length(completion: str, task: Task) -> float:
    """A reward that random completions differ in."""
    return len(completion) / 12


def run(folder: Path, **more: Any) -> Path:
    flags = tiny_recipe(folder, **{**AHEAD, **more})
    assert train_run(parse_recipe("run.name = 'ahead'", "test", flags), reward=length) == 0
    return folder / "ahead"


@torch.no_grad()
def gaps(folder: Path) -> tuple[float, float]:
    """Largest difference of a sampled token's log-prob from a fresh forward pass, in nats.

    Returns:
        With the weights that the token names, and with those of the version before or after.
    """
    models = {}
    for version in range(5):
        (path,) = folder.glob(f"checkpoints/{'step' if version else 'sft'}-{version or 2:06d}")
        source = ModelConfig(path=str(path / "model"))
        models[version] = load_policy(source, seed=0, device="cpu").model
    right = wrong = 0.0
    for file in folder.glob("rollouts/*"):
        for row in read_rollouts(file):
            tokens = torch.tensor(row["tokens"])
            logp = {
                version: model(tokens[None], use_cache=False)
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, tokens[1:, None])[:, 0]
                for version, model in models.items()
            }
            for at, version in enumerate(row["version"]):
                if version >= 0:
                    own = row["logp"][at]
                    right = max(right, abs(own - float(logp[version][at - 1])))
                    wrong = max(wrong, abs(own - float(logp[version ^ 1][at - 1])))
    return right, wrong


@pytest.mark.parametrize("stop", ["[]", "['1']"])
def test_every_token_of_vllm_has_the_log_prob_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """With stop strings, tokens arrive one by one, without vLLM's own versions."""
    fork_programs(monkeypatch, targets=OF_A_RUN)
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_VLLM", "")
    vllm = dict(rollout__backend__kind="vllm", rollout__backend__python=sys.executable)
    ahead = run(tmp_path, rollout__stop=stop, engine__max_running=3, **vllm)
    assert max(line["async/mixed_frac"] for line in metrics(ahead)) > 0
    assert len(trained(ahead)) == len(set(trained(ahead))) == 16
    right, wrong = gaps(ahead)
    assert right < 1e-4 and wrong > 1e-2
    with pytest.raises(UserError, match=r"rollout.backend.kind = 'vllm'.*cannot be replayed"):
        train(["--replay-schedule", str(ahead)])


def test_the_schedule_of_a_server_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    """So its versions are those that sampled: another version gives other tokens."""
    flags = tiny_recipe(tmp_path, **AHEAD)
    model = parse_recipe("run.name = 'x'", "test", flags).model
    policy = load_policy(model, seed=99, device="cpu")
    with running(policy, allow_weight_updates=True, max_running=3) as server:
        backend = dict(rollout__backend__kind="sixfold", rollout__backend__url=server.url)
        ahead = run(tmp_path, **backend)
    assert max(line["async/mixed_frac"] for line in metrics(ahead)) > 0
    recipe = load_recipe(str(ahead / "recipe.toml"), ["--rollout.backend.kind=engine"])
    recipe = recipe.with_settings({"run.name": "again"})
    schedule = ahead / "schedule.jsonl"
    assert train_run(recipe, reward=length, replayed=schedule) == 0
    assert bits(tmp_path / "again") == bits(ahead)
