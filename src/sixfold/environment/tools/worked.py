"""Worked solutions of episodes with tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def worked_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Text of a reply that calls a tool, in the format of Hermes and of models made from scratch.

    Args:
        arguments: the arguments. They must have a JSON form.
    """
    call = {"name": name, "arguments": dict(arguments)}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"
