"""The task that algorithms run alone on: the loop is whole, repeats itself bit for bit, and teaches."""

from __future__ import annotations

import pytest
import torch

from sixfold.algorithm.composed import make_algorithm
from sixfold.algorithm.shared_task import COMPLETION_TOKENS, SharedTask, main
from sixfold.algorithm.zoo import ZOO

torch.set_num_threads(1)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_three_steps_update_the_weights_and_come_out_the_same_twice(name: str) -> None:
    runs = []
    for _ in range(2):
        task = SharedTask(make_algorithm(ZOO[name], COMPLETION_TOKENS), sft_steps=12)
        loss = task.warm_up()
        before = [p.detach().clone() for p in task._model.parameters()]
        rewards = [r for _, r in zip(range(3), task.steps(), strict=False)]
        after = [p.detach().clone() for p in task._model.parameters()]
        assert task._rollout.engine.version == 3, "the sampler was not told of the new weights"
        assert loss < 2.5 and all(0.0 <= r <= 1.0 for r in rewards)
        assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        ema = rewards[0]
        for r in rewards[1:]:
            ema = 0.9 * ema + 0.1 * r
        assert task.ema == pytest.approx(ema)
        runs.append((rewards, after))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_main_prints_a_reward_line_a_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sixfold.algorithm.shared_task.SFT_STEPS", 2)
    main("grpo", steps=1)
    out = capsys.readouterr().out
    assert out.startswith("grpo on one-digit sums") and "step   1  reward 0." in out and "ema 0." in out
