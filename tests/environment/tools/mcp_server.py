"""MCP server for tests. The first argument sets its behaviour.

- good: a working server over standard input and output.
- hangs: never answers.
- junk: writes text that is not JSON.
- chatty: writes text that is not JSON first, and then works.
- ends: exits immediately.
- starts: starts a program in a session of its own and writes its pid to the file of the second
  argument. Then it works.
- http: a working server on the port of the second argument.
- wrong_type, missing_reference, wrong_pattern: the tool `add` has an invalid schema.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

HOW = sys.argv[1]
if HOW == "ends":
    print("no licence found", file=sys.stderr)
    sys.exit(3)
if HOW == "hangs":
    time.sleep(60)
if HOW in ("junk", "chatty"):
    for _ in range(30):
        print("hello, I am no server", flush=True)
if HOW == "junk":
    time.sleep(60)

if HOW == "starts":
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(sys.argv[2], "w") as noted:
        noted.write(str(program.pid))

from mcp.server.mcpserver import MCPServer  # noqa: E402

server = MCPServer("numbers", version="7")
counted = []


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def count(name: str) -> str:
    """Count the calls."""
    counted.append(name)
    return f"{name} {len(counted)}"


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("out of order")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def stop() -> str:
    """The process stops and answers no more."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return ""


@server.tool()
def wait() -> str:
    """Takes long."""
    time.sleep(60)
    return ""


SCHEMAS = {
    "wrong_type": {"type": "object", "properties": {"a": {"type": "integr"}}},
    "missing_reference": {"type": "object", "properties": {"a": {"$ref": "#/$defs/Number"}}},
    "wrong_pattern": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
}
if HOW in SCHEMAS:
    (changed,) = (one for one in server._tool_manager.list_tools() if one.name == "add")
    changed.parameters = SCHEMAS[HOW]

if HOW == "http":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
else:
    server.run("stdio")
