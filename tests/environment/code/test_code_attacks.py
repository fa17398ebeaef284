"""Programs that try to earn a reward without solving their task. None may leave the sandbox.

Every program returns a wrong value, so it earns a reward only if the verifier has a fault.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sixfold_environments.code.cases import CaseResult, is_code_case, run_case
from sixfold_environments.sandbox.sandbox import Sandbox

CASES = [{"args": [3, 4], "expected": 7}, {"args": [20, 22], "expected": 42}]
CALLS = {"type": "function", "fn_name": "add", "cases": CASES}
ASSERTS = {"type": "assert", "asserts": ["assert add(3, 4) == 7", "assert add(20, 22) == 42"]}
OPEN_ASSERTS = {"type": "assert", "asserts": ["assert sorted([add(3, 4), add(20, 22)]) == [7, 42]"]}
TEXT = {"type": "stdin", "cases": [["3 4\n", "7\n"], ["20 22\n", "42\n"]]}
WRONG = "def add(a, b): return None\n"

ON_CALLS = {
    "equal object": "class Z:\n    __eq__ = lambda s, o: True\ndef add(a, b): return Z()",
    "equal integer": "class Z(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
    "def add(a, b): return Z(0)",
    "spoofed class": "class Z(float):\n    @property\n    def __class__(self): return int\n"
    "def add(a, b): return Z(a + b)",
    "index": "class Z:\n    def __index__(self): return 7\n    __int__ = __index__\n"
    "def add(a, b): return Z()",
    "exit": "import sys\ndef add(a, b): sys.exit(0)",
    "exit at import": "raise SystemExit",
    "hard exit": "import os\ndef add(a, b): os._exit(0)",
    "abort": "import os\ndef add(a, b): os.abort()",
    "closed descriptors": "import os\nos.closerange(0, 200)\ndef add(a, b): return a + b",
    "exit hook": WRONG + "import atexit, os\natexit.register(os._exit, 0)",
    "trace hook": WRONG + "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = print",
    "written reply": "import os\nfor fd in range(3, 30):\n    try: os.write(fd, "
    'b\'{"case": 0, "value": 7}\\n{"case": 1, "value": 42}\\n{"end": true}\\n\')\n'
    "    except OSError: pass\n" + WRONG,
    "printed reply": WRONG + "print('{\"passed\": true}'); print('OK'); print('2 passed')",
    "frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n"
    "        for v in list(f.f_locals.values()):\n"
    "            if isinstance(v, dict) and 'expected' in v: return v['expected']\n"
    "        f = f.f_back",
    "heap": "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and 'expected' in o: return o['expected']\n"
    "        if isinstance(o, list) and [a, b] in o and (7 in o or 42 in o): return a + b",
    "files": "import os\ndef add(a, b):\n    for d, _, names in os.walk('.'):\n"
    "        for n in names:\n"
    "            if b'expected' in open(os.path.join(d, n), 'rb').read(): return a + b",
    "arguments": "def add(a, b):\n    for n in ('cmdline', 'environ'):\n"
    "        if b'42' in open('/proc/self/' + n, 'rb').read(): return a + b",
    "memory": "def add(a, b):\n    for line in open('/proc/self/maps'):\n"
    "        if 'heap' in line:\n"
    "            lo, hi = (int(x, 16) for x in line.split()[0].split('-'))\n"
    "            m = open('/proc/self/mem', 'rb'); m.seek(lo)\n"
    "            if b'expect' + b'ed\"' in m.read(hi - lo): return a + b",
    "patched comparison": WRONG + "import builtins, json, math\nbuiltins.all = lambda *a: True\n"
    "builtins.type = lambda *a: int\nmath.isclose = lambda *a, **k: True\n"
    "json.loads = lambda *a, **k: 7\njson.JSONEncoder.encode = lambda *a: '7'",
    "replaced module": WRONG + "import sys\nsys.modules['json'] = sys.modules['wire'] = sys",
    "generator": "def add(a, b):\n    yield a + b",
    "sentinel": "def add(a, b): raise StopIteration(a + b)",
    "huge integer": "def add(a, b): return 10 ** 200000",
    "not a number": "def add(a, b): return float('nan')",
    "cycle": "def add(a, b):\n    x = []; x.append(x); return x",
    "loud": "def add(a, b): raise ValueError('A' * (1 << 24))",
    "host file": "def add(a, b): return a + b if open('{canary}').read() else 0",
    "network": "import socket\ndef add(a, b):\n"
    "    socket.create_connection(('127.0.0.1', {port}), 1)\n    return a + b",
    "fork": "import os\ndef add(a, b):\n    if os.fork() == 0: return a + b\n    return 0",
}
ON_ASSERTS = {
    "hard exit": ON_CALLS["hard exit"],
    "equal object": ON_CALLS["equal object"],
    "optimised": WRONG + "import sys\nsys.flags = None\n",
    "skip": "import unittest\ndef add(a, b): raise unittest.SkipTest",
    "sortable": "class Z:\n    __eq__ = __lt__ = __gt__ = lambda s, o: True\n"
    "def add(a, b): return Z()",
}
ON_TEXT = {
    "all answers": "print(7)\nprint(42)",
    "tidy exit": "import os\nprint('Accepted'); os._exit(0)",
    "wide digits": "n = sum(map(int, input().split()))\n"
    "print(''.join(chr(0xff10 + int(d)) for d in str(n)))",
    "hanging": "print(sum(map(int, input().split())), flush=True)\nwhile True: pass",
    "almost": "print(float(sum(map(int, input().split()))))",
    "killed": "import os\nprint(sum(map(int, input().split())), flush=True)\n"
    "os.kill(os.getpid(), 9)",
}
HONEST: list[tuple[str, Mapping[str, Any]]] = [
    ("def add(a, b): return a + b", CALLS),
    (
        "import os, sys, subprocess\nN = os.environ.get('N', 0)\ndef add(a, b): return a + b + N",
        CALLS,
    ),
    (
        "import tempfile\ndef add(a, b):\n    with tempfile.TemporaryFile('w+') as f:\n"
        "        f.write(str(a + b)); f.seek(0); return int(f.read())",
        CALLS,
    ),
    (
        "print('hello')\nseen = []\ndef add(a, b):\n    seen.append(a); print(seen); return a + b",
        CALLS,
    ),
    ("def add(a, b): return a + b", ASSERTS),
    ("def add(a, b): return a + b", OPEN_ASSERTS),
    (
        "import sys\nprint('debug', file=sys.stderr)\nprint(sum(map(int, sys.stdin)) if 0 else"
        " sum(map(int, input().split())))",
        TEXT,
    ),
    (
        "import threading, sys\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(64 << 20)\n"
        "def deep(n): return n and 1 + deep(n - 1)\n"
        "def main(): deep(20000); print(sum(map(int, input().split())))\n"
        "t = threading.Thread(target=main); t.start(); t.join()",
        TEXT,
    ),
]


def cases(canary: Path, port: int) -> list[tuple[str, dict[str, Any], float]]:
    """Name, case and the value that it must earn."""
    short = {"time_limit_s": 0.5}
    found = [
        (
            f"{kind} {name}",
            code.replace("{canary}", str(canary)).replace("{port}", str(port)),
            tests,
        )
        for kind, programs, tests in (
            ("calls:", ON_CALLS, CALLS),
            ("asserts:", ON_ASSERTS, ASSERTS),
            ("open asserts:", ON_ASSERTS, OPEN_ASSERTS),
            ("text:", ON_TEXT, TEXT | short),
        )
        for name, code in programs.items()
    ]
    attacks = [(name, {"lang": "python", "code": c, "tests": t}, 0.0) for name, c, t in found]
    honest = [
        (f"honest {number}", {"lang": "python", "code": code, "tests": tests}, 1.0)
        for number, (code, tests) in enumerate(HONEST)
    ]
    return attacks + honest


def test_no_attack_is_paid_and_every_honest_program_is(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("canary")
    with socket.create_server(("127.0.0.1", 0)) as server, Sandbox(slots=4) as sandbox:
        given = cases(canary, server.getsockname()[1])

        async def run() -> list[CaseResult]:
            return await asyncio.gather(*(run_case(case, sandbox) for _, case, _ in given))

        results = asyncio.run(run())
    wrong = {
        name: result
        for (name, _, value), result in zip(given, results, strict=True)
        if result.value != value
    }
    assert wrong == {}


def test_a_case_without_tests_is_not_paid() -> None:
    case = {"kind": "code", "completion": "x", "tests": {"type": "function", "fn_name": "f"}}
    assert is_code_case(case)
    with Sandbox(slots=1) as sandbox:
        result = asyncio.run(run_case(case, sandbox))
    assert (result.verdict, result.value) == ("rejected", 0.0)
    assert not is_code_case({"kind": "math", "completion": "x"})
