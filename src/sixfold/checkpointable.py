"""Contract of a component that a checkpoint stores, and the checks that every `load` makes first.

A run registers its components by name (`checkpoint/registry.py`). No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class Checkpointable(Protocol):
    """Component whose state does not follow from the recipe and the step."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name. They are the live ones, not copies."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything else as plain JSON: string keys, lists, no NaN."""
        ...

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `tensors` and `state` returned, bit for bit.

        Raises:
            UserError: if names, shapes or types differ from the component's own. Nothing has been
                changed then.
        """
        ...


class Values(Protocol):
    """Component whose state is JSON alone."""

    def state(self) -> dict[str, Any]:
        """The whole state as plain JSON."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        ...


@dataclass(frozen=True)
class WithoutTensors:
    """Checkpointable form of a component that has no tensors."""

    values: Values

    def tensors(self) -> dict[str, Tensor]:
        """Empty."""
        return {}

    def state(self) -> dict[str, Any]:
        """The component's state."""
        return self.values.state()

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore the component's state.

        Raises:
            UserError: if there are tensors, or if a key is missing or unknown.
        """
        check_names((), tensors, "tensor")
        check_names(self.state(), state, "value")
        self.values.load(dict(state))


def check_names(own: Iterable[str], given: Iterable[str], kind: str) -> None:
    """Check that a checkpoint has exactly the names that a component expects.

    Args:
        own: names of the component.
        given: names in the checkpoint.
        kind: kind of the named things, for the message.

    Raises:
        UserError: with the first name that only one of them has.
    """
    mine, theirs = set(own), set(given)
    for name in sorted(mine ^ theirs):
        where = "in the run but not in the checkpoint"
        if name in theirs:
            where = "in the checkpoint but not in the run"
        raise UserError(f"{kind} '{name}' is {where}")


def check_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Check that tensors of a checkpoint can be copied into a component's own.

    Args:
        own: tensors of the component, by name.
        given: tensors in the checkpoint, by name.

    Raises:
        UserError: if a name, a shape or a dtype differs.
    """
    check_names(own, given, "tensor")
    for name, tensor in own.items():
        other = given[name]
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            raise UserError(
                f"tensor '{name}' is {tensor_form(other)} in the checkpoint and"
                f" {tensor_form(tensor)} in the run"
            )


def tensor_form(tensor: Tensor) -> str:
    """Type and shape of a tensor, as in `float32 (2,3)`."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} ({','.join(map(str, tensor.shape))})"
