"""The routers of a mixture of experts: record their choices of experts, or replay given choices.

transformers declares the routers of a model in `_can_record_outputs["router_logits"]`: their class,
and where their output holds the logits. `find_routers` reads that declaration and then runs the
model once, to see what the routers return.

In nearly all families a router returns (logits [N, E], weights [N, k], choices [N, k]), and chooses
by `torch.topk` over all E experts. A replay replaces the result of that call by the given experts.
So the router's own code computes their weights from the current logits, with its own normalisation,
and the gradient reaches the logits as before. Routers that limit a token to some groups of experts
(DeepSeek) choose the groups by an earlier `topk`. A replay replaces that result too, by the groups
of the given experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from .causal_lm import Segments, hidden_states

OWN = -1
"""In given choices: the router chooses for itself. A token has k such entries, or none."""

_TOPK = (torch.topk, Tensor.topk)
_SIGMOID = (torch.sigmoid, Tensor.sigmoid, torch.nn.functional.sigmoid)
_SOFTMAX = (torch.softmax, Tensor.softmax, torch.nn.functional.softmax)


@dataclass
class RoutingRecord:
    """Logits and choices of all routers in one forward pass, by index of the router.

    Attributes:
        logits: [N, E] for each router, with gradient.
        used: [N, k] for each router: experts that computed the token.
        own: [N, k] for each router: experts that the router itself chooses. Equal to `used` without
            a replay.
    """

    logits: dict[int, Tensor] = field(default_factory=dict)
    used: dict[int, Tensor] = field(default_factory=dict)
    own: dict[int, Tensor] = field(default_factory=dict)

    def choices(self) -> Tensor:
        """Experts that computed each token, [N, routers, k]."""
        return torch.stack([self.used[i] for i in sorted(self.used)], 1)

    def own_choices(self) -> Tensor:
        """Experts that the routers themselves choose, [N, routers, k]."""
        return torch.stack([self.own[i] for i in sorted(self.own)], 1)


@dataclass(frozen=True)
class Routers:
    """The routers of one model. They also serve its copies, which have the same module names.

    Attributes:
        names: names of the router modules, in the order in which they run.
        experts: experts per layer (E).
        top_k: experts per token and layer (k).
        sigmoid: True if experts are scored by a sigmoid, False if by a softmax.
        replays: True if choices can be replayed.
        grouped: True if a router first chooses groups of experts.
        logits_at: index of the logits in the output of a router.
        choices_at: index of the choices in the output of a router. None: they are not in it.
    """

    names: tuple[str, ...]
    experts: int
    top_k: int
    sigmoid: bool
    replays: bool
    grouped: bool
    logits_at: int
    choices_at: int | None

    @contextmanager
    def watch(self, module: nn.Module, given: Tensor | None = None) -> Iterator[RoutingRecord]:
        """Context for a forward pass of `module`, which records its routers.

        If activation checkpointing computes a layer again in the backward pass, the layer replays
        the same experts.

        Args:
            module: the model, or a copy of it.
            given: [N, routers, k] integers: experts to use, or OWN. None: every router chooses for
                itself.
        """
        given = None if given is None else given.long()
        record = RoutingRecord()
        token = _REPLAYED.set(None if given is None else (self, module, given))
        try:
            with _Patched(self, module, record, given):
                yield record
        finally:
            _REPLAYED.reset(token)

    def run(
        self,
        index: int,
        record: RoutingRecord,
        given: Tensor | None,
        forward: Callable[..., Any],
        *inputs: Any,
        **named: Any,
    ) -> Any:
        """Run one router.

        Args:
            record: receives logits and choices of the router.
            given: as in `watch`.
            inputs: arguments of the forward pass.
            named: named arguments of the forward pass.

        Returns:
            The output of the forward pass.
        """
        choice = _Choice(self.experts, self.top_k, None if given is None else given[:, index])
        with nullcontext() if given is None and self.choices_at is not None else choice:
            output = forward(*inputs, **named)
        used = choice.used if self.choices_at is None else output[self.choices_at]
        record.own[index] = used if given is None else choice.own
        if given is not None and self.grouped:  # given groups exclude experts of other groups
            with torch.no_grad(), _Choice(self.experts, self.top_k, None) as alone:
                forward(*inputs, **named)
            record.own[index] = alone.own
        record.logits[index], record.used[index] = output[self.logits_at], used
        return output


_REPLAYED: ContextVar[tuple[Routers, nn.Module, Tensor] | None] = ContextVar(
    "replayed", default=None
)
"""Routers, module and given experts of the running forward pass. None: nothing is replayed."""


@dataclass(frozen=True)
class _Patched:
    """Context in which every router of a module runs through `Routers.run`. Reusable."""

    routers: Routers
    module: nn.Module
    record: RoutingRecord
    given: Tensor | None

    def __enter__(self) -> None:
        # On the instance, not as a hook: hooks would change how the engine runs the module.
        for i, part in enumerate(self._parts()):
            run = partial(self.routers.run, i, self.record, self.given, part.forward)
            part.__dict__["forward"] = run

    def __exit__(self, *_: object) -> None:
        for part in self._parts():
            part.__dict__.pop("forward", None)

    def _parts(self) -> list[nn.Module]:
        return [self.module.get_submodule(name) for name in self.routers.names]


def recomputation() -> Callable[[], AbstractContextManager[object]] | None:
    """Return what activation checkpointing needs to replay expert choices in a recomputation.

    Call this in the forward pass of the layer.

    Returns:
        Function that makes the context of the recomputation. In it, the routers use the same
        experts as in the running forward pass. None if that pass replays nothing.
    """
    replayed = _REPLAYED.get()
    if replayed is None:
        return None
    routers, module, given = replayed
    return lambda: _Patched(routers, module, RoutingRecord(), given)


class _Choice(TorchFunctionMode):
    """Context that records the calls of `topk` in a router, and replaces their results.

    Args:
        experts: experts per layer (E).
        top_k: experts per token (k).
        given: [N, k] experts to use instead, or OWN. None: replace nothing.

    Attributes:
        own: [N, k] experts that the router itself chose.
        used: [N, k] experts that it got as the result.
    """

    def __init__(self, experts: int, top_k: int, given: Tensor | None) -> None:
        super().__init__()
        self._experts = experts
        self._top_k = top_k
        self._given = given
        self.own = self.used = torch.empty(0)

    def __enter__(self) -> _Choice:
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].dim() != 2:
            return out
        scores, (_, own) = args[0], out
        width = scores.shape[1]
        decides = width == self._experts and own.shape[1] == self._top_k
        if decides:
            self.own = self.used = own
        if self._given is None or self._experts % width:
            return out
        used = _replace_choices(
            own, self._given // (self._experts // width), self._given[:, :1] == OWN
        )
        if decides:
            self.used = used
        return torch.return_types.topk((scores.gather(1, used), used))


def _replace_choices(own: Tensor, given: Tensor, free: Tensor) -> Tensor:
    """Result of a `topk` call with the given choices in place of the router's own.

    The narrower table is widened by copies of its first column. This happens for groups only. A
    group may repeat, because groups only mark which experts are allowed.

    Args:
        own: [N, B] choices of the router.
        given: [N, A] choices to use instead.
        free: [N, 1] True for tokens whose router chooses for itself.

    Returns:
        [N, max(A, B)].
    """
    own, given = _widen(own, given.shape[1]), _widen(given, own.shape[1])
    return torch.where(free, own, given)


def _widen(x: Tensor, columns: int) -> Tensor:
    missing = columns - x.shape[1]
    return x if missing <= 0 else torch.cat([x, x[:, :1].expand(-1, missing)], 1)


def find_routers(model: PreTrainedModel) -> Routers | None:
    """The routers of a model. None for a model without experts, or if they cannot be read.

    Routers can be read if each returns one row of logits per token, and all have the same numbers
    of experts.
    """
    declared = [
        (name, recorder.index)
        for recorder in _declared_recorders(model)
        for name, part in model.named_modules()
        if isinstance(part, recorder.target_class)
    ]
    # JetMoE declares an attention layer beside the router inside it: keep the router.
    inner = [
        (name, at)
        for name, at in declared
        if not any(other.startswith(f"{name}.") for other, _ in declared)
    ]
    if not inner or len({at for _, at in inner}) > 1:
        return None
    return _probe(model, tuple(name for name, _ in inner), inner[0][1])


def _declared_recorders(model: PreTrainedModel) -> list[Any]:
    """Recorders of router logits that transformers declares for the model."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            found = (part._can_record_outputs or {}).get("router_logits")
            if found is not None:
                return [r for r in (found if isinstance(found, list) else [found]) if _plain(r)]
    return []


def _plain(recorder: Any) -> bool:
    """True for a recorder that names the class of the routers."""
    return not isinstance(recorder, str | type) and recorder.target_class is not None


_PROBE = 4
"""Number of tokens in the probe's forward pass."""


@torch.no_grad()
def _probe(model: PreTrainedModel, names: tuple[str, ...], at: int) -> Routers | None:
    """Run the model once, and describe its routers from what they return.

    Args:
        at: index of the logits in the output of a router.

    Returns:
        The routers. None if they cannot be read.
    """
    seen: list[tuple[Any, _Calls]] = []

    def look(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        with _Calls() as calls:
            output = forward(*inputs, **named)
        seen.append((output, calls))
        return output

    parts = [model.get_submodule(name) for name in names]
    for part in parts:
        part.__dict__["forward"] = partial(look, part.forward)
    try:
        _run(model)
    finally:
        for part in parts:
            part.__dict__.pop("forward", None)
    sizes = {_sizes(output, calls, at) for output, calls in seen}
    if len(seen) != len(names) or len(sizes) != 1 or None in sizes:
        return None
    ((experts, top_k, choices_at),) = sizes  # type: ignore[misc]
    sigmoid = all(calls.sigmoid and not calls.softmax for _, calls in seen)
    grouped = any(calls.grouped for _, calls in seen)
    found = Routers(names, experts, top_k, sigmoid, False, grouped, at, choices_at)
    return replace(found, replays=_replays(found, model))


def _run(model: PreTrainedModel) -> None:
    tokens = torch.arange(_PROBE, device=next(model.parameters()).device)
    vocabulary = model.config.get_text_config().vocab_size
    hidden_states(model, tokens % vocabulary, tokens, Segments(((0, _PROBE),)))


class _Calls(TorchFunctionMode):
    """Context that records how a router scores and chooses experts."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = self.softmax = self.grouped = False
        self.chosen: tuple[int, int] = (0, 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.sigmoid |= func in _SIGMOID
        self.softmax |= func in _SOFTMAX
        if func in _TOPK and args[0].dim() == 2:
            self.grouped |= self.chosen != (0, 0)
            self.chosen = (args[0].shape[1], out[1].shape[1])
        return out


def _sizes(output: Any, calls: _Calls, at: int) -> tuple[int, int, int | None] | None:
    """(E, k, index of the choices in the output) of a router, or None if it cannot be read."""
    if not isinstance(output, tuple) or not isinstance(output[at], Tensor):
        return None
    logits = output[at]
    if logits.dim() != 2 or logits.shape[0] != _PROBE:
        return None
    for i, part in enumerate(output):
        if isinstance(part, Tensor) and part.dtype == torch.int64 and part.dim() == 2:
            return logits.shape[1], part.shape[1], i
    experts, top_k = calls.chosen
    return (experts, top_k, None) if experts == logits.shape[1] else None


def _replays(routers: Routers, model: PreTrainedModel) -> bool:
    """True if every router uses the experts that it is given."""
    shape = (_PROBE, len(routers.names), routers.top_k)
    # The last k experts for the first token, and so on: no router chooses all of these by itself.
    first = routers.experts - 1 - torch.arange(_PROBE)[:, None, None] - torch.arange(shape[2])
    given = (first % routers.experts).expand(shape).to(next(model.parameters()).device)
    with routers.watch(model, given) as record:
        _run(model)
    used = [record.used[i] for i in range(len(routers.names))]
    return all(u.shape == given[:, 0].shape and torch.equal(u, given[:, 0]) for u in used)
