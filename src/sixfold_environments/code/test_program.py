"""Program that runs assert tests inside a sandbox, without the candidate.

It runs together with `wire` and imports only the standard library. The functions of the candidate
are stand-ins: their calls are recorded, and answered from a table. The candidate fills the table in
its own sandbox, from the calls alone. So the tests, with their expected values, and the candidate
never share a process, and only plain data reaches the tests.

Its standard input is {"nonce": text, "setup": source, "units": [source, ...], "names": [...],
"table": [[call, answer], ...]}. A call is [name, args, kwargs]. An answer is {"value": JSON of
`wire`} or {"error": name of an exception, "detail": text}.

Its reply is one line on descriptor 3, the nonce and a JSON object:

- {"missing": [call, ...]} with all calls, if the table lacks some. Calls that are not in the table
  return a placeholder, so that one run finds many of them.
- {"units": [[verdict, detail], ...], "calls": their number} otherwise.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import random
import sys
from typing import Any

from .wire import Encoder, NotPlain, decode


class Kept:
    """Stands for an object of the candidate that is not plain data. Tests can only pass it on."""

    def __init__(self, number: int) -> None:
        self.number = number


class CandidateError(Exception):
    """The candidate raised an exception of a class that is not built in."""


class Placeholder:
    """Unknown result of a call. It accepts every operation."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(())

    def __hash__(self) -> int:
        return 0


def _same(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


_OPERATIONS = (
    "call add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs"
    " getitem round and or xor lt le gt ge eq ne"
)
for _name in _OPERATIONS.split():
    setattr(Placeholder, f"__{_name}__", _same)
for _name, _value in (("float", 0.0), ("int", 0), ("index", 0), ("len", 0), ("contains", True)):
    setattr(Placeholder, f"__{_name}__", lambda self, *args, _value=_value: _value)


class Stand:
    """Stand-in for the candidate's functions.

    Args:
        table: known calls with their answers, in the order in which the candidate got them.
    """

    def __init__(self, table: list[Any]) -> None:
        self._known: dict[str, list[Any]] = {}
        for index, (call, answer) in enumerate(table):
            self._known.setdefault(json.dumps(call), []).append((index, answer))
        self._last = -1
        self.calls: list[Any] = []
        self.unknown = 0

    def function(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # A call with a placeholder depends on answers that are not known yet.
            if any(isinstance(value, Placeholder) for value in (*args, *kwargs.values())):
                self.unknown += 1
                return Placeholder()
            encoder = Encoder(_number)
            made = [name, encoder.encode(list(args)), encoder.encode(kwargs)]
            self.calls.append(made)
            known = self._known.get(json.dumps(made))
            if not known:
                self.unknown += 1
                return Placeholder()
            index, answer = known.pop(0)
            # The candidate may have a state: it must get the calls in the order of the tests.
            self.unknown += index < self._last
            self._last = index
            return _answer(answer)

        call.__name__ = name
        return call


class Owner:
    """Stands for a class of the candidate whose methods the tests call on a new object.

    Args:
        methods: stand-ins by name.
    """

    def __init__(self, methods: dict[str, Any]) -> None:
        vars(self).update(methods)

    def __call__(self) -> Owner:
        return self


def _stands(stand: Stand, names: list[str]) -> dict[str, Any]:
    """Stand-ins by name. `Class.method` is a method of the stand-in for the class."""
    methods: dict[str, dict[str, Any]] = {}
    for name in names:
        owner, _, method = name.rpartition(".")
        methods.setdefault(owner, {})[method] = stand.function(name)
    return {**methods.pop("", {}), **{owner: Owner(of) for owner, of in methods.items()}}


def _number(value: Any) -> int:
    if isinstance(value, Kept):
        return value.number
    raise NotPlain("an argument of type " + type(value).__name__)


def _answer(answer: Any) -> Any:
    if "error" in answer:
        kind = getattr(builtins, answer["error"], None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is AssertionError:
            kind = CandidateError
        raise kind(answer["detail"])
    return decode(answer["value"], Kept)


class _Lenient(ast.NodeTransformer):
    """Evaluates asserts without failing, to find the calls behind them."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
        kept = ast.Try([ast.Expr(node.test)], [handler], [], [])
        return ast.fix_missing_locations(ast.copy_location(kept, node))


def _run(request: dict[str, Any], lenient: bool) -> tuple[Stand, list[Any]]:
    """Run all units once. Returns the calls and a result per unit."""
    random.seed(0)
    stand = Stand(request["table"])
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(request["setup"], "setup.py", "exec"), names)
    names.update(_stands(stand, request["names"]))
    results = []
    for source in request["units"]:
        tree = ast.parse(source)
        try:
            exec(compile(_Lenient().visit(tree) if lenient else tree, "test.py", "exec"), names)
            results.append(["passed", ""])
        except AssertionError as error:
            results.append(["wrong_answer", f"an assertion failed {error}".strip()[:200]])
        except MemoryError:
            results.append(["out_of_memory", "in the test"])
        except CandidateError as error:
            results.append(["runtime_error", str(error)[:200]])
        except BaseException as error:  # noqa: BLE001  the candidate may raise anything
            results.append(["wrong_answer", f"{type(error).__name__}: {error}"[:200]])
    return stand, results


def run_tests() -> None:
    request = json.loads(sys.stdin.buffer.read())
    stand, results = _run(request, lenient=False)
    answer: dict[str, Any] = {"units": results, "calls": len(stand.calls)}
    if stand.unknown:
        stand, _ = _run(request, lenient=True)
        answer = {"missing": stand.calls}
    with os.fdopen(3, "wb") as pipe:
        pipe.write(request["nonce"].encode() + json.dumps(answer).encode() + b"\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run_tests()
