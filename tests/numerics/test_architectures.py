"""Every architecture goes the whole way: sampled by the engine, trained a step, saved, and read
back by Hugging Face.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import ARCHITECTURES, OTHER_ATTENTION, VOCABULARY
from tests.rollouts import EngineRollout
from transformers import AutoModelForCausalLM, PreTrainedModel

from sixfold.algorithm.composed import make_algorithm
from sixfold.batch import Batch, collate
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy, vocabulary_hash
from sixfold.model.scratch import character_tokenizer
from sixfold.model.split_check import context_of
from sixfold.model.stop_tokens import model_turn_end
from sixfold.recipe.algorithm_plan import resolve_algorithm
from sixfold.recipe.schema import AlgorithmConfig, TrainerConfig
from sixfold.renderer.renderer import Renderer
from sixfold.sync.sync import SharedSync
from sixfold.trainer.logprobs import PolicyRoot, Scoring, score_batch
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, SamplingParams, Task

ALPHABET = "".join(chr(ord("0") + i) for i in range(VOCABULARY - 6))
TASKS = [Task(f"t{i}", ALPHABET[i : i + n]) for i, n in enumerate((1, 5, 14, 30))]
TEMPERATURE = 0.9
ALGORITHM = make_algorithm(resolve_algorithm(AlgorithmConfig(name="grpo")), 16)


def sampled(model: PreTrainedModel, engine: Engine, seed: int) -> list[Group]:
    """Four groups of four with made-up rewards."""
    tokenizer = character_tokenizer(ALPHABET)
    params = SamplingParams(
        max_tokens=16,
        temperature=TEMPERATURE,
        stop_token_ids=model_turn_end(model.generation_config, tokenizer).tokens,
    )
    groups = EngineRollout(engine, Renderer(tokenizer), params, samples=4).generate(TASKS, seed)
    for group in groups:
        for t in group.trajectories:
            t.reward = Reward(float(t.sample % 3))
    return groups


def padded_log_probs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """[B, T] by the plainest way: one trajectory at a time through the model's own forward."""
    out = torch.zeros(batch.tokens.shape)
    for b, n in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            logp = (
                model(batch.tokens[b : b + 1, :n], use_cache=False).logits[0].float() / TEMPERATURE
            ).log_softmax(-1)
        out[b, 1:n] = logp[:-1].gather(-1, batch.tokens[b, 1:n, None])[:, 0]
    return out * batch.mask


@pytest.mark.mostly_nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHER_ATTENTION])
def test_from_rollout_to_a_saved_model(
    name: str,
    tiny: Callable[[str], PreTrainedModel],
    plain: Callable[[str], PreTrainedModel],
    tmp_path: Path,
) -> None:
    model = copy.deepcopy(tiny(name))
    engine = Engine(CausalLM(model), kv_tokens=600, block_size=8, max_running=5)
    # Micro-batches of a few trajectories, prompts shared.
    trainer = Trainer(
        PolicyRoot(model),
        TrainerConfig(learning_rate=1e-2, max_tokens_per_microbatch=96),
        Scoring(temperature=TEMPERATURE, chunk=16),
        2,
    )
    batch = ALGORITHM.prepare(collate(sampled(model, engine, seed=0)))
    assert batch.weights is not None and int(batch.weights.any(-1).sum()) == 16

    metrics = trainer.train_step(batch, ALGORITHM.compute_loss)
    assert metrics["mismatch/max_abs_logp"] <= 1e-4  # type: ignore[operator]
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/clipped_frac"] == 0
    assert metrics["train/microbatches"] > 1  # type: ignore[operator]
    before = dict(plain(name).named_parameters())
    # Every tensor gets a gradient: AdamW's first step is the learning rate long.
    moved = {
        key: float((p - before[key]).detach().abs().max()) for key, p in model.named_parameters()
    }
    assert all(distance == pytest.approx(1e-2, rel=0.05) for distance in moved.values()), moved

    SharedSync(model, engine).sync(trainer.version)
    again = ALGORITHM.prepare(collate(sampled(model, engine, seed=1)))
    assert set(again.version[again.mask].tolist()) == {1}
    assert trainer.train_step(again, ALGORITHM.compute_loss)["mismatch/max_abs_logp"] <= 1e-4  # type: ignore[operator]

    tokenizer = character_tokenizer(ALPHABET)
    Policy(
        model,
        tokenizer,
        context_of(model),
        model_turn_end(model.generation_config, tokenizer).tokens,
        vocabulary_hash(tokenizer),
    ).save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for key, p in model.named_parameters():
        assert torch.equal(loaded.get_parameter(key), p), key
    ours = score_batch(
        model, again, Scoring(temperature=TEMPERATURE), max_tokens=200, share_prefix=True
    )
    torch.testing.assert_close(ours, padded_log_probs(loaded, again), rtol=0, atol=1e-4)


@pytest.mark.mostly_nightly(5)
@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHER_ATTENTION])
def test_sampler_trainer_and_transformers_agree_on_every_token(
    name: str, tiny: Callable[[str], PreTrainedModel], plain: Callable[[str], PreTrainedModel]
) -> None:
    batch = collate(
        sampled(
            tiny(name),
            Engine(CausalLM(tiny(name)), kv_tokens=600, block_size=8, max_running=5),
            seed=2,
        )
    )
    truth = padded_log_probs(plain(name), batch)
    torch.testing.assert_close(batch.old_logp, truth, rtol=0, atol=2e-5)
    for share_prefix in (True, False):
        scored = score_batch(
            tiny(name), batch, Scoring(temperature=TEMPERATURE, chunk=16), 96, share_prefix
        )
        torch.testing.assert_close(scored, truth, rtol=0, atol=2e-5)
