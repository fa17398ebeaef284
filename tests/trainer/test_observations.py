"""Observations are context and never targets: what masked and unmasked training do to the
probability of a tool's output, and the detectors of two traps.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import VOCABULARY, make_trainer, plain_logp, tiny_model
from transformers import PreTrainedModel

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, collate, number
from sixfold.trainer.logprobs import Scoring, score_batch
from sixfold.trainer.parity import TRAINING_LIMIT
from sixfold.trainer.trainer import EngineDisagrees
from sixfold.types import Group, Reward, Task, Trajectory, Turn

torch.set_num_threads(1)

PROMPT = [3, 5]
OUTPUT = [11, 7, 2, 11]
"""What the tool writes after every call."""

SAMPLES = 16


def calls_tool(token: int) -> bool:
    return token % 2 == 0


def episode(sample: int, first: int, last: int, masked: bool = True) -> Trajectory:
    """An even first token calls the tool and earns 1; its output and a second reply follow. An odd
    one ends the episode with reward 0. Without `masked` the output is passed off as sampled.
    """
    if not calls_tool(first):
        return Trajectory.one_turn(
            "t", sample, PROMPT, [first], [0.0], [0], "stop", reward=Reward(0.0)
        )
    n = len(OUTPUT)
    turns = (Turn(2, 3), Turn(3 + n, 4 + n)) if masked else (Turn(2, 4 + n),)
    return Trajectory(
        "t",
        sample,
        [*PROMPT, first, *OUTPUT, last],
        "pps" + ("o" if masked else "s") * n + "s",
        [0.0] * (4 + n),
        [-1, -1, 0, *([-1 if masked else 0] * n), 0],
        turns,
        reward=Reward(1.0),
    )


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """Copy of the model for ordinary padded forwards. The trainer needs its own attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


def next_tokens(model: PreTrainedModel, prefixes: list[list[int]], seed: int) -> list[int]:
    """One token sampled after each prefix; all prefixes have one length."""
    model = plain(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(prefixes), use_cache=False).logits[:, -1]
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].tolist()


def sampled_batch(model: PreTrainedModel, seed: int, masked: bool) -> Batch:
    """One group of episodes that the model plays, with its own log-probs."""
    firsts = next_tokens(model, [PROMPT] * SAMPLES, seed)
    lasts = next_tokens(model, [[*PROMPT, first, *OUTPUT] for first in firsts], seed + 1000)
    rows = [
        episode(k, first, last, masked)
        for k, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]
    batch = collate([Group(Task("t", "?"), rows)])
    return batch.with_(old_logp=plain_logp(plain(model), batch).detach())


def output_probability(model: PreTrainedModel) -> float:
    """Geometric mean of the probability of an output token, over all calls of the tool."""
    firsts = [first for first in range(VOCABULARY) if calls_tool(first)]
    batch = collate(
        [Group(Task("t", "?"), [episode(k, f, 0, False) for k, f in enumerate(firsts)])]
    )
    with torch.no_grad():
        logp = plain_logp(plain(model), batch)
    return float(logp[:, 3 : 3 + len(OUTPUT)].mean().exp())


def trained(start: PreTrainedModel, masked: bool, steps: int = 20) -> PreTrainedModel:
    model = copy.deepcopy(start)
    trainer, algorithm = make_trainer(model, learning_rate=3e-3), Composed(ZOO["reinforce"], 8)
    for step in range(steps):
        batch = algorithm.prepare(sampled_batch(model, step, masked))
        trainer.train_step(batch, algorithm.compute_loss)
    return model


def share_of_calls(model: PreTrainedModel) -> float:
    return sum(map(calls_tool, next_tokens(model, [PROMPT] * 1000, seed=7))) / 1000


@pytest.mark.slow
def test_unmasked_training_teaches_the_tools_output_and_masked_training_does_not() -> None:
    """docs/environments.md quotes the figures. Without the mask, most of the gradient goes
    into the output, and the policy learns less to call the tool.
    """
    start = tiny_model()
    before = output_probability(start)
    masked, unmasked = trained(start, masked=True), trained(start, masked=False)
    assert output_probability(masked) < 1.2 * before
    assert output_probability(unmasked) > 5 * before
    assert share_of_calls(masked) > share_of_calls(unmasked) + 0.1


def on_policy(model: PreTrainedModel, temperature: float) -> Batch:
    """A batch with the log-probs of the model itself at a sampling temperature."""
    batch = sampled_batch(model, seed=0, masked=True)
    logp = score_batch(model, batch, Scoring(temperature), 10**6, True)
    algorithm = Composed(ZOO["reinforce"], 8)
    return algorithm.prepare(batch.with_(old_logp=logp))


@pytest.mark.parametrize(
    ("token", "claim"), [(OUTPUT[0], "is in the mask"), (None, "is not in the mask")]
)
def test_the_traps_of_a_changed_mask_are_found_by_the_mask_check(
    token: int | None, claim: str
) -> None:
    """Between rollout and trainer, the mask gets an observed token, or loses a sampled one."""
    model = tiny_model()
    batch = on_policy(model, 1.0)
    found = batch.mask if token is None else (batch.tokens == token) & ~batch.mask
    b, t = found.nonzero()[0].tolist()
    mask = batch.mask.clone()
    mask[b, t] = token is not None
    trainer = make_trainer(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"trajectory {b} of task t: token {t} {claim}"):
        trainer.train_step(batch.with_(mask=mask), Composed(ZOO["reinforce"], 8).compute_loss)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.0, 1.3])
def test_the_trap_of_another_temperature_is_found_by_the_mismatch(temperature: float) -> None:
    """The engine samples at one temperature and the trainer scores at 1."""
    model = tiny_model()
    batch = on_policy(model, temperature)
    trainer = make_trainer(model)
    trainer.mismatch_limit = TRAINING_LIMIT["float32"]
    loss = Composed(ZOO["reinforce"], 8).compute_loss
    if temperature == 1.0:
        assert number(trainer.train_step(batch, loss), "mismatch/mean_abs_logp") < 1e-5
    else:
        fits = r"log-probs fit [\d.]+ times the trainer.s temperature"
        with pytest.raises(EngineDisagrees, match=fits):
            trainer.train_step(batch, loss)


@pytest.mark.parametrize("temperature", [0.96, 1.04])
def test_a_small_difference_of_temperature_is_measured(temperature: float) -> None:
    """Below the limit that stops a run."""
    model = tiny_model()
    batch = on_policy(model, temperature)
    trainer = make_trainer(model)
    trainer.mismatch_limit = TRAINING_LIMIT["float32"]
    found = trainer.train_step(batch, Composed(ZOO["reinforce"], 8).compute_loss)
    assert number(found, "mismatch/temperature") == pytest.approx(temperature, abs=0.003)
