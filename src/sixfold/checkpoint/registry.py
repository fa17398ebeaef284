"""Registry of the components of a run that a checkpoint stores: a plain dict, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..checkpointable import Checkpointable
from ..errors import UserError
from .checkpoint import Checkpoint

Registry = Mapping[str, Checkpointable]
"""Component by name. A name is the prefix of its tensors in a checkpoint."""

States = dict[str, dict[str, Any]]
"""JSON state of components, by name."""

DECIDES = {
    "algorithm": ("an algorithm of the user's own", "an algorithm of Sixfold"),
    "critic": ("an algorithm.name without a critic", "an algorithm.name with a critic"),
    "reference": ("algorithm.beta = 0", "algorithm.beta > 0"),
}
"""Component -> setting without it, setting with it. Every run has the others."""


def tensors_of(registry: Registry) -> dict[str, Tensor]:
    """Live tensors of all components, named COMPONENT/NAME."""
    return {
        f"{component}/{name}": tensor
        for component, registered in registry.items()
        for name, tensor in registered.tensors().items()
    }


def states_of(registry: Registry) -> States:
    return {name: component.state() for name, component in registry.items()}


def load_components(checkpoint: Checkpoint, registry: Registry) -> None:
    """Restore every component from a checkpoint.

    Args:
        checkpoint: checkpoint that has exactly these components.
        registry: components, restored in place.

    Raises:
        UserError: if a component is missing, unknown or does not fit.
    """
    saved = checkpoint.payload.components
    _check_components(checkpoint, registry, saved)
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in saved}
    for full_name, tensor in checkpoint.payload.tensors.items():
        owner, _, name = full_name.partition("/")
        if owner not in tensors:
            raise UserError(f"{checkpoint.path}: tensor '{full_name}' belongs to no component")
        tensors[owner][name] = tensor
    for name, component in registry.items():
        try:
            component.load(tensors[name], saved[name])
        except UserError as error:
            raise UserError(f"{checkpoint.path}: component '{name}': {error}") from error


def _check_components(
    checkpoint: Checkpoint, registered: Iterable[str], saved: Iterable[str]
) -> None:
    for name in sorted({*registered} ^ {*saved}):
        problem = (
            f"{checkpoint.path} has the component '{name}', which this run does not use"
            if name in saved
            else f"{checkpoint.path} lacks the component '{name}', which this run needs"
        )
        without, with_it = DECIDES.get(name, ("another release", "another release"))
        saved_with = with_it if name in saved else without
        raise UserError(
            f"{problem}: it was saved with {saved_with}. Use that again, or start a new run"
        )
