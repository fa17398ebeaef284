"""Runs that train an adapter: exact resumes, checkpoints that PEFT, transformers and all commands
load, and the reference on the shared base.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sixfold.checkpoint.listing import list_checkpoints
from sixfold.commands.eval import evaluate_checkpoints
from sixfold.commands.export import export
from sixfold.commands.generate import Options, generate
from sixfold.errors import UserError
from sixfold.model.loading import from_disk, load_policy
from sixfold.model.lora import make_adapter, read_adapter, read_files
from sixfold.model.merge import merge_into
from sixfold.model.nf4 import round_to_nf4
from sixfold.recipe.schema import LoraConfig, ModelConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.run.start import train_run

from .processes import metrics, start, tiny_recipe

pytestmark = pytest.mark.slow

LORA = {"model__lora__rank": 4, "model__lora__alpha": 8, "trainer__learning_rate": 1e-2}


def train(folder: Path, name: str, resume: bool = False, **settings: object) -> Path:
    """Train or resume in this process. Returns the folder of the run."""
    flags = tiny_recipe(folder, run__name=name, **{**LORA, **settings})
    recipe = parse_recipe('run.name = "run"', "test", flags)
    assert train_run(recipe, resume=folder / name if resume else None) == 0
    return folder / name


def saved(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:06d}"
    files = ("model/adapter_model.safetensors", "trainer.safetensors")
    return {f"{file}:{n}": t for file in files for n, t in load_file(folder / file).items()}


def assert_same(ours: Path, theirs: Path, step: int) -> None:
    a, b = saved(ours, step), saved(theirs, step)
    assert a.keys() == b.keys()
    assert all(a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)
    assert metrics(ours) == metrics(theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped: SFT of the whole model, then six steps of RL."""
    folder = tmp_path_factory.mktemp("whole")
    return train(folder, "whole", run__steps=6, algorithm__beta=0.1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without an adapter."""
    folder = tmp_path_factory.mktemp("base")
    flags = tiny_recipe(folder, run__name="base", run__steps=1)
    assert train_run(parse_recipe('run.name = "run"', "test", flags)) == 0
    return folder / "base" / "checkpoints" / "step-000001" / "model"


@pytest.mark.nightly
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    """The run is killed in SFT, while the base is saved, and in RL."""
    flags = tiny_recipe(tmp_path, run__name="killed", run__steps=6, algorithm__beta=0.1, **LORA)
    run, killed = tmp_path / "killed", 0
    for fault in ("checkpoint.published:1", "base:1", "base:2", "checkpoint.model:1", ""):
        resume = run if (run / "recipe.toml").exists() else None
        process = start(flags, tmp_path / "errors", resume=resume, fault=fault)
        process.join(120)
        killed += process.exitcode == 137
    assert process.exitcode == 0, (tmp_path / "errors").read_text()
    assert killed == 4
    assert_same(run, whole, 6)
    assert any(m.get("train/kl", 0.0) for m in metrics(whole)), "nothing left the reference"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        {"sft__steps": 4},
        {"sft__steps": 0, "reference__placement": "fused"},
        {"sft__steps": 0, "reference__reset_every": 2},
        {"sft__steps": 0, "sync__kind": "copy", "sync__every": 2, "model__lora__dora": True},
        {"sft__steps": 0, "run__precision": "bfloat16", "model__lora__base": "nf4"},
        {"sft__steps": 4, "algorithm__name": "ppo", "critic__learning_rate": 1e-2},
    ],
)
def test_resume_on_a_pretrained_base_is_exact(
    base: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    given = {"model__path": str(base), "algorithm__beta": 0.1, "checkpoint__every": 1, **settings}
    one = train(tmp_path, "one", run__steps=4, **given)
    two = train(tmp_path, "two", run__steps=3, **given)
    two = train(tmp_path, "two", resume=True, run__steps=4, **given)
    assert_same(one, two, 4)
    if settings.get("model__lora__base") == "nf4":
        assert_merged_into_rounded_base(base, one / "checkpoints" / "step-000004" / "model", two)
    if settings.get("algorithm__name") == "ppo":
        assert_critic_with_an_adapter(one)
    own = {name for name in saved(one, 4) if ":reference/" in name}
    needs_own = bool(settings["sft__steps"]) or "reference__reset_every" in settings
    assert bool(own) == needs_own and all(".lora_" in name for name in own)
    worst = max(m["mismatch/max_abs_logp"] for m in metrics(one) if "mismatch/max_abs_logp" in m)
    assert worst <= (0.5 if "run__precision" in settings else 1e-4)


def assert_critic_with_an_adapter(run: Path) -> None:
    """The checkpoint and the folder `critic` hold its adapter and its head, and no base."""
    trained = [name for name in saved(run, 4) if ":critic/weights/" in name]
    assert len(trained) == 2 * 7 + 2 and sum("lora_" in name for name in trained) == 2 * 7
    written = load_file(run / "critic" / "adapter_model.safetensors")
    assert len(written) == len(trained) and "base_model.model.score.weight" in written
    assert all(m["critic/grad_norm"] > 0 for m in metrics(run))


def assert_merged_into_rounded_base(base: Path, adapter: Path, out: Path) -> None:
    """Loading or exporting the adapter merges it into the weights that it was trained on."""
    plain, _ = from_disk(str(base))
    round_to_nf4(plain)
    merge_into(plain, make_adapter(plain, *read_files(str(adapter)), "adapter"))
    assert export(str(adapter), out / "copy", merge=False) == 0
    assert export(str(out / "copy"), out / "merged", merge=True) == 0
    for folder in (adapter, out / "merged"):
        weights = from_disk(str(folder))[0].state_dict()
        assert all(torch.equal(weights[name], t) for name, t in plain.state_dict().items())


def test_checkpoints_hold_the_adapter_alone(whole: Path) -> None:
    folder = whole / "checkpoints" / "step-000006" / "model"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((whole / "base").resolve())
    assert not (folder / "model.safetensors").exists()
    adapter = load_file(folder / "adapter_model.safetensors")
    size = sum(t.numel() for t in adapter.values())
    assert size < sum(t.numel() for t in load_file(whole / "base" / "model.safetensors").values())
    moments = load_file(whole / "checkpoints" / "step-000006" / "trainer.safetensors")
    assert sum(t.numel() for n, t in moments.items() if "/exp_avg/" in n) == size


def test_peft_and_transformers_load_a_checkpoint(whole: Path) -> None:
    folder = whole / "checkpoints" / "step-000006" / "model"
    tokens = torch.arange(2, 12)[None]
    ours, _ = from_disk(str(folder))
    plain = AutoModelForCausalLM.from_pretrained(whole / "base")
    peft = PeftModel.from_pretrained(plain, str(folder))
    auto = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logp = [m(tokens).logits.log_softmax(-1) for m in (ours.eval(), peft.eval(), auto.eval())]
        off = AutoModelForCausalLM.from_pretrained(whole / "base")(tokens).logits.log_softmax(-1)
    assert torch.equal(logp[1], logp[2])
    assert (logp[0] - logp[1]).abs().max() <= 1e-5
    assert (off - logp[1]).abs().max() > 1e-3


def test_eval_and_generate_take_a_run_with_adapters(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = tiny_recipe(tmp_path, run__name="whole", **LORA)
    recipe = parse_recipe('run.name = "run"', "test", flags)
    assert evaluate_checkpoints(recipe, [str(whole)], out=tmp_path / "found") == 0
    found = json.loads((tmp_path / "found" / "results.json").read_text())["checkpoints"][0]
    after = json.loads((whole / "summary.json").read_text())
    assert found["accuracy"] == after["heldout_after"] and found["version"] == 6
    made = [
        generate(Options(model=str(m), prompt="1+2=", temperature=0, max_tokens=8, device="cpu"))
        for m in (whole, whole / "checkpoints" / "step-000006")
    ]
    assert made[0] == made[1]


def test_a_server_adds_the_adapter_of_a_checkpoint_to_its_base(whole: Path) -> None:
    folder = str(whole / "checkpoints" / "step-000006" / "model")
    base = load_policy(ModelConfig(path=str(whole / "base")), seed=0, device="cpu")
    adapter = read_adapter(folder, base.model)
    merged, _ = from_disk(folder)
    for name, (down, up) in adapter.layers.items():
        weight = base.model.get_parameter(f"{name}.weight") + up @ down
        torch.testing.assert_close(weight, merged.get_parameter(f"{name}.weight"))


def test_a_run_starts_from_an_adapter(whole: Path, tmp_path: Path) -> None:
    """RL continues to train the adapter, or with rank 0 all merged weights."""
    path = str(whole / "checkpoints" / "step-000006" / "model")
    more = train(tmp_path, "more", run__steps=1, sft__steps=0, model__path=path)
    config = json.loads(
        (more / "checkpoints" / "step-000001" / "model" / "adapter_config.json").read_text()
    )
    assert config["base_model_name_or_path"] == str((whole / "base").resolve())
    start_of = saved(more, 0) if (more / "checkpoints" / "step-000000").exists() else {}
    for name, t in start_of.items():
        if name.startswith("model/"):
            assert torch.equal(t, saved(whole, 6)[name])
    flags = tiny_recipe(tmp_path, run__name="full", run__steps=1, sft__steps=0, model__path=path)
    assert train_run(parse_recipe('run.name = "run"', "test", flags)) == 0
    assert (tmp_path / "full/checkpoints/step-000001/model/model.safetensors").exists()


def test_a_moved_run_finds_its_base_and_a_changed_base_is_refused(
    whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "moved"
    shutil.copytree(whole, run)
    folder = str(run / "checkpoints" / "step-000006" / "model")
    from_disk(folder)
    other = load_file(run / "base" / "model.safetensors")
    other["model.norm.weight"] += 1
    from safetensors.torch import save_file

    save_file(other, run / "base" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="has changed since its adapter was trained"):
        from_disk(folder)
    shutil.rmtree(run / "base")
    from_disk(folder)  # the run that it was copied from is still there
    config = run / "checkpoints" / "step-000006" / "model" / "adapter_config.json"
    gone = json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}
    config.write_text(json.dumps(gone))
    with pytest.raises(UserError, match=r"the base model .*gone does not exist. Put it back"):
        from_disk(folder)


def test_an_adapter_is_merged_or_loaded_without_its_base(whole: Path) -> None:
    folder = str(whole / "checkpoints" / "step-000006" / "model")
    merged = load_policy(ModelConfig(path=folder), seed=0, device="cpu")
    alone = load_policy(
        ModelConfig(path=folder, lora=LoraConfig(rank=4, alpha=8.0)), seed=0, device="cpu"
    )
    base = load_file(whole / "base" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(alone.model.get_parameter(name), base[name])
    assert not torch.equal(merged.model.get_parameter(name), base[name])


def test_ctrl_c_stops_with_a_checkpoint(tmp_path: Path) -> None:
    flags = tiny_recipe(tmp_path, run__name="run", run__steps=10_000, **LORA)
    process = start(flags, tmp_path / "errors")
    while process.is_alive() and not (tmp_path / "run" / "metrics.jsonl").exists():
        process.join(0.1)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130, (tmp_path / "errors").read_text()
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert (newest / "model" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model__lora__alpha": 8}, r"model.lora.alpha = 8.* has no effect .*rank = 0"),
        ({"model__lora__rank": -1}, r"model.lora.rank: expected an integer >= 0"),
        ({"model__lora__rank": 2, "model__lora__dora": True}, r"set sync.kind = 'copy'"),
        ({"model__lora__rank": 2, "model__lora__base": "bfloat16"}, r"run.precision = 'bfloat16'"),
        ({"model__lora__rank": 2, "model__lora__base": "int4"}, r"model.lora.base: .*bfloat16"),
        ({"model__lora__rank": 2, "model__lora__base": "nf4"}, r"run.precision = 'bfloat16'"),
        (
            {
                "model__lora__rank": 2,
                "model__lora__base": "nf4",
                "run__precision": "bfloat16",
                "sync__kind": "copy",
            },
            r"sync.kind = 'copy'.*set sync.kind = 'shared', or model.lora.base = 'bfloat16'",
        ),
        ({"model__lora__rank": 2, "model__lora__targets": "all-linear,q_proj"}, "all-linear"),
        (
            {"model__lora__rank": 2, "algorithm__beta": 0.1, "reference__placement": "worker"},
            "set 'inline' or 'fused'",
        ),
        ({"model__lora__rank": 2, "model__lora__targets": "q_prj"}, "Did you mean 'q_proj'"),
        ({"model__lora__rank": 17}, r"model.lora.rank = 17 .*at most"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, settings: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        flags = tiny_recipe(tmp_path, run__name="bad", run__steps=1, sft__steps=0, **settings)
        recipe = parse_recipe('run.name = "run"', "test", flags)
        from sixfold.recipe.plan import make_plan

        make_plan(recipe)
        train_run(recipe)
    assert not (tmp_path / "bad" / "metrics.jsonl").exists()
