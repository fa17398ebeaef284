"""Names of reward models among `environment.rewards`. No torch.

`reward_model:PATH` names a folder, a run, a checkpoint or a hub id, or the address of a server, and
`stage:NAME` the result of an earlier stage. Several, with commas between them, are an ensemble.
`prm:PATH` and `prm:stage:NAME` name a process reward model. `prm:POLICY,REFERENCE` names an
implicit one: two language models, or stages that have made them.
"""

from __future__ import annotations

from collections.abc import Callable

PREFIX = "reward_model:"
STAGE = "stage:"
PRM = "prm:"
VERIFIER = "verifier"
"""Name of the scorer of a search that is the recipe's own verifier, and no model."""


def reward_model_paths(name: str) -> list[str]:
    """Paths, or names of stages, of the reward models that a reward names. [] for other rewards."""
    if not name.startswith((PREFIX, STAGE, PRM)):
        return []
    return listed_models(name.removeprefix(PREFIX).removeprefix(PRM))


def listed_models(text: str) -> list[str]:
    """The paths, or names of stages, in a text that separates them by commas."""
    return [path.strip() for path in text.split(",")]


def is_address(path: str) -> bool:
    """True for the address of a server."""
    return path.lower().startswith(("http://", "https://"))


def with_paths(name: str, path: Callable[[str], str]) -> str:
    """The name of a reward with other paths of its reward models.

    Args:
        name: the name. That of another reward does not change.
        path: gives the new path of each.
    """
    paths = reward_model_paths(name)
    prefix = PRM if name.startswith(PRM) else PREFIX
    return prefix + ",".join(map(path, paths)) if paths else name


def reward_model_name(name: str) -> str:
    """The part of a reward's metrics for its reward models."""
    return "prm" if name.startswith(PRM) else "reward_model"


def is_implicit(name: str) -> bool:
    """True for the name of an implicit process reward model."""
    return name.startswith(PRM) and len(reward_model_paths(name)) == 2
