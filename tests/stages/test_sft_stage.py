"""SFT stages: epochs, schedule, exact resumes with NEFTune, and adapters against peft."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch
from sixfold.checkpoint.listing import list_checkpoints
from sixfold.errors import UserError
from sixfold.recipe.schema import Recipe, TrainerConfig
from sixfold.recipe.toml import parse_recipe, parse_staged
from sixfold.run.start import train_run
from sixfold.stages.driver import train_stages
from sixfold.stages.supervised import SupervisedWork
from sixfold.trainer.trainer import Trainer
from tests.run.processes import metrics
from tests.stages.staged_runs import flags

RATE = 0.01
SETTINGS = {
    "sft__learning_rate": RATE,
    "sft__warmup_steps": 0,
    "sft__examples_per_step": 20,  # of 47 sums
    "checkpoint__every": 1,
    "checkpoint__keep": 9,
}


def train(folder: Path, *lines: str, resume: bool = False, **overrides: Any) -> Path:
    """Train a run of one stage, and return the folder of the stage."""
    text = "\n".join(['run.name = "p"', "[[stages]]", 'kind = "sft"', *lines])
    staged = parse_staged(text, "p.toml", flags(folder, **SETTINGS | overrides))
    assert train_stages(staged, resume=folder / "p" if resume else None) == 0
    return folder / "p" / "stages" / "sft"


@pytest.mark.slow
def test_epochs_decide_the_steps_and_the_end_of_the_schedule(tmp_path: Path) -> None:
    stage = train(tmp_path, "sft.epochs = 3", 'sft.schedule = "cosine"')
    logged = metrics(stage)
    # 47 sums fill 2 steps of 20 per epoch.
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6]
    rates = [RATE * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]
    assert [line["train/learning_rate"] for line in logged] == pytest.approx(rates)
    summary = json.loads((stage / "summary.json").read_bytes())
    assert summary["ended"]["text"] == "6 of 6 steps"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_by_epochs_with_noise_resumes_exactly(tmp_path: Path) -> None:
    lines = ("sft.epochs = 2", "sft.neftune_alpha = 5.0", 'sft.schedule = "linear"')
    stage = train(tmp_path, *lines)
    whole, made = metrics(stage), json.loads((stage / "artifact.json").read_bytes())
    for path in list_checkpoints(stage / "checkpoints")[-2:]:
        shutil.rmtree(path)
    for name in ("artifact.json", "summary.json"):
        (stage / name).unlink()
    train(tmp_path, *lines, resume=True)
    again = json.loads((stage / "artifact.json").read_bytes())
    assert len(whole) == 4 and metrics(stage) == whole and again["sha256"] == made["sha256"]
    (tmp_path / "other").mkdir()
    silent = metrics(train(tmp_path / "other", "sft.epochs = 2", 'sft.schedule = "linear"'))
    pairs = zip(whole, silent, strict=True)
    assert all(noisy["train/loss"] != plain["train/loss"] for noisy, plain in pairs)


def test_examples_without_passes_have_no_epochs() -> None:
    examples = SimpleNamespace(fingerprint="", notes=[], steps_per_epoch=0)
    work = SupervisedWork("SFT", ZOO["grpo"], TrainerConfig(), lambda _: examples, epochs=2)  # type: ignore[arg-type,return-value]
    assembly = SimpleNamespace(recipe=Recipe(), tasks=SimpleNamespace(notes=[]))
    with pytest.raises(UserError, match=r"sft\.epochs = 2: sources .* Set sft\.steps"):
        work.load(cast(Any, assembly))


def test_a_warm_up_has_no_epochs(tmp_path: Path) -> None:
    recipe = parse_recipe(f'run.dir = "{tmp_path}"\nsft.epochs = 2', "p.toml")
    with pytest.raises(UserError, match=r"sft\.epochs = 2 .* Set sft\.steps for a warm-up"):
        train_run(recipe)


@pytest.mark.slow
def test_an_adapter_learns_what_peft_and_plain_torch_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = train(tmp_path, "sft.steps = 1")
    base = full / json.loads((full / "artifact.json").read_bytes())["path"] / "model"
    batches, learn = list[Batch](), Trainer.learn
    trained = list[torch.nn.Module]()

    def observed(trainer: Trainer, batch: Batch, loss: Any) -> Any:
        batches.append(batch)
        trained.append(trainer.model)
        return learn(trainer, batch, loss)

    monkeypatch.setattr(Trainer, "learn", observed)
    (tmp_path / "lora").mkdir()
    lines = (
        "sft.steps = 3",
        "model.lora.rank = 2",
        "model.lora.alpha = 8",
        f'model.path = "{base}"',
    )
    stage = train(tmp_path / "lora", *lines)
    assert json.loads((stage / "artifact.json").read_bytes())["made"] == "adapter"
    first, *_, last = list_checkpoints(stage / "checkpoints")
    expected = peft_steps(base, adapter_of(first), batches)
    found = adapter_of(last)
    assert found.keys() == expected.keys() and len(batches) == 3
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)
        assert (value - adapter_of(first)[name]).abs().max() > 1e-3
    plain = AutoModelForCausalLM.from_pretrained(base).state_dict()
    kept = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for name, value in trained[-1].state_dict().items()
        if "lora_" not in name
    }
    assert kept.keys() == plain.keys()
    assert all(torch.equal(kept[name], value) for name, value in plain.items())


def adapter_of(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model" / "adapter_model.safetensors")


def peft_steps(base: Path, start: dict[str, Tensor], batches: list[Batch]) -> dict[str, Tensor]:
    """The adapter after one step of torch's AdamW on each batch, by padded forward passes."""
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    config = LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = cast(PeftModel, get_peft_model(plain, config))
    assert not set_peft_model_state_dict(model, start).unexpected_keys
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), RATE, (0.9, 0.95), 1e-8, weight_decay=0.1)
    for batch in batches:
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        logits = model(input_ids=batch.tokens, attention_mask=real.long(), use_cache=False).logits
        labels = batch.tokens.masked_fill(~batch.mask, -100)
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        ).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name.replace(".default", ""): p.detach() for name, p in weights.items()}
