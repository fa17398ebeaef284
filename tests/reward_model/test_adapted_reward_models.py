"""A reward model with an adapter: trained, it equals the merged model that is saved of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comparisons import comparisons, padded_states, policy
from transformers import AutoModelForSequenceClassification

from sixfold.batch import collate
from sixfold.model.lora_targets import target_modules
from sixfold.model.scalar_head import scalar_head
from sixfold.model.trained_lora import file_name, is_lora
from sixfold.recipe.adapter_folder import Base
from sixfold.recipe.schema import LoraConfig, ModelConfig, RewardModelConfig, TrainerConfig
from sixfold.reward_model.model import adapted_reward_model, load_reward_model, scalar_root
from sixfold.reward_model.objective import RewardLoss
from sixfold.reward_model.rows import scored_groups
from sixfold.reward_model.scorer import Scorer
from sixfold.trainer.logprobs import Scoring
from sixfold.trainer.trainer import Trainer


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_adapter_and_head_are_trained_and_saved_as_one_classifier(
    name: str, tmp_path: Path
) -> None:
    config = LoraConfig(rank=4, alpha=8.0, dora=name == "gpt2")
    own = policy(name).with_lora(ModelConfig(lora=config), Base("", ""), 0)
    assert own.lora is not None
    started = {n: p.detach().clone() for n, p in own.model.named_parameters()}
    adapted = adapted_reward_model(own, "last")
    root, loss = scalar_root(adapted.model), RewardLoss(RewardModelConfig())
    trainer = Trainer(root, TrainerConfig(learning_rate=0.05, warmup_steps=0), Scoring(), 9)
    for _ in range(3):
        batch = loss.prepare(collate(scored_groups(comparisons(), "last")))
        assert trainer.train_step(batch, loss.compute_loss)["train/skipped"] == 0.0

    moved = {n for n, p in adapted.model.named_parameters() if p.requires_grad}
    head = {f"score.{n}" for n, _ in scalar_head(adapted.model).named_parameters()}
    assert {n for n in moved if not is_lora(n)} == head
    layers = {file_name(n).split(".lora_")[0] for n in moved if is_lora(n)}
    assert layers == {f"base_model.model.{n}" for n in target_modules(own.lora.base, config)}
    # Neither the base nor the policy's own adapter has moved.
    assert all(torch.equal(started[n], p) for n, p in own.model.named_parameters())
    assert adapted.base.base_model.get_input_embeddings().weight is (
        own.model.get_input_embeddings().weight
    )

    replace(own, model=adapted.base, lora=None, merges=adapted).save(tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ours = Scorer(load_reward_model(str(tmp_path), "cpu"), 4096)
    prompt, replies = [7, 8], [[9], [10, 11, 12], [30, 2, 2, 5]]
    with torch.no_grad():
        live = [
            float(scalar_head(adapted.model)(padded_states(adapted.model, [*prompt, *ids])[-1]))
            for ids in replies
        ]
        found = [float(theirs(torch.tensor([[*prompt, *ids]])).logits) for ids in replies]
    assert max(live) - min(live) > 0.01
    assert found == pytest.approx(live, abs=1e-5)
    assert ours.rewards(prompt, replies).tolist() == pytest.approx(live, abs=1e-5)
