"""For every family of mixtures of experts, the log-probs of the engine, of the packed trainer and
of the model's own code agree on every token.
"""

from __future__ import annotations

import copy

import pytest
import torch
from test_architectures import TEMPERATURE, padded_log_probs, sampled
from tests.models.experts import FAMILIES, expert_model

from sixfold.batch import collate
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.split_check import check_split
from sixfold.trainer.logprobs import Scoring, score_batch


@pytest.mark.mostly_nightly(3)
@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_engine_trainer_and_transformers_agree(name: str) -> None:
    model = expert_model(name)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    assert check_split(model).tokens == (32 if name == "phimoe" else 128)
    engine = Engine(CausalLM(model), kv_tokens=600, block_size=8, max_running=5)
    batch = collate(sampled(model, engine, seed=0))
    if name == "phimoe":  # right up to its window
        batch = batch.rows((batch.lengths <= 32).nonzero()[:, 0])
    truth = padded_log_probs(plain, batch)
    torch.testing.assert_close(batch.old_logp, truth, rtol=0, atol=5e-5)
    for share_prefix in (True, False):
        scored = score_batch(model, batch, Scoring(TEMPERATURE, 16), 96, share_prefix)
        torch.testing.assert_close(scored, truth, rtol=0, atol=5e-5)
