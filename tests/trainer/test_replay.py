"""Routing replay: the trainer computes every token with its experts at sampling."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.experts import RENDERER, TASKS, expert_model, sampled_groups
from tests.rollout.episodes import scripted
from tiny import grpo, relative, settings
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.batch import Batch, collate
from sixfold.engine.engine import Engine
from sixfold.engine.routes import RecordedModel
from sixfold.environment.episode import End, Observation
from sixfold.errors import UserError
from sixfold.model.causal_lm import CausalLM
from sixfold.model.experts import OWN, find_routers
from sixfold.recipe.schema import MoeConfig
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.player import Limits, Player
from sixfold.trainer.logprobs import PolicyRoot, RoutedScores, Scoring, score_tables
from sixfold.trainer.packing import pack
from sixfold.trainer.routing import make_routing
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, SamplingParams


def prepared(groups: list[Group]) -> Batch:
    return grpo().prepare(collate(groups))


def root_of(model: PreTrainedModel, routing: str) -> PolicyRoot:
    return PolicyRoot(model, make_routing(model, MoeConfig(routing=routing)))  # type: ignore[arg-type]


def moved(model: PreTrainedModel, scale: float = 0.1) -> PreTrainedModel:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return model


@pytest.mark.parametrize("share_prefix", [True, False])
def test_packed_row_has_the_experts_of_every_trajectory(share_prefix: bool) -> None:
    groups = sampled_groups(expert_model("qwen3_moe"))
    batch = prepared(groups)
    row = pack(batch, range(12), share_prefix)
    assert row.experts is not None and row.experts.dtype == torch.int16
    trajectories = [t for group in groups for t in group.trajectories]
    assert row.experts.shape == (len(row.tokens), 2, 2)
    # The state before a scored token is that of the token before it.
    for read, b, column in zip(
        row.reads.tolist(), row.row.tolist(), row.column.tolist(), strict=True
    ):
        routes = trajectories[b].routes
        assert routes is not None and len(routes) == len(trajectories[b].tokens) - 1
        record = np.frombuffer(routes.data, dtype=np.uint8).reshape(-1, 2, 2)
        assert row.experts[read].tolist() == record[column - 1].tolist()
    # Only the last token of each trajectory has no record.
    assert int((row.experts[:, 0, 0] == OWN).sum()) == 12


def test_replay_uses_the_experts_of_sampling_under_other_weights() -> None:
    policy = expert_model("qwen3_moe")
    batch = prepared(sampled_groups(policy))
    row = pack(batch, range(12), True)
    assert row.experts is not None
    other = moved(policy)
    known = row.experts[:, 0, 0] != OWN
    drifts = {}
    for routing in ("measure", "replay"):
        root = root_of(other, routing)
        assert root.routing is not None
        with root.routing.watch(other, row) as record, torch.no_grad():
            root.model.base_model(
                input_ids=row.tokens[None],
                position_ids=row.positions[None],
                use_cache=False,
                layout=row,
            )
        same = (record.choices().sort(-1)[0] == row.experts.sort(-1)[0]).all(-1)[known]
        assert bool(same.all()) == (routing == "replay")
        scores = root(row, Scoring())
        assert isinstance(scores, RoutedScores) and scores.routed.drifted is not None
        drifts[routing] = scores.routed.drifted.tolist()
    for tokens, choices, compared in drifts.values():
        assert 0 < tokens <= choices and compared == int(known.sum())
    unmoved = root_of(policy, "measure")(row, Scoring())
    assert isinstance(unmoved, RoutedScores) and unmoved.routed.drifted is not None
    assert unmoved.routed.drifted.tolist()[:2] == [0, 0]


@pytest.mark.parametrize("share_prefix", [True, False])
def test_replay_does_not_depend_on_packing(share_prefix: bool) -> None:
    policy = expert_model("deepseek_v3")
    batch, root = prepared(sampled_groups(policy)), root_of(moved(policy), "replay")
    whole, _ = score_tables(root, batch, Scoring(), 4096, True)
    parts, _ = score_tables(root, batch, Scoring(), 50, share_prefix)
    torch.testing.assert_close(parts, whole, atol=2e-5, rtol=2e-5)
    free, _ = score_tables(root_of(root.model, "measure"), batch, Scoring(), 4096, True)
    assert float((free - whole).abs().max()) > 1e-3


def test_turns_of_an_episode_keep_the_experts_of_their_sampling() -> None:
    """An episode of three replies with observations between them has one record."""
    policy = expert_model("qwen3_moe")
    routers = find_routers(policy)
    assert routers is not None
    engine = Engine(
        RecordedModel(CausalLM(policy), routers), kv_tokens=600, block_size=8, max_running=8
    )
    steps = [Observation(text="abc"), Observation(text="d"), End(reward=1.0)]
    player = Player(
        EngineGenerator(engine, RENDERER), RENDERER, Limits(100, 3, 60.0), scripted(*steps)
    )
    params = SamplingParams(max_tokens=5)
    groups = asyncio.run(groups_in_order(Driver(player, params, 2).play(TASKS, 0), TASKS))
    assert any(len(t.turns) == 3 for group in groups for t in group.trajectories)
    batch = collate(groups, scored=False)
    for group in groups:
        for t in group.trajectories:
            assert len(t.turns) >= 2, t.reward
            assert t.routes is not None and len(t.routes) == len(t.tokens) - 1
    root = root_of(policy, "replay")
    scores = root(pack(batch, range(6), True), Scoring())
    assert isinstance(scores, RoutedScores) and scores.routed.drifted is not None
    assert scores.routed.drifted.tolist()[:2] == [0, 0]
    logp, _ = score_tables(root, batch, Scoring(), 4096, True)
    torch.testing.assert_close(logp, batch.old_logp, atol=1e-4, rtol=1e-4)


def step(model: PreTrainedModel, batch: Batch, routing: str, **values: Any) -> tuple[Tensor, Any]:
    model = copy.deepcopy(model)
    trainer = Trainer(root_of(model, routing), settings(**values), Scoring(), 10)
    metrics = trainer.train_step(batch, grpo().compute_loss)
    moments = [trainer.optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()]
    return torch.cat(moments), metrics


@pytest.mark.mostly_nightly(3)
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "jetmoe"])
def test_recomputed_layers_replay_too(name: str, mode: str) -> None:
    policy = expert_model(name)
    batch, other = prepared(sampled_groups(policy)), moved(policy)
    plain, metrics = step(other, batch, "replay", max_tokens_per_microbatch=80)
    assert metrics["train/microbatches"] > 1 and metrics["moe/drift_frac"] > 0
    assert metrics["moe/drift_layer_frac"] <= metrics["moe/drift_frac"]
    again, _ = step(
        other, batch, "replay", max_tokens_per_microbatch=80, activation_checkpointing=mode
    )
    assert relative(again, plain) < 1e-5
    free, _ = step(other, batch, "measure", max_tokens_per_microbatch=80)
    assert relative(free, plain) > 1e-3


def test_replay_closes_the_gap_between_engine_and_trainer_in_bfloat16() -> None:
    """The routers are nearly undecided, so rounding changes their choices."""
    policy = expert_model("qwen3_moe")
    with torch.no_grad():
        for layer in policy.model.layers:
            layer.mlp.gate.weight *= 0.02
    batch = prepared(sampled_groups(policy, autocast=torch.bfloat16))
    scoring = Scoring(autocast=torch.bfloat16)
    gaps = {}
    for routing in ("measure", "replay"):
        logp, _ = score_tables(root_of(policy, routing), batch, scoring, 4096, True)
        gaps[routing] = float((logp - batch.old_logp)[batch.mask].abs().mean())
    assert gaps["replay"] < 0.7 * gaps["measure"]


def test_a_router_without_top_k_refuses_a_replay() -> None:
    model = expert_model("phimoe")
    assert make_routing(model, MoeConfig(routing="measure")) is not None
    with pytest.raises(UserError, match=r"moe\.routing = 'replay'.*Use 'measure'"):
        make_routing(model, MoeConfig(routing="replay"))


def test_a_dense_model_refuses_a_replay(tiny: Any) -> None:
    with pytest.raises(UserError, match=r"moe\.routing = 'replay'.*Remove"):
        make_routing(tiny("qwen3"), MoeConfig(routing="replay"))
