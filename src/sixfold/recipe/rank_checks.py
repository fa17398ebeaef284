"""Settings that a number of ranks does not support. No torch."""

from __future__ import annotations

from ..algorithm.method import Method
from ..errors import UserError
from .schema import RayPlacement, Recipe


def check_ranks(recipe: Recipe, method: Method, ranks: int) -> None:
    """Check that the ranks support a recipe.

    Args:
        ranks: processes that torchrun or Ray starts.

    Raises:
        UserError: if they do not.
    """
    placement = recipe.placement
    if isinstance(placement, RayPlacement) and (asked := placement.ranks) != ranks:
        start = f"Set placement.ranks = {ranks}" if asked == 1 else "Use the command sixfold train"
        raise UserError(
            f"placement.ranks = {asked}, but {ranks} rank{'s train' if ranks > 1 else ' trains'}."
            f" {start}: with placement.kind = 'ray', Ray starts the ranks, neither torchrun nor"
            " Python"
        )
    for setting in ("replicas", "tensor", "experts", "context"):
        if ranks == 1 and (value := getattr(recipe.parallel, setting)) > 1:
            raise UserError(
                f"parallel.{setting} = {value}, but the run has one process. Start it by torchrun"
                f" with at least {value} processes, or set parallel.{setting} = 1"
            )
    if ranks == 1:
        return
    for setting, (wrong, remedy, why) in _refused(recipe, method).items():
        if wrong:
            shown = repr(remedy) if isinstance(remedy, str) else str(remedy).lower()
            raise UserError(
                f"{setting} must be {shown} with several ranks ({ranks} were started): {why}."
                " Set it, or train in one process without torchrun"
            )
    for name, refused in _refused_by_groups(recipe).items():
        value = getattr(recipe.parallel, name)
        for setting, wrong in refused.items():
            if value > 1 and wrong:
                raise UserError(
                    f"parallel.{name} = {value} does not support {setting}. Set parallel.{name} ="
                    " 1, or change the other setting"
                )


def _refused_by_groups(recipe: Recipe) -> dict[str, dict[str, bool]]:
    """Settings that groups of ranks do not support, and whether this recipe has them.

    Returns:
        One table for each setting of `parallel` that makes groups.
    """
    always = {
        f"model.lora.rank = {recipe.model.lora.rank}": recipe.model.lora.rank > 0,
        "trainer.optimizer = 'adamw8bit'": recipe.trainer.optimizer == "adamw8bit",
    }
    tensor = {
        "reference.precision = 'bfloat16'": recipe.reference.precision == "bfloat16",
    }
    both = f"parallel.tensor = {recipe.parallel.tensor}"
    return {"tensor": always | tensor, "experts": always | {both: recipe.parallel.tensor > 1}}


def _refused(recipe: Recipe, method: Method) -> dict[str, tuple[bool, str | float, str]]:
    """Settings that several ranks do not support: (wrong in this recipe, remedy, reason)."""
    trainer, reference = recipe.trainer, recipe.reference
    beside = "each rank samples with an engine of its own, beside its part of the weights"
    on_host = "state in host memory cannot be gathered for a checkpoint"
    rollout = recipe.rollout
    replaces = bool(method.dynamic_sampling or rollout.max_failures)
    return {
        "rollout.staleness": (
            rollout.staleness > 0 and replaces and recipe.data.curriculum.every > 0,
            0,
            "with data.curriculum, a rank that replaces groups (algorithm.dynamic_sampling,"
            " rollout.max_failures) would draw tasks of a step before the others know its rewards",
        ),
        "model.lora.dora": (
            recipe.model.lora.dora,
            False,
            "engines then share the adapter's base, and DoRA needs merged weights",
        ),
        "rollout.backend.kind": (
            rollout.backend.kind in ("sglang", "sixfold"),
            "engine",
            f"{beside}, or they share vLLM processes on their machine",
        ),
        "rollout.backend.sleep": (
            rollout.backend.kind == "vllm" and rollout.backend.sleep,
            False,
            "other ranks may still sample",
        ),
        "sync.kind": (recipe.sync.kind != "shared", "shared", beside),
        "replay.share": (
            recipe.replay.share > 0,
            0,
            "no rank has all groups of a step",
        ),
        "reference.placement": (
            reference.placement == "worker",
            "inline",
            "the reference is sharded too",
        ),
        "trainer.weights": (
            trainer.weights != "float32",
            "float32",
            "FSDP2 cannot shard layers whose matrices and vectors differ in precision",
        ),
        "sft.neftune_alpha": (
            recipe.sft.neftune_alpha > 0,
            0,
            "the noise is drawn for whole rows in one process",
        ),
        "trainer.offload": (trainer.offload != "none", "none", on_host),
        "reference.offload": (reference.offload, False, "each rank holds only its part of it"),
    }
