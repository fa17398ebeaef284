"""Stages on two ranks: comparisons are learned as in one process, and a run resumes with the same
bits after one rank was killed.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sixfold.checkpoint.listing import list_checkpoints
from tests.rank_runs import RankRun, train_on_ranks
from tests.run.test_several_ranks import curve, same
from tests.stages.staged_runs import flags, result
from tests.stages.test_reward_model_stage import rows

TEXT = """\
run.name = "p"

[[stages]]
kind = "sft"
name = "first"
sft.steps = 3

[[stages]]
kind = "sample"
sample.tasks = 8
sample.samples = 2
sample.keep = "reward"
sample.threshold = 0.0
sample.min_rows = 1

[[stages]]
kind = "rl"
run.steps = 2
"""


def with_fault(fault: str, rank: int) -> None:
    """Let rank 1 be killed."""
    if rank == 1:
        os.environ["SIXFOLD_FAULT"] = fault


def run_stages(place: Path, *more: str, fault: str = "") -> list[int | None]:
    (place / "p.toml").write_text(TEXT)
    own = flags(place, rollout__max_new_tokens=8)
    if more:  # a resumed run stays in its folder
        at = own.index("--run.dir")
        del own[at : at + 2]
    argv = ["train", *(more or (str(place / "p.toml"),)), *own]
    return train_on_ranks(2, argv, place / "log", partial(with_fault, fault)).codes()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_lost_rank_costs_nothing(tmp_path: Path) -> None:
    assert run_stages(tmp_path) == [0, 0], (tmp_path / "log").read_text()
    whole = result(tmp_path / "p")
    shutil.rmtree(tmp_path / "p")
    assert 137 in run_stages(tmp_path, fault="checkpoint.:2")
    assert run_stages(tmp_path, "--resume", str(tmp_path / "p")) == [0, 0]
    assert result(tmp_path / "p") == whole


START = """\
run.name = "p"
data.heldout = 8

[[stages]]
kind = "sft"
name = "first"
sft.steps = 2
"""
REWARD_MODEL = """
[[stages]]
kind = "reward_model"
data.source = "PAIRS"
model.path = "stage:first"
reward_model.steps = 3
reward_model.examples_per_step = 7
reward_model.learning_rate = 5e-3
reward_model.lm_weight = 0.1
"""
PREFERENCE = """
[[stages]]
kind = "preference"
data.source = "PAIRS"
model.path = "stage:first"
preference.steps = 3
preference.examples_per_step = 7
preference.learning_rate = 5e-3
"""
STAGES = {
    "rm": REWARD_MODEL,
    "adapted": f"{REWARD_MODEL}model.lora.rank = 4\n",
    "dpo": PREFERENCE,
    "kto": f'{PREFERENCE}preference.losses = ["kto"]\n',
}


def compared(place: Path, size: int, names: list[str], **settings: Any) -> RankRun:
    """Stages that learn comparisons, on some ranks."""
    place.mkdir()
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows()[:40])))
    stages = [
        STAGES[name].replace("PAIRS", str(place / "pairs.jsonl")) + f'name = "{name}"\n'
        for name in names
    ]
    (place / "p.toml").write_text(START + "".join(stages))
    own = flags(place, model__scratch__kv_heads=2, trainer__max_tokens_per_microbatch=64)
    at = own.index("--data.heldout")
    own = own[:at] + own[at + 2 :]
    for name, value in settings.items():
        own += [f"--{name.replace('__', '.')}", str(value)]
    run = train_on_ranks(size, ["train", str(place / "p.toml"), *own], place / "log")
    return run


def weights(stage: Path) -> dict[str, Any]:
    model = list_checkpoints(stage / "checkpoints")[-1] / "model"
    return {k: t for file in model.glob("*.safetensors") for k, t in load_file(file).items()}


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_learn_comparisons_as_one_process_does(tmp_path: Path) -> None:
    runs = {
        "alone": (1, [*STAGES], {}),
        "ranks": (2, [*STAGES], {}),
        "tensor": (2, ["rm", "dpo", "kto"], {"parallel__tensor": 2}),
        "context": (2, ["rm", "dpo"], {"parallel__context": 2}),
    }
    for name, (size, names, settings) in runs.items():
        run = compared(tmp_path / name, size, names, **settings)
        assert run.codes() == [0] * size, run.errors()
        for stage in names:
            one, other = (tmp_path / n / "p" / "stages" / stage for n in ("alone", name))
            same(curve(other), curve(one))
            expected, found = weights(one), weights(other)
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                assert (found[key] - tensor).abs().max() < 1e-5, (name, stage, key)
