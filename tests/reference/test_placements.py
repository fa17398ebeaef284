"""One reference, three places to score it: the same values, the same life of the weights, and no
process left behind.
"""

from __future__ import annotations

import multiprocessing
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.forked_programs import fork_programs, kill_program
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from sixfold.algorithm.kl import k3
from sixfold.batch import Batch, LossOutput, collate
from sixfold.errors import UserError
from sixfold.model.attention import NAME, register
from sixfold.recipe.plan import make_plan
from sixfold.recipe.schema import TrainerConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.reference.base import KeptReference
from sixfold.reference.frozen import FrozenReference, FusedReference
from sixfold.reference.worker_reference import ReferenceEnded, ReferenceFailed, WorkerReference
from sixfold.trainer.logprobs import PolicyRoot, Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Kept, Reward, Task, Trajectory

torch.set_num_threads(1)
SCORING = Scoring(temperature=0.8, chunk=16)
SIZES = dict(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
BUDGET = 24


def model(kind: str, seed: int = 0) -> PreTrainedModel:
    """Random weights large enough for every token to matter. gemma2: a window, soft caps, tied
    weights; gpt2: learned positions.
    """
    register()
    torch.manual_seed(seed)
    if kind == "gpt2":
        made: PreTrainedModel = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=23,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=64,
                bos_token_id=None,
                eos_token_id=None,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    elif kind == "gemma2":
        made = Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=8))
    else:
        made = LlamaForCausalLM(LlamaConfig(**SIZES))
    for p in made.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    made.set_attn_implementation(NAME)
    return made.eval()


def groups_of(seed: int) -> list[Group]:
    """Two groups of three, ragged."""
    generator = torch.Generator().manual_seed(seed)

    def integers(n: int) -> list[int]:
        return torch.randint(23, (n,), generator=generator).tolist()

    groups = []
    for g in range(2):
        prompt, rows = integers(2 + g), []
        for k in range(3):
            n = 2 + int(torch.randint(8, (1,), generator=generator))
            rows.append(
                Trajectory.one_turn(
                    f"t{g}",
                    k,
                    prompt,
                    integers(n),
                    [-3.0] * n,
                    [0] * n,
                    "stop",
                    reward=Reward(float(k == g)),
                )
            )
        groups.append(Group(Task(f"t{g}", "?"), rows))
    return groups


def batch_of(seed: int) -> Batch:
    return collate(groups_of(seed))


def unscored(groups: list[Group]) -> list[Group]:
    """The same trajectories before the environment has seen them."""
    return [
        Group(
            g.task,
            [Trajectory.from_record({**t.to_record(), "reward": None}) for t in g.trajectories],
        )
        for g in groups
    ]


def scores(reference: KeptReference, batch: Batch) -> torch.Tensor:
    ref_logp = reference.score(batch).ref_logp
    assert ref_logp is not None
    return ref_logp


def inline(policy: PreTrainedModel) -> FrozenReference:
    return FrozenReference(policy, SCORING, BUDGET, share_prefix=True)


def worker(policy: PreTrainedModel, threads: int = 1) -> WorkerReference:
    return WorkerReference(
        policy, SCORING, BUDGET, share_prefix=True, threads=threads, silence_s=300
    )


class Patched(LlamaForCausalLM):
    """Not what AutoModelForCausalLM makes of a Llama configuration."""


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, WorkerReference]]:
    """One for each kind of model, gpt2's with two threads, and one that cannot be. Llama's has an
    interpreter of its own; the others are forked.
    """
    made = {"llama": worker(model("llama"))}
    policy = Patched(model("llama").config)
    policy.set_attn_implementation(NAME)
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        made |= {"gemma2": worker(model("gemma2")), "gpt2": worker(model("gpt2"), threads=2)}
        made["patched"] = worker(policy)
    yield made
    for one in made.values():
        one.close()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_worker_scores_over_the_sets_that_sampling_kept(
    workers: dict[str, WorkerReference],
) -> None:
    """Begun on one set, asked about another: the answer is that of the batch it is asked about."""
    groups = groups_of(0)
    for t in (t for g in groups for t in g.trajectories):
        t.kept = Kept()
        for token in t.tokens[t.prompt_length :]:
            t.kept.add(array("i", sorted({token, 3, 4, 5})), 0.5)
    cut, full = collate(groups), batch_of(0)
    expected = scores(inline(model("llama")), cut)
    assert not torch.allclose(expected, scores(inline(model("llama")), full), atol=0.1)
    workers["llama"].start(unscored(groups_of(0)))
    assert torch.equal(scores(workers["llama"], cut), expected)
    workers["llama"].start(unscored(groups))
    assert torch.equal(scores(workers["llama"], cut), expected)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_worker_gives_the_inline_values_bit_for_bit(
    workers: dict[str, WorkerReference], kind: str
) -> None:
    reference = inline(model(kind))
    for seed in range(3):
        batch, groups = batch_of(seed), unscored(groups_of(seed))
        workers[kind].start(groups)
        assert torch.equal(scores(workers[kind], batch), scores(reference, batch))
        assert torch.equal(scores(workers[kind], batch), scores(reference, batch)), (
            "without a start"
        )


@pytest.mark.slow
def test_started_checks_are_collected_and_not_repeated(
    workers: dict[str, WorkerReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    original = WorkerReference._ask
    monkeypatch.setattr(
        WorkerReference,
        "_ask",
        lambda self, fields: (asked.append(len(fields["tokens"])), original(self, fields))[1],
    )
    workers["llama"].start(groups_of(1))
    scores(workers["llama"], batch_of(1))
    assert asked == [6]


@pytest.mark.slow
def test_the_answer_is_of_the_batch_that_is_asked_for(workers: dict[str, WorkerReference]) -> None:
    """Started with other groups, or with some that were dropped since, it scores what it
    is given.
    """
    reference, groups = inline(model("llama")), groups_of(2)
    for started, asked in (
        (groups_of(3), groups),
        (groups, groups[1:]),
        (groups, list(reversed(groups))),
    ):
        workers["llama"].start(started)
        workers["llama"].start(started)  # a second start takes the place of the first
        assert torch.equal(
            scores(workers["llama"], collate(asked)), scores(reference, collate(asked))
        )


@pytest.mark.slow
def test_reset_load_and_checkpoint_are_those_of_the_inline_copy(
    workers: dict[str, WorkerReference],
) -> None:
    policy, other, batch = model("gemma2"), model("gemma2", seed=1), batch_of(4)
    beside, reference = workers["gemma2"], inline(policy)
    saved = {name: t.clone() for name, t in beside.tensors().items()}
    assert saved.keys() == reference.tensors().keys() and all(
        torch.equal(saved[n], t) for n, t in reference.tensors().items()
    )
    beside.start(
        groups_of(4)
    )  # in the making while the weights change: must not be what comes next
    beside.reset(other)
    reference.reset(other)
    moved = scores(beside, batch)
    assert torch.equal(moved, scores(reference, batch))
    beside.load(saved, {})
    reference.load(saved, {})
    assert torch.equal(scores(beside, batch), scores(reference, batch)) and not torch.equal(
        scores(beside, batch), moved
    )
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert torch.equal(scores(beside, batch), scores(reference, batch)), (
        "the policy's training reached the reference"
    )


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("failed", [False, True])
def test_fused_trains_as_inline_does(failed: bool) -> None:
    """Every row has a weight: the same packing, bit for bit. One that has none is not packed: up to
    the rounding of sums.
    """
    results = []
    for fused in (False, True):
        policy, frozen = model("llama"), model("llama", seed=1)
        reference: KeptReference = FusedReference(frozen, SCORING) if fused else inline(frozen)
        config = TrainerConfig(learning_rate=1e-2, max_tokens_per_microbatch=BUDGET)
        trainer = Trainer(
            PolicyRoot(policy), config, SCORING, total_steps=5, frozen=reference.scorer
        )
        reference.check_apart(trainer.optimizer)
        kl = [
            trainer.train_step(reference.score(weighed(batch_of(seed), failed)), pull_back)[
                "train/kl"
            ]
            for seed in (0, 1)
        ]
        results.append((torch.cat([p.detach().flatten() for p in policy.parameters()]), kl))
    (ours, our_kl), (theirs, their_kl) = results
    assert min(our_kl) > 0.1
    if failed:
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert our_kl == pytest.approx(their_kl, rel=1e-6)
    else:
        assert torch.equal(ours, theirs) and our_kl == their_kl


def weighed(batch: Batch, failed: bool) -> Batch:
    """Equal weights, but for row 1 where its check is to have failed."""
    weights = batch.mask / batch.mask.sum()
    weights[1] *= not failed
    return batch.with_(weights=weights)


def pull_back(batch: Batch, logp: torch.Tensor) -> LossOutput:
    """k3 to the reference, alone."""
    assert batch.ref_logp is not None and batch.weights is not None
    kl = k3(logp, batch.ref_logp)
    return LossOutput((batch.weights * kl).sum(), means={"train/kl": kl.detach()})


def test_no_weight_is_in_an_optimizer(workers: dict[str, WorkerReference]) -> None:
    policy = model("llama")
    workers["llama"].check_apart(torch.optim.SGD(policy.parameters(), lr=1.0))
    FusedReference(policy, SCORING).check_apart(torch.optim.SGD(policy.parameters(), lr=1.0))
    mine = [t.requires_grad_() for t in workers["llama"].tensors().values()]
    with pytest.raises(RuntimeError, match="would be trained"):
        workers["llama"].check_apart(torch.optim.SGD(mine, lr=1.0))
    for t in mine:
        t.requires_grad_(False)


def test_an_error_in_the_worker_is_an_error_of_the_run_and_the_worker_lives_on(
    workers: dict[str, WorkerReference],
) -> None:
    batch = batch_of(6)
    with pytest.raises(ReferenceFailed, match="index out of range"):
        workers["llama"].score(batch.with_(tokens=batch.tokens + 23))
    assert torch.equal(scores(workers["llama"], batch), scores(inline(model("llama")), batch))


def test_more_threads_agree_up_to_rounding_and_a_closed_worker_ends(
    workers: dict[str, WorkerReference],
) -> None:
    torch.testing.assert_close(
        scores(workers["gpt2"], batch_of(5)),
        scores(inline(model("gpt2")), batch_of(5)),
        atol=1e-6,
        rtol=0.0,
    )
    workers["gpt2"].close()
    assert workers["gpt2"]._child.process.returncode == 0, "it had to be killed"


def test_a_dead_worker_is_reported_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_programs(monkeypatch)
    beside = worker(model("llama"))
    beside.start(groups_of(0))
    kill_program(beside._child.process.pid)
    with pytest.raises(ReferenceEnded, match="killed by SIGKILL; the machine may be out of memory"):
        beside.score(batch_of(0))
    with pytest.raises(ReferenceEnded, match="killed by SIGKILL"):
        beside.score(batch_of(0))
    beside.close()
    beside.close()


def test_a_model_that_its_configuration_does_not_make_is_refused(
    workers: dict[str, WorkerReference],
) -> None:
    with pytest.raises(ReferenceFailed, match="Patched cannot be built from its configuration"):
        workers["patched"].score(batch_of(0))


@pytest.mark.slow
def test_kill_9_of_the_run_leaves_no_process_behind() -> None:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()

    def run() -> None:
        beside = worker(model("llama"))
        beside.start(groups_of(0))
        theirs.send(beside._child.process.pid)
        time.sleep(60)

    parent = context.Process(target=run)
    parent.start()
    assert mine.poll(30)
    pid = mine.recv()
    assert alive(pid)
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Running; a process that has ended and that nobody has asked about is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_fused_is_refused_where_the_loss_is_not_the_first_to_ask() -> None:
    settings = ["--reference.placement", "fused", "--algorithm.beta", "0.1", "--algorithm.kl_in"]
    with pytest.raises(
        UserError, match=r"reference\.placement = 'fused'.*Use 'inline' or 'worker'"
    ):
        make_plan(parse_recipe("run.seed = 0", "test", [*settings, "reward"]))
    make_plan(parse_recipe("run.seed = 0", "test", [*settings, "loss"]))
    with pytest.raises(
        UserError, match=r"an adaptive beta \(algorithm.kl_target\) needs them earlier"
    ):
        make_plan(
            parse_recipe(
                "run.seed = 0", "test", [*settings, "loss", "--algorithm.kl_target", "0.1"]
            )
        )
    teacher = [
        "--reference.placement",
        "fused",
        "--reference.path",
        "teacher",
        "--algorithm.name",
        "opd",
    ]
    with pytest.raises(UserError, match="distillation from a teacher needs them earlier"):
        make_plan(parse_recipe("run.seed = 0", "test", teacher))
