"""`sixfold export` writes a folder that other programs load, with or without the base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from sixfold.cli import main
from sixfold.commands.export import export
from sixfold.errors import UserError
from sixfold.model.loading import Policy, from_disk, load_policy, origin_of
from sixfold.recipe.schema import LoraConfig, ModelConfig, ScratchConfig

SIZES = ScratchConfig(
    hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate_size=32, context=64
)
TOKENS = torch.arange(6, 16)[None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    load_policy(ModelConfig(scratch=SIZES), seed=0, device="cpu").save(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    config = ModelConfig(path=str(base), lora=LoraConfig(rank=2, alpha=4.0))
    policy: Policy = load_policy(config, seed=0, device="cpu")
    policy = policy.with_lora(config, origin_of(str(base), ""), seed=0)
    assert policy.lora
    with torch.no_grad():
        for p in policy.lora.weights().values():
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    (tmp_path / "adapter").mkdir()
    policy.save(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def test_merge_writes_a_whole_model(adapter: Path, base: Path, tmp_path: Path) -> None:
    assert main(["export", str(adapter), str(tmp_path / "out" / "merged"), "--merge"]) == 0
    out = tmp_path / "out" / "merged"
    ours = AutoModelForCausalLM.from_pretrained(out)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    assert (logits(ours) - logits(theirs)).abs().max() <= 1e-5
    assert not (out / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(out)("1+2=").input_ids
    assert [p.name for p in out.parent.iterdir()] == ["merged"]


def test_an_adapter_names_its_base_by_an_absolute_path(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    assert export(str(adapter), tmp_path / "out", merge=False) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    again, _ = from_disk(str(tmp_path / "out"))
    assert torch.equal(logits(again), logits(from_disk(str(adapter))[0]))


def test_a_whole_model_is_copied(base: Path, tmp_path: Path) -> None:
    assert export(str(base), tmp_path / "out", merge=False) == 0
    for file in base.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_mistakes_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--merge: .* whole model.*Leave out --merge"):
        export(str(base), tmp_path / "out", merge=True)
    with pytest.raises(UserError, match=r"OUT = .* exists. Name a new folder"):
        export(str(adapter), base, merge=True)
    with pytest.raises(UserError, match=r"no checkpoint, run or model at"):
        export(str(tmp_path / "nothing/at/all"), tmp_path / "out", merge=False)
    with pytest.raises(UserError, match=r"not on this machine"):
        export("owner/name", tmp_path / "out", merge=False)
    with pytest.raises(UserError, match=r"is a file. Give a run or a checkpoint"):
        export(str(base / "config.json"), tmp_path / "out", merge=False)
    with pytest.raises(UserError, match=r"holds no model: it has no config.json.*Give a run"):
        export(str(tmp_path), tmp_path / "out", merge=False)
    with pytest.raises(UserError, match=r"OUT = .* is inside the model folder.*outside it"):
        export(str(base), base / "new" / "out", merge=False)
    assert not (base / "new").exists()
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"model.revision = 'main' applies to hub models only"):
        from_disk(str(adapter), "model.path", "main")


@pytest.mark.parametrize("missing", ["adapter_config.json", "base"])
def test_an_adapter_without_its_base_is_refused(adapter: Path, missing: str) -> None:
    config = adapter / "adapter_config.json"
    named = json.loads(config.read_text()) | {"base_model_name_or_path": None}
    if missing == "base":
        (adapter.parent / "base").rename(adapter.parent / "elsewhere")
        named["base_model_name_or_path"] = "/nothing/here"
    config.write_text(json.dumps(named))
    found = "names no base model" if missing != "base" else "does not exist. Put it back"
    with pytest.raises(UserError, match=found):
        from_disk(str(adapter))
