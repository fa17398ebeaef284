"""`sixfold sandbox selfcheck`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sixfold.cli.parsing import VerbParser, argument

from .isolation import detect_isolation

PURPOSE = "test how well this machine isolates programs that a model has written"


@dataclass(frozen=True, kw_only=True)
class Options:
    action: Literal["selfcheck"] = argument("selfcheck: the only action")


PARSER = VerbParser(
    "sandbox",
    "Try every layer of the sandbox on this machine and print what holds. The exit code is 1"
    " if the machine isolates programs less than the level 'namespaces'.",
    Options,
)


def run(arguments: Sequence[str]) -> int:
    """Check the machine and print a table."""
    PARSER.parse(arguments)
    from .selfcheck import selfcheck

    isolation = detect_isolation()
    print(isolation.banner)
    for missing in isolation.missing:
        print(f"missing: {missing.feature}. Remedy: {missing.remedy}")
        if missing.detail:
            print(f"         bubblewrap: {missing.detail}")
    print()
    held = True
    for finding in asyncio.run(selfcheck()):
        held = held and finding.holds
        print(f"{'ok  ' if finding.holds else 'FAIL'}  {finding.layer:<14}{finding.text}")
    return 0 if held and isolation.level == "namespaces" else 1
