"""Program that runs the tests of a repository inside the sandbox.

It runs together with `wire` and imports only the standard library. It is not trusted: the patched
code runs in the same process. The repository is in the folder `repository`.

Its standard input is {"nonce": text, "tests": [name, ...]}. For each report it writes a line to
descriptor 3: the nonce, then [name of the test, id of the assert, JSON of `wire`]. The last report
of a test is [name, "end", "passed" or the error].
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import sys
import unittest
from typing import Any

from .wire import Encoder, NotPlain

RESULT = 3


class Reports:
    """Writes reports of the test that runs.

    Attributes:
        test: name of that test.
    """

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._process = os.getpid()
        self.test = ""

    def report(self, key: str, value: Any) -> None:
        """Report the value of an assert."""
        if os.getpid() != self._process:
            return
        try:
            encoded = Encoder().encode(value)
        except NotPlain as error:
            encoded = {"x": str(error)[:200]}
        line = self._nonce + json.dumps([self.test, key, encoded]) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(RESULT, data) :]


def _module(path: str, loaded: dict[str, Any]) -> Any:
    if path not in loaded:
        name = path.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        spec.loader.exec_module(module)
        loaded[path] = module
    return loaded[path]


def _run_test(name: str, loaded: dict[str, Any]) -> str:
    """Run one test. Returns "passed" or the error."""
    path, *inner = name.split("::")
    try:
        module = _module(path, loaded)
        if len(inner) == 1:
            getattr(module, inner[0])()
            return "passed"
        kind = getattr(module, inner[0])
        if not issubclass(kind, unittest.TestCase):
            getattr(kind(), inner[1])()
            return "passed"
        result = unittest.TestResult()
        kind(inner[1]).run(result)
        problems = [*result.errors, *result.failures, *result.skipped]
        return problems[0][1].strip().splitlines()[-1] if problems else "passed"
    except BaseException as error:  # noqa: BLE001  the candidate may raise anything
        return f"{type(error).__name__}: {str(error)[:200]}"


def run_repository() -> None:
    """Read the request and run the tests."""
    os.unlink(__file__)  # the patched code finds only its own files
    request = json.loads(sys.stdin.buffer.read())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir("repository")
    sys.path[:0] = [path for path in (os.getcwd(), os.path.abspath("src")) if os.path.isdir(path)]
    reports = Reports(request["nonce"])
    vars(builtins)["__sixfold_report__"] = reports.report
    loaded: dict[str, Any] = {}
    for name in request["tests"]:
        reports.test = name
        reports.report("end", _run_test(name, loaded))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run_repository()
