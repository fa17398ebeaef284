"""reasoning-gym's own answers score 1 by its own scorers; what is handed to them is what the docstring says."""

import pytest

from sixfold.environment.gym import gym_reward, gym_tasks, submitted_answer
from sixfold.errors import UserError

pytest.importorskip("reasoning_gym")


def test_the_librarys_answers_score_one_and_others_less() -> None:
    tasks = gym_tasks(["chain_sum", "gcd", "spell_backward"], size=5, seed=1)
    assert len({task.id for task in tasks}) == 15
    for task in tasks:
        assert gym_reward(task.answer, task) == gym_reward(f"some work #{task.answer}", task) == 1.0
        assert gym_reward(f"#1 so <answer>{task.answer}</answer>#2", task) == 1.0
        assert gym_reward("no idea", task) < 0.5


def test_tasks_are_the_librarys_for_the_seed() -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("chain_sum", size=3, seed=4, min_terms=5, max_terms=5)
    tasks = gym_tasks(["chain_sum"], size=3, seed=4, settings={"chain_sum": {"min_terms": 5, "max_terms": 5}})
    assert [(t.prompt, t.answer) for t in tasks] == [(entry["question"], entry["answer"]) for entry in dataset]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [("12", "12"), ("1+2=3#12 ", "12"), ("#1#2", "2"), ("<answer> 5 </answer> #6", "5"), ("<answer>5", "5"), ("", "")],
)
def test_submitted_answer(completion: str, answer: str) -> None:
    assert submitted_answer(completion) == answer


def test_unknown_names_and_settings() -> None:
    with pytest.raises(UserError, match=r"no dataset 'chain_sun'. Did you mean 'chain_sum'\?"):
        gym_tasks(["chain_sun"], size=1, seed=0)
    with pytest.raises(UserError, match=r"'chain_sum'.*min_trems"):
        gym_tasks(["chain_sum"], size=1, seed=0, settings={"chain_sum": {"min_trems": 5}})


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r'pip install "sixfold\[gym\]"'):
        gym_tasks(["chain_sum"], size=1, seed=0)
