"""A process reward model among `environment.rewards`. It runs in the process of the run.

All completions of a task are scored in one call, as by reward models of whole completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..environment.grade import Grade
from ..errors import UserError
from ..recipe.reward_models import STAGE, is_address
from ..recipe.schema import ProcessScoringConfig, RewardScoringConfig
from .asked import UNSCORED, Asked, Texts
from .implicit import load_implicit
from .reward import same_tokens, scoring_device
from .step_model import load_step_model
from .step_scorer import ProcessScorer

_SETTING = "environment.rewards"


class ProcessReward:
    """A reward function in TRL's form whose grades have rewards of steps.

    The token ids that were sampled are scored if the model reads completions without marks and has
    the tokenizer of the policy. Otherwise the texts are encoded by its own tokenizer.

    Args:
        scorer: the model.
        config: the recipe's [environment.prm] section.

    Attributes:
        __name__: name in logs.
        of_steps: its own value is 0, so that it does not tell what is solved.
    """

    of_steps = True

    def __init__(self, scorer: ProcessScorer, config: ProcessScoringConfig) -> None:
        self._scorer = scorer
        self._config = config
        self.__name__ = "prm"

    def __call__(
        self,
        prompts: Texts,
        completions: Texts,
        completion_ids: Sequence[Sequence[int]],
        prompt_ids: Sequence[Sequence[int]],
        rendered_prompt: Sequence[str],
        finish_reason: Sequence[str],
    ) -> list[Grade]:
        """Grades of completions of one task, each of value 0 with rewards of its steps.

        The arguments are those of `Asked.of`.
        """
        given = prompts, completions, completion_ids, prompt_ids, rendered_prompt, finish_reason
        asked = Asked.of(*given)
        scorer, config, texts = self._scorer, self._config, asked.completions
        ends = [scorer.steps.ends(text) if text.strip() else [] for text in texts]
        if scorer.reads_tokens and same_tokens(scorer, asked):
            read = asked.prompt_ids, asked.completion_ids
            found = scorer.score_tokens(*read, texts, ends, every=False)
        else:
            found = scorer.score(asked.task, texts, ends, every=False)
        return [
            UNSCORED
            if any(map(math.isnan, scores))
            else Grade(
                0.0,
                None,
                metrics={"steps": len(scores), "min": min(scores), "last": scores[-1]}
                if scores
                else {"steps": 0},
                steps=tuple(
                    zip(at, credits(scores, config.credit, config.temperature), strict=True)
                ),
            )
            for at, scores in zip(ends, found, strict=True)
        ]


def credits(scores: Sequence[float], credit: str, temperature: float) -> list[float]:
    """Rewards of the steps of a solution from their scores.

    Args:
        scores: score of each step, in order.
        credit: "score": the scores. "gain": score_k - score_(k-1), where score_0 = 0. "min":
            score_k exp(-score_k / T) / sum_j exp(-score_j / T), the transform of PURE
            (arXiv:2504.15275, equation 7), whose sum tends to the smallest score as T tends to 0.
            "log_odds": logit score_k - logit score_(k-1), where logit score_0 = 0. Of an implicit
            model it is beta * log pi / pi_ref of the step (PRIME, arXiv:2502.01456).
        temperature: T.
    """
    if credit == "log_odds":
        return credits([_logit(score) for score in scores], "gain", temperature)
    if credit == "gain":
        return [score - before for before, score in zip([0.0, *scores], scores, strict=False)]
    if credit == "min" and scores:
        least = min(scores)  # else exp would underflow for small T
        weights = [math.exp((least - score) / temperature) for score in scores]
        total = sum(weights)
        return [w * score / total for w, score in zip(weights, scores, strict=True)]
    return list(scores)


def _logit(score: float) -> float:
    """log(p / (1 - p)), of a p at least 1e-12 from 0 and 1."""
    p = min(max(score, 1e-12), 1 - 1e-12)
    return math.log(p) - math.log1p(-p)


def process_reward(
    paths: Sequence[str], config: ProcessScoringConfig, machine: RewardScoringConfig
) -> ProcessReward:
    """The reward of a process reward model.

    Args:
        paths: as for `load_process_scorer`.
        config: the recipe's [environment.prm] section.
        machine: the recipe's [environment.reward_model] section: device, precision and size.

    Raises:
        UserError: as `load_process_scorer`, or if a path is that of a stage or a server.
    """
    for path in paths:
        if path.startswith(STAGE) or not path.strip():
            raise UserError(
                f"{_SETTING}: {path!r} names a stage, and this recipe has no stage before it. Write"
                " prm:FOLDER"
            )
        if is_address(path):
            raise UserError(
                f"{_SETTING}: prm:{path} is the address of a server, and a process reward model"
                " runs in the process of the run. Write prm:FOLDER"
            )
    return ProcessReward(load_process_scorer(paths, config, machine, _SETTING), config)


def load_process_scorer(
    paths: Sequence[str], config: ProcessScoringConfig, machine: RewardScoringConfig, setting: str
) -> ProcessScorer:
    """The scorer of a process reward model.

    Args:
        paths: model folder or hub id; or two, of a policy and its reference, which are an implicit
            process reward model.
        config: how it is read, and where steps end.
        machine: device, precision and size.
        setting: where the path is given, for error messages.

    Raises:
        UserError: if it cannot be loaded, there is no such device, or paths are more than two.
    """
    device, dtype = scoring_device(machine)
    if len(paths) > 2:
        raise UserError(
            f"{setting}: prm:{','.join(paths)} names {len(paths)} models. Process reward models"
            " form no ensemble: name each as a reward of its own. Two are a policy and its"
            " reference"
        )
    if len(paths) == 2:
        if config.convention != "auto":
            raise UserError(
                f"environment.prm.convention = '{config.convention}' has no effect on"
                f" prm:{','.join(paths)}, a policy and its reference. Remove it"
            )
        model = load_implicit(paths, config.beta, device, dtype, setting)
    else:
        path = str(Path(paths[0]).expanduser())
        model = load_step_model(path, config.convention, device, dtype, setting)
    return ProcessScorer(model, machine.max_tokens, config.ends)
