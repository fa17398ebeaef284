"""`sixfold train RECIPE` and `sixfold train --resume RUN`, with or without stages."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..checkpoint.model_source import with_model_folders
from ..cli.parsing import RECIPE_HELP, VerbParser, argument, option, run_folder
from ..controller.schedule import ScheduleEnds
from ..errors import UserError
from ..files.folder import RunFolder, recover
from ..recipe.plan import make_plan
from ..recipe.resume_policy import NAMES
from ..recipe.schema import (
    EngineBackend,
    EngineConfig,
    NoSpeculation,
    RayPlacement,
    RolloutConfig,
    RunConfig,
)
from ..recipe.stages import StagedRecipe
from ..recipe.toml import load_staged
from ..report.replay_verdict import replay_verdict
from ..run.recipe_environment import check_names
from ..run.restart import restarting
from ..sizing.memory import ranks_started
from ..stages.plans import stage_plans

OVERWRITE_HELP = "replace an earlier run of the same name, which is deleted when the new run ends"


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str | None = argument(RECIPE_HELP, None)
    resume: str | None = option(
        "continue a run from its newest checkpoint, with its recipe; settings may be added",
        metavar="RUN",
    )
    replay_schedule: str | None = option(
        "make an asynchronous run again, with its recipe: the same groups in the same steps, every"
        " token from the same version of the weights; in one process, as NAME-replay",
        metavar="RUN",
        either="stages",
    )
    overwrite: bool = option(OVERWRITE_HELP, False)
    only: str = option(
        "run this stage of the recipe alone, with what the earlier stages of the run have made",
        "",
        metavar="STAGE",
        either="stages",
    )
    from_: str = option(
        "make this stage and those after it again, with what the earlier stages of the run have"
        " made",
        "",
        metavar="STAGE",
        either="stages",
    )
    settings: tuple[str, ...] = ()


PARSER = VerbParser(
    "train",
    "Train a model by reinforcement learning, run all stages of a recipe, or resume a run.",
    Options,
)


def run(arguments: Sequence[str]) -> int:
    """Check what can be checked without torch, and train."""
    given = PARSER.parse(arguments)
    if given.replay_schedule is not None:
        return _replay(given, given.replay_schedule)
    if given.resume is None and given.recipe is not None:
        return start(load_staged(given.recipe, given.settings), given)
    if given.resume is None or given.recipe is not None:
        raise UserError(
            "sixfold train: give a recipe (sixfold train demo) or --resume RUN, one of the two"
        )
    if given.overwrite:
        raise UserError(
            "sixfold train: --resume keeps the run and --overwrite deletes it; give one of them"
        )
    for name in NAMES:
        if any(word.partition("=")[0] == f"--{name}" for word in given.settings):
            raise UserError(
                f"{name} cannot change on resume: the run stays in its folder; leave out --{name}"
            )
    recover(Path(given.resume).expanduser())
    folder = run_folder(given.resume)
    whole = RunFolder(folder).whole
    if whole != folder:
        raise UserError(
            f"{folder} is a stage of {whole}, which resumes as a whole: sixfold train --resume"
            f" {whole}"
        )
    return start(load_staged(str(folder / "recipe.toml"), given.settings), given, resume=folder)


def _replay(given: Options, name: str) -> int:
    """Make an asynchronous run again, and compare the weights.

    Raises:
        UserError: if there is nothing to replay, or the replay differs from the recorded run.
    """
    if given.resume is not None or given.recipe is not None:
        raise UserError(
            "sixfold train: --replay-schedule RUN has the recipe of the run: leave out the recipe"
            " and --resume"
        )
    recorded = RunFolder(run_folder(name).resolve())
    staged = load_staged(str(recorded.recipe), given.settings)
    if staged.stages or recorded.whole != recorded.path:
        raise UserError(
            f"{recorded.path} belongs to a recipe with stages, which is not replayed. A run without"
            " stages is"
        )
    recipe = staged.base
    settings = _settings_of_replay(recipe.rollout, recipe.engine, recorded.path)
    if recipe.environment.agent.command:
        raise UserError(
            f"{recorded.path} runs an agent, and its schedule does not say which conversation of a"
            " sample has which tokens: it cannot be replayed"
        )
    if not any(word.partition("=")[0] == "--run.name" for word in given.settings):
        settings["run.name"] = f"{recorded.path.name}-replay"
    recipe = with_model_folders(recipe.with_settings(settings))
    replay = RunFolder((Path(recipe.run.dir) / recipe.run.name).resolve())
    if replay.path == recorded.path:
        raise UserError(f"--run.name {recipe.run.name} is the recorded run itself: give another")
    make_plan(recipe)
    check_names(recipe.environment, recipe.eval)
    from ..run.start import train_run

    try:
        code = train_run(recipe, overwrite=given.overwrite, replayed=recorded.schedule)
    except ScheduleEnds as end:
        print(end)
        code = 0
    if code == 0 and os.environ.get("RANK", "0") == "0":  # which writes the checkpoints
        print(replay_verdict(recorded, replay))
    return code


def _settings_of_replay(
    rollout: RolloutConfig, engine: EngineConfig, folder: Path
) -> dict[str, object]:
    """Settings that a replay changes.

    Args:
        rollout: settings of the recorded run.
        engine: likewise.
        folder: folder of the recorded run.

    Raises:
        UserError: if the run cannot be replayed.
    """
    outside = rollout.backend.kind
    for key, value, only, why in (
        ("rollout.oversample", rollout.oversample, 0, "samples that were aborted"),
        ("rollout.branches", rollout.branches, 1, "who sampled the shared turns"),
        *[("rollout.backend.kind", outside, "engine", "which noise that program drew")]
        * (outside in ("vllm", "sglang")),
        ("engine.preemption.kind", engine.preemption.kind, "none", "keys that were computed again"),
        *[("engine.speculation.kind", "draft", "none", "what the draft model proposed")]
        * (engine.speculation.kind == "draft"),
    ):
        if value != only:
            raise UserError(
                f"{folder} has {key} = {value!r}, and its schedule does not say {why}: it cannot be"
                " replayed"
            )
    samples = rollout.prompts_per_step * (rollout.samples_per_prompt + 1)  # a greedy baseline
    return {
        "rollout.backend": EngineBackend(),  # which a Sixfold server runs too
        # Sequences that wait for later weights must not block others.
        "engine.max_running": samples * (rollout.staleness + 2),
        "engine.kv_tokens": 0,
        "engine.speculation": NoSpeculation(),  # n-grams propose the same tokens
        "run.max_minutes": 0.0,
    }


def start(
    staged: StagedRecipe,
    given: Options,
    *,
    resume: Path | None = None,
    stop_after: Literal["sft"] | None = None,
) -> int:
    """Check the plan of every stage, then import torch and run.

    Args:
        staged: the recipe, maybe without stages.
        given: what else the user asks for.
        resume: folder of the run to resume, or None.
        stop_after: last part of a run without stages, or None for all.

    Raises:
        UserError: if the plan refuses the recipe, or the disk is full.
    """
    recipe = staged.base
    folder = resume or Path(recipe.run.dir) / recipe.run.name
    if not staged.stages and (given.only or given.from_):
        raise UserError(f"{given.recipe or folder} has no [[stages]]: leave out --only and --from")
    if staged.stages:
        stage_plans(staged, str(folder))
    else:
        recipe = with_model_folders(recipe)
        make_plan(recipe)
        check_names(recipe.environment, recipe.eval)
    placement, is_rank = recipe.placement, ranks_started() > 1
    asked = given, folder, resume, stop_after
    if isinstance(placement, RayPlacement) and placement.ranks > 1 and not is_rank:
        return _on_ray(recipe.run, recipe.environment.workers, placement, *asked)
    try:
        if staged.stages:
            from ..stages.driver import train_stages

            only, first = given.only, given.from_
            limit = 0 if only or first else recipe.run.restarts
            with restarting(folder, limit, resume is not None, given.settings):
                return train_stages(
                    staged, resume=resume, overwrite=given.overwrite, only=only, first=first
                )
        from ..run.start import train_run

        limit = 0 if stop_after else recipe.run.restarts
        with restarting(folder, limit, resume is not None, given.settings):
            return train_run(
                recipe, resume=resume, overwrite=given.overwrite, stop_after=stop_after
            )
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"no space left on {error.filename or folder}: free some and `sixfold train --resume"
            f" {folder}`"
        ) from error


def _on_ray(
    settings: RunConfig,
    workers: int,
    placement: RayPlacement,
    given: Options,
    folder: Path,
    resume: Path | None,
    stop_after: str | None,
) -> int:
    """Start the ranks of a run as actors of a Ray cluster.

    Args:
        settings: the section [run].
        workers: processes of each rank that check answers.
        placement: where the ranks are.
        given: as for `start`.
        folder: folder of the run.
        resume: the same, or None for a new run.
        stop_after: as for `start`.
    """
    from ..run.ray_ranks import RankSettings, train_on_ray

    again = ["train", "--resume", str(folder.absolute())]
    flags = {"--only": given.only, "--from": given.from_}
    chosen = [word for flag, stage in flags.items() if stage for word in (flag, stage)]
    arguments = [
        *(again if resume else [stop_after or "train", given.recipe or ""]),
        *["--overwrite"] * given.overwrite,
        *chosen,
        *given.settings,
    ]
    threads = max(1, settings.threads)
    ranks = RankSettings(
        address=placement.address,
        ranks=placement.ranks,
        threads=threads,
        cpus=threads + placement.samplers * placement.threads + workers,
        device=settings.device,
        silence_s=settings.silence_s,
        restarts=0 if stop_after or chosen else settings.restarts,
    )
    again += given.settings if resume else ()
    return train_on_ray(ranks, arguments, folder, again)
