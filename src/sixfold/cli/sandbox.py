"""`sixfold sandbox selfcheck`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..environment.sandbox.isolation import detected
from .parsing import VerbParser


def parser() -> VerbParser:
    """Arguments of the verb."""
    arguments = VerbParser(
        "sandbox",
        "Try every layer of the sandbox on this machine and print what holds. The exit code is 1"
        " if the machine isolates programs less than the level 'namespaces'.",
    )
    arguments.add_argument(
        "action", metavar="ACTION", choices=["selfcheck"], help="selfcheck: the only action"
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """Check the machine and print a table."""
    parser().parse(argv)
    from ..environment.sandbox.selfcheck import selfcheck

    isolation = detected()
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
