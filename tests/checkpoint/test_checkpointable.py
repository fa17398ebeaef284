"""Contract of every component that a checkpoint stores.

Each case builds a component, and lets it do one step. The oracle is the uninterrupted component:
one that was restored from a checkpoint on the disk must do the next step with the same result, bit
for bit.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.algorithm.steering import Steering
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, LossOutput, collate, filled
from sixfold.checkpoint.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sixfold.checkpoint.payload import Payload
from sixfold.checkpoint.registry import load_components, states_of, tensors_of
from sixfold.checkpoint.state import RunState
from sixfold.checkpointable import Checkpointable, WithoutTensors
from sixfold.critic.critic import Critic
from sixfold.engine.engine import Engine
from sixfold.errors import UserError
from sixfold.evaluation.divergence import Divergence
from sixfold.model.causal_lm import CausalLM
from sixfold.recipe.schema import CriticConfig, TrainerConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.reference.frozen import FrozenReference, FusedReference
from sixfold.reference.reset import ResetPolicy
from sixfold.reference.worker_reference import WorkerReference
from sixfold.report.alarms import Alarms
from sixfold.run.start import train_run
from sixfold.sync.sync import CopySync, SharedSync
from sixfold.sync.versioned import VersionedSync
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Reward, Task, Trajectory, Turn
from tests.forked_programs import fork_programs
from tests.run.processes import tiny_recipe

SETTINGS = TrainerConfig(learning_rate=1e-2, max_tokens_per_microbatch=64)
SCORING = Scoring(chunk=16)
CLOSED: list[WorkerReference] = []


def batch_of(step: int) -> Batch:
    """Two groups of two samples with weights, returns, values and reference log-probs."""
    rng = torch.Generator().manual_seed(step)

    def trajectory(task: str, sample: int) -> Trajectory:
        tokens = torch.randint(2, 60, (9,), generator=rng).tolist()
        reward = Reward(float(torch.rand((), generator=rng)))
        turns = (Turn(3, 9),)
        logp, version = [0.0] * 3 + [-2.0] * 6, [-1] * 3 + [0] * 6
        return Trajectory(task, sample, tokens, "pppssssss", logp, version, turns, reward=reward)

    groups = [Group(Task(t, "?"), [trajectory(t, k) for k in range(2)]) for t in ("a", "b")]
    batch = collate(groups)
    noise = torch.rand(batch.tokens.shape, generator=rng)
    return batch.with_(
        weights=batch.mask / batch.mask.sum(),
        returns=torch.where(batch.mask, noise, 0.0),
        values=torch.where(batch.mask, 1 - noise, 0.0),
        ref_logp=torch.where(batch.mask, -2.0 - noise, 0.0),
    )


def policy_loss(batch: Batch, logp: Tensor) -> LossOutput:
    scored = logp * batch.scores[:, None] * filled(batch.weights, "weights")
    return LossOutput(-torch.where(batch.mask, scored, 0.0).sum())


def overflowing_loss(batch: Batch, logp: Tensor) -> LossOutput:
    return LossOutput(policy_loss(batch, logp).loss * math.inf)


def value_loss(batch: Batch, values: Tensor) -> LossOutput:
    error = (values - filled(batch.returns, "returns")).square() * filled(batch.weights, "weights")
    return LossOutput(torch.where(batch.mask, error, 0.0).sum())


def moved(model: PreTrainedModel, step: int) -> PreTrainedModel:
    """A copy with the weights of a step. They do not depend on the model's own."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_(0, 0.1, generator=generator)
    return other


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Elsewhere:
    """An engine in another process."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.version = copy.deepcopy(model), -1

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        self.version = version
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])
        return 0

    async def score(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        logp = logits.float().log_softmax(-1)
        return logp.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    async def sleep(self) -> None:
        """Nothing to free."""


@dataclass
class Subject:
    """A component under test.

    Attributes:
        component: as it is registered.
        step: one step of the component. Returns everything that can be observed of it.
        saved: model whose weights are saved with the model, not by the component. None: no model.
    """

    component: Checkpointable
    step: Callable[[int], object]
    saved: PreTrainedModel | None = None


def trainer(model: PreTrainedModel) -> Subject:
    """The update before the checkpoint is skipped, so that no counter is 0."""
    made = Trainer(PolicyRoot(model), SETTINGS, SCORING, 100)

    def step(i: int) -> object:
        loss = overflowing_loss if i == STEPS - 1 else policy_loss
        return made.train_step(batch_of(i), loss), weights_of(model)

    return Subject(made, step, model)


def critic(model: PreTrainedModel, body: str) -> Subject:
    made = Critic(PolicyRoot(model), CriticConfig(body=body), SETTINGS, SCORING, 100)  # type: ignore[arg-type]

    def step(i: int) -> object:
        batch = made.score(batch_of(i))
        return made.update(batch, value_loss), filled(batch.values, "values")

    return Subject(made, step, model)


def reference(model: PreTrainedModel, kind: str) -> Subject:
    made: FrozenReference | FusedReference | WorkerReference
    if kind == "inline":
        made = FrozenReference(model, SCORING, 64, True)
    elif kind == "fused":
        made = FusedReference(model, SCORING)
    else:
        made = WorkerReference(model, SCORING, 64, True, 1, 300)
        CLOSED.append(made)

    def step(i: int) -> object:
        scored = made.score(batch_of(i)).ref_logp
        made.reset(moved(model, i))
        return scored, {name: t.clone() for name, t in made.tensors().items()}

    return Subject(made, step)


def algorithm(model: PreTrainedModel) -> Subject:
    steered = replace(
        ZOO["grpo"], beta=0.1, kl_target=0.01, entropy_target=5.0, whiten="all", kl="k1"
    )
    made = Steering(steered)

    def step(i: int) -> object:
        batch = batch_of(i)
        made.observe(batch, batch.scores)
        return made.beta, made.entropy_bonus, made.whitened(batch, batch.scores)

    return Subject(WithoutTensors(made), step)


def resets(model: PreTrainedModel) -> Subject:
    made, heldout = ResetPolicy(0, 2), (0.5, 0.4, 0.3, 0.45, 0.6)
    return Subject(WithoutTensors(made), lambda i: made.observe(i + 1, heldout[i]))


def in_process(model: PreTrainedModel, kind: str) -> Subject:
    trained = copy.deepcopy(model)
    engine = Engine(
        CausalLM(trained if kind == "shared" else copy.deepcopy(model).requires_grad_(False)),
        kv_tokens=64,
        block_size=8,
    )
    made: SharedSync | CopySync
    made = SharedSync(trained, engine) if kind == "shared" else CopySync(trained, engine, 2, kind)

    def step(i: int) -> object:
        with torch.no_grad():
            for p, q in zip(trained.parameters(), moved(model, i).parameters(), strict=True):
                p.copy_(q)
        made.sync(i + 1)
        return made.state(), weights_of(engine.runner.model.module)

    return Subject(made, step)


def outside(model: PreTrainedModel) -> Subject:
    trained = copy.deepcopy(model)
    engine = Elsewhere(model)
    made = VersionedSync(trained, engine, 2, 1e-3, 64)  # type: ignore[arg-type]
    made.refresh()

    def step(i: int) -> object:
        with torch.no_grad():
            for p, q in zip(trained.parameters(), moved(model, i).parameters(), strict=True):
                p.copy_(q)
        made.sync(i + 1)
        return made.state(), weights_of(engine.model)

    return Subject(made, step)


def alarms(model: PreTrainedModel) -> Subject:
    made = Alarms()

    def step(i: int) -> object:
        said = [made.observe({"rollout/tok_s": 9.0 - i, "group/degenerate_frac": 0.9})]
        return [*said, *(made.observe({"group/degenerate_frac": 0.9}) for _ in range(3))]

    return Subject(WithoutTensors(made), step)


def divergence(model: PreTrainedModel) -> Subject:
    made = Divergence()

    def step(i: int) -> object:
        made.reward(0.1 * i)
        return made.observe(i, [1.0 - 0.3 * i] * 8)

    return Subject(WithoutTensors(made), step)


def progress(model: PreTrainedModel) -> Subject:
    made = RunState(before={"accuracy": 0.5, "values": [0.1 + 0.2]})

    def step(i: int) -> object:
        made.step, made.ema, made.unlogged = made.step + 1, i / 3, {"train/loss": None}
        return made.state()

    return Subject(WithoutTensors(made), step)


CASES: dict[str, Callable[[PreTrainedModel], Subject]] = {
    "policy": trainer,
    "sft": trainer,
    "critic/own": lambda model: critic(model, "own"),
    "critic/policy": lambda model: critic(model, "policy"),
    "reference/inline": lambda model: reference(model, "inline"),
    "reference/fused": lambda model: reference(model, "fused"),
    "reference/worker": lambda model: reference(model, "worker"),
    "algorithm": algorithm,
    "resets": resets,
    "sync/shared": lambda model: in_process(model, "shared"),
    "sync/copy": lambda model: in_process(model, "copy"),
    "sync/int8": lambda model: in_process(model, "int8"),
    "sync/outside": outside,
    "alarms": alarms,
    "divergence": divergence,
    "progress": progress,
}
"""Component, or component/kind -> its case."""

STEPS = 3
STARTS_A_PROCESS = "reference/worker"
cases = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if case == STARTS_A_PROCESS else case
        for case in CASES
    ],
)


@pytest.fixture(autouse=True)
def _workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fork_programs(monkeypatch)
    yield
    while CLOSED:
        CLOSED.pop().close()


@pytest.fixture
def model(tiny: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return copy.deepcopy(tiny("qwen3"))


def after_steps(case: str, model: PreTrainedModel) -> Subject:
    subject = CASES[case](model)
    for i in range(STEPS):
        subject.step(i)
    return subject


def fresh(case: str, like: Subject, model: PreTrainedModel) -> Subject:
    """As a new process builds it: only the saved model has the weights of the earlier process."""
    return CASES[case](copy.deepcopy(like.saved) if like.saved is not None else moved(model, 5))


def through_the_disk(folder: Path, **components: Checkpointable) -> Checkpoint:
    payload = Payload(tensors_of(components), states_of(components), {})
    return load_checkpoint(
        save_checkpoint(folder, 1, write_model=lambda _: None, model_bytes=0, payload=payload)
    )


def copied(component: Checkpointable) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {name: t.detach().clone() for name, t in component.tensors().items()}
    return tensors, json.loads(json.dumps(component.state()))


def equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@cases
def test_restored_component_continues_bit_for_bit(
    case: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    ran = after_steps(case, model)
    again = fresh(case, ran, model)
    name = case.partition("/")[0]
    before = copied(ran.component)
    load_components(through_the_disk(tmp_path, **{name: ran.component}), {name: again.component})
    assert equal(copied(again.component), before)
    for i in (STEPS, STEPS + 1):
        assert equal(again.step(i), ran.step(i))
    assert equal(copied(again.component), copied(ran.component))
    assert not equal(copied(ran.component), before) or case == "divergence"


@cases
def test_state_is_plain_json(case: str, model: PreTrainedModel) -> None:
    state = after_steps(case, model).component.state()
    assert json.loads(json.dumps(state, allow_nan=False)) == state


@cases
def test_tensors_are_live(case: str, model: PreTrainedModel) -> None:
    component = after_steps(case, model).component
    first, second = component.tensors(), component.tensors()
    assert [t.data_ptr() for t in first.values()] == [t.data_ptr() for t in second.values()]


def spoiled(
    tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """Every kind of checkpoint that does not fit, with what is wrong."""
    yield "an unknown value", dict(tensors), {**state, "unknown": 0}
    yield "an unknown tensor", {**tensors, "unknown": torch.zeros(2)}, dict(state)
    for name in list(state)[-1:]:
        yield "a missing value", dict(tensors), {k: v for k, v in state.items() if k != name}
    for name in [*list(tensors)[:1], *list(tensors)[-1:]]:
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        tensor = tensors[name]
        yield "a missing tensor", rest, dict(state)
        renamed = f"{name}.renamed"
        yield "a renamed tensor", {**rest, renamed: tensor}, dict(state)
        yield "another dtype", {**rest, name: tensor.to(torch.float64)}, dict(state)
        yield "another shape", {**rest, name: torch.zeros(*tensor.shape, 2)}, dict(state)


@cases
def test_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    case: str, model: PreTrainedModel
) -> None:
    ran = after_steps(case, model)
    tensors, state = copied(ran.component)
    again = fresh(case, ran, model)
    again.step(0)
    before = copied(again.component)
    for what, wrong_tensors, wrong_state in spoiled(tensors, state):
        with raised(what):
            again.component.load(wrong_tensors, wrong_state)
        assert equal(copied(again.component), before), what


@contextmanager
def raised(what: str) -> Iterator[None]:
    """Expects a UserError; a failure says what should have been refused."""
    try:
        yield
    except UserError:
        return
    raise AssertionError(f"{what} was accepted")


@pytest.mark.parametrize(
    ("saved", "wanted", "said"),
    [
        (("resets",), ("resets", "reference"), ("'reference'", "algorithm.beta = 0")),
        (("resets", "reference"), ("resets",), ("'reference'", "algorithm.beta > 0")),
        (("resets",), ("resets", "critic"), ("'critic'", "algorithm.name")),
        (("resets",), ("renamed",), ("'renamed'", "start a new run")),
    ],
)
def test_absent_extra_and_renamed_components_are_refused_by_name(
    saved: tuple[str, ...], wanted: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    def registry(names: tuple[str, ...]) -> dict[str, Checkpointable]:
        return {name: WithoutTensors(ResetPolicy(0, 2)) for name in names}

    checkpoint = through_the_disk(tmp_path, **registry(saved))
    with pytest.raises(UserError) as error:
        load_components(checkpoint, registry(wanted))
    assert all(part in str(error.value) for part in (*said, str(checkpoint.path)))


def test_tensor_without_a_component_is_refused(tmp_path: Path) -> None:
    payload = Payload({"nobody/w": torch.zeros(1)}, {}, {})
    path = save_checkpoint(tmp_path, 1, write_model=lambda _: None, model_bytes=0, payload=payload)
    with pytest.raises(UserError, match="nobody/w"):
        load_components(load_checkpoint(path), {})


@pytest.mark.slow
def test_every_component_of_a_run_has_a_case(tmp_path: Path) -> None:
    """Checkpoints of SFT and of RL, with and without a critic."""
    found: set[str] = set()
    for name, changes in (("ppo", {"algorithm__name": "ppo"}), ("kl", {"algorithm__beta": 0.1})):
        flags = tiny_recipe(tmp_path, run__name=name, run__steps=1, checkpoint__keep=9, **changes)
        assert train_run(parse_recipe('run.name = "r"', "test", flags)) == 0
        for path in (tmp_path / name / "checkpoints").iterdir():
            found |= set(load_checkpoint(path).payload.components)
    assert found == {case.partition("/")[0] for case in CASES}
