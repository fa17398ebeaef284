"""The program of the process that calls an agent's function (`processes/program.py`).

The first request is JSON: {"function": name}. Its answer is {}, or {"fatal": message} if the
function cannot be used. Every later request is pickled, either ("run", ticket, task, address) or
("cancel", ticket). A run is answered when the call has ended: {"run": ticket, "value": returned
value} or {"run": ticket, "error": message}. A cancellation has no answer of its own.

Calls run concurrently, so answers come in any order. They are JSON and not pickles, so the parent
never executes what an agent writes. Standard output belongs to the function.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import threading

from sixfold.environment.grade import checked_value
from sixfold.errors import UserError, one_line
from sixfold.processes.program import Requests
from sixfold.rollout.environment_fault import EnvironmentFault
from sixfold.types import Task

from .function import AGENTS, FunctionCalls


def serve(requests: Requests) -> None:
    """Call the function until the parent closes its end of the pipe."""
    name = json.loads(next(requests))["function"]
    try:
        calls = FunctionCalls(AGENTS.load(name), name)
    except UserError as error:
        requests.answer(json.dumps({"fatal": str(error)}).encode())
        return
    requests.answer(b"{}")
    loop = asyncio.new_event_loop()
    running: dict[int, asyncio.Task[None]] = {}

    async def play(ticket: int, task: Task, address: str) -> None:
        answer = await _ended(calls, task, address)
        del running[ticket]
        requests.answer(json.dumps({"run": ticket, **answer}).encode())

    def begin(ticket: int, task: Task, address: str) -> None:
        running[ticket] = loop.create_task(play(ticket, task, address))

    def cancel(ticket: int) -> None:
        if ticket in running:
            running[ticket].cancel()

    # The event loop alone gives answers: two threads at once would mix them.
    threading.Thread(target=loop.run_forever, name="calls", daemon=True).start()
    for body in requests:
        kind, *given = pickle.loads(body)
        loop.call_soon_threadsafe(begin if kind == "run" else cancel, *given)


async def _ended(calls: FunctionCalls, task: Task, address: str) -> dict[str, object]:
    """Run the function for one episode. Returns its value or its error, for JSON."""
    try:
        value = await calls.run(task, address)
        return {"value": value if value is None or isinstance(value, str) else checked_value(value)}
    except asyncio.CancelledError:  # the parent does not wait for this answer
        return {"error": "cancelled"}
    except EnvironmentFault as fault:
        return {"error": str(fault)}
    except (TypeError, ValueError, OverflowError) as error:
        return {"error": one_line(error)}
