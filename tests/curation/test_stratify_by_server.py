"""Stage `stratify` whose rollouts come from a running `sixfold serve`: those of the own engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from curated_rows import rows_of
from tests.server.serving import Running, running

from sixfold.data.profile import read_profile
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold_curation.stage import Context, Decision, Health, decided
from sixfold_curation.stratify import Stratify

RECIPE = """
[model]
path = "{model}"

[data]
source = "unused.jsonl"

[environment]
rewards = ["{verifier}:is_long"]

[rollout]
max_new_tokens = 4
{backend}
[run]
threads = 1
"""
VERIFIER = "def is_long(completion, task):\n    return float(len(completion) >= int(task.answer))\n"


@pytest.fixture(scope="module")
def policy_of_the_stage(scratch_config: ScratchConfig) -> Policy:
    # With heads of 8, the last bit of a log-prob depends on the number of rows of a step.
    config = scratch_config.model_copy(update={"head_dim": 16})
    return load_policy(ModelConfig(scratch=config), seed=3, device="cpu")


@pytest.fixture(scope="module")
def server(scratch_config: ScratchConfig) -> Iterator[Running]:
    """A server of the same architecture, with other weights."""
    config = scratch_config.model_copy(update={"head_dim": 16})
    other = load_policy(ModelConfig(scratch=config), seed=99, device="cpu")
    with running(other, allow_weight_updates=True) as it:
        yield it


def stratified(folder: Path, name: str, backend: str = "") -> tuple[list[Decision], Health]:
    (folder / "verifier.py").write_text(VERIFIER)
    recipe = folder / f"{name}.toml"
    given = {"model": folder / "model", "verifier": folder / "verifier.py", "backend": backend}
    recipe.write_text(RECIPE.format(**given))
    rows = rows_of([{"prompt": f"{n}+1=", "answer": str(n % 5)} for n in range(10)])
    stage = Stratify(samples=4, hard_until=0.3, easy_from=0.7, profiles=str(folder / name))
    return decided(stage, rows, Context(recipe=str(recipe)))


@pytest.mark.nightly
def test_a_server_gives_the_profile_of_the_own_engine(
    policy_of_the_stage: Policy, server: Running, tmp_path: Path
) -> None:
    policy_of_the_stage.save(tmp_path / "model")
    backend = f'backend = {{ kind = "sixfold", url = "{server.url}" }}\n'
    here, there = stratified(tmp_path, "here"), stratified(tmp_path, "there", backend)
    assert [(one.reason, one.note) for one in here[0]] == [
        (one.reason, one.note) for one in there[0]
    ]
    files = [next((tmp_path / name).iterdir()) for name in ("here", "there")]
    mine, theirs = map(read_profile, files)
    assert mine.tasks == theirs.tasks and len(mine.tasks) == 10
    assert mine.key.difference(theirs.key) == "sampling.backend.kind"
    server.idle()
