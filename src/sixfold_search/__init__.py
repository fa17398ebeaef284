"""Test-time search: many completions of a prompt, and a choice among them or their steps.

`search` searches for one task; `sixfold search` compares methods on the tasks of a recipe, at equal
budgets of model tokens (`verb`). A method is one function on a tree of chains (`tree`, `methods`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .settings import Settings
    from .steps import Stepping
    from .task_search import search

__all__ = ["Settings", "Stepping", "search"]


def __getattr__(name: str) -> Any:
    # On first use: the command line reads the purpose of the verb, which must not load torch.
    if name not in __all__:
        raise AttributeError(f"module 'sixfold_search' has no attribute {name!r}")
    from .task_search import Settings, Stepping, search

    return {"search": search, "Settings": Settings, "Stepping": Stepping}[name]
