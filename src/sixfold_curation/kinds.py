"""The kinds of stages, by name."""

from __future__ import annotations

STAGES: dict[str, str] = {}
"""Name of a kind to "module:class". A module is imported when a recipe uses it."""
