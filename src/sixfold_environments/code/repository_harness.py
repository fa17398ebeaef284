"""Program that runs the tests of a repository inside the sandbox.

It runs together with `wire` and imports only the standard library. It is not trusted: the patched
code runs in the same process. The repository is in the folder `repository`.

Its standard input is {"nonce": text, "tests": [name, ...]}. For each report it writes a line to
descriptor 3: the nonce, then [name of the test, id of the assert, JSON of `wire`]. The last report
of a test is [name, "end", "passed" or the error].
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import json
import os
import re
import sys
import types
import unittest
from typing import Any

from .wire import Encoder, NotPlain

RESULT = 3


class Reports:
    """Writes reports of the test that runs."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._process = os.getpid()
        self.test = ""

    def report(self, key: str, value: Any) -> None:
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


def _parameters(*marked: Any) -> list[dict[str, Any]]:
    """Arguments of each call of a test, from the marks of its class and of itself."""
    calls: list[dict[str, Any]] = [{}]
    lists = [getattr(one, "pytestmark", ()) for one in marked]
    for mark in (mark for marks in lists if isinstance(marks, list) for mark in marks):
        if mark.name == "skip" or (mark.name == "skipif" and mark.args[0]):
            raise unittest.SkipTest(f"the test is marked {mark.name}")
        if mark.name != "parametrize":
            continue
        names, values = mark.args[:2] if len(mark.args) > 1 else mark.kwargs.values()
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        sets = [_values(one, len(names)) for one in values]
        calls = [{**call, **dict(zip(names, one))} for call in calls for one in sets]  # noqa: B905
    return calls


def _values(given: Any, names: int) -> Any:
    """Values of one set of parameters. `pytest.param` has them in its attribute."""
    if type(given).__name__ in ("ParameterSet", "SimpleNamespace"):
        return given.values
    return (given,) if names == 1 else given


def _stand_in_for_pytest() -> None:
    """Provide `parametrize` and `raises` if pytest is not installed in the sandbox."""
    if importlib.util.find_spec("pytest"):
        return

    class Marks:
        def __getattr__(self, name: str) -> Any:
            def marked(*args: Any, **kwargs: Any) -> Any:
                mark = types.SimpleNamespace(name=name, args=args, kwargs=kwargs)

                def add(test: Any) -> Any:
                    test.pytestmark = [*vars(test).get("pytestmark", ()), mark]
                    return test

                return add

            return marked

    @contextlib.contextmanager
    def raises(kind: Any, match: str | None = None) -> Any:
        info = types.SimpleNamespace()
        try:
            yield info
        except kind as error:
            info.value, info.type = error, type(error)
            if match is not None and not re.search(match, str(error)):
                raise AssertionError(f"{match!r} does not match {error}") from error
        else:
            raise AssertionError(f"{kind} was not raised")

    module: Any = types.ModuleType("pytest")
    module.mark, module.raises = Marks(), raises
    module.param = lambda *values, **options: types.SimpleNamespace(values=values)
    sys.modules["pytest"] = module


def _run_test(name: str, loaded: dict[str, Any]) -> str:
    """Run one test. Returns "passed" or the error."""
    path, *inner = name.split("::")
    try:
        module = _module(path, loaded)
        kind = getattr(module, inner[0])
        if len(inner) == 1 or not issubclass(kind, unittest.TestCase):
            for values in _parameters(kind, *(getattr(kind, name) for name in inner[1:])):
                (kind if len(inner) == 1 else getattr(kind(), inner[1]))(**values)
            return "passed"
        result = unittest.TestResult()
        kind(inner[1]).run(result)
        problems = [*result.errors, *result.failures, *result.skipped]
        return problems[0][1].strip().splitlines()[-1] if problems else "passed"
    except BaseException as error:  # noqa: BLE001  the candidate may raise anything
        return f"{type(error).__name__}: {str(error)[:200]}"


def run_repository() -> None:
    os.unlink(__file__)  # the patched code finds only its own files
    request = json.loads(sys.stdin.buffer.read())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir("repository")
    sys.path[:0] = [path for path in (os.getcwd(), os.path.abspath("src")) if os.path.isdir(path)]
    _stand_in_for_pytest()
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
