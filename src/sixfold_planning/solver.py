"""Search the recipe lines with which a run fits on given devices and is fastest.

Memory is that of `sixfold.sizing`, times are those of `planner`. Every topology, split, group of
ranks, checkpointing and micro-batch is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, product

from sixfold.backends.vllm_memory import CONTEXT
from sixfold.errors import UserError
from sixfold.recipe.dump import flat
from sixfold.recipe.knobs import knobs
from sixfold.recipe.memory import memory_of
from sixfold.recipe.plan import make_plan
from sixfold.recipe.rank_checks import check_ranks
from sixfold.recipe.schema import Recipe
from sixfold.sizing.held import LOWERED, WEIGHTS, Part, held_parts, holdings
from sixfold.sizing.kv_cache import HEADROOM
from sixfold.sizing.memory import CACHE, MemoryPlan

from .constants import CONSTANTS
from .decode_time import Sampler
from .hardware import Cluster
from .planned_work import Inputs
from .planner import colocated_sync, learning_seconds, weight_sync
from .samplers import sampling_seconds
from .step_time import PhaseSeconds, StepTime, step_time
from .topologies import OWN, PROCESS, TOPOLOGIES, VLLM, Settings, Split, Topology
from .train_time import Layout

ALONE: Settings = {
    "placement.kind": "local",
    "rollout.backend.kind": "engine",
    "rollout.staleness": 0,
}
"""Trainer and engine share a process."""
OF_ENGINE = ("weights", "engine's weights", "draft model", "sampler's logits")
"""Parts of a run of one process that a process with an engine alone has too."""
BLOCK = 128
"""Tokens by which the search sizes a KV cache: the largest block of vLLM's."""
GROUPS = (1, 2, 4, 8)
"""Sizes of tensor, context and expert groups that are tried."""
TOKENS = (0.25, 0.5, 1, 2, 4)
"""Sizes of a micro-batch that are tried, divided by the recipe's."""
SIZES = ("engine.kv_tokens", "trainer.max_tokens_per_microbatch")
"""Settings on whose value no check depends, as long as a sequence fits."""
DIVIDED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Matrices of a layer that a tensor group can divide."""
LAST_RESORTS: tuple[Settings, ...] = (
    {"trainer.activation_offload": True},
    {"trainer.offload": "optimizer"},
    {"trainer.optimizer": "adamw8bit"},
    {"trainer.weights": "bfloat16"},
)
"""Lines that are tried only if nothing fits without them. They move data to the host, which times
leave out, or change numbers.
"""
OF_ADAPTERS: tuple[Settings, ...] = (
    {"trainer.activation_offload": True},
    {"model.lora.base": "bfloat16"},
    {"model.lora.base": "nf4"},
)
"""The same for LoRA."""


@dataclass(frozen=True)
class Need:
    """Memory of one device.

    Attributes:
        size: bytes at the peak.
        tokens: of the KV cache. 0: there is none.
        running: sequences that fit in it.
    """

    size: int
    parts: tuple[Part, ...]
    tokens: int = 0
    running: int = 0


@dataclass(frozen=True)
class Candidate:
    """Settings with which a run may fit.

    Attributes:
        split: who trains and who samples.
        settings: recipe lines that differ from the recipe.
        trainer: memory of a device that trains.
        sampler: memory of a device that samples. Colocated: the same.
        ahead: a step is sampled while the one before it is trained.
        excess: bytes that a device lacks. 0 or less: it fits.
        resorts: number of last resorts among the lines.
        refused: why Sixfold does not run it. Empty: it does, or it was not asked.
    """

    topology: Topology
    split: Split
    settings: Settings
    trainer: Need
    sampler: Need
    phases: PhaseSeconds
    step: StepTime
    ahead: bool
    excess: int
    resorts: int = 0
    refused: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[float, ...]:
        """The best is the least. Times with three equal digits are a tie: fewer lines win."""
        seconds = self.step.seconds
        return self.resorts, float(f"{seconds:.3g}"), len(self.settings), seconds

    @property
    def runs(self) -> bool:
        return self.excess <= 0 and not self.refused

    @property
    def preference(self) -> tuple[float, ...]:
        """As `order`, but what fits, and what is refused for least, comes first."""
        unfit = self.excess > 0
        return (unfit, len(self.refused), *((self.excess,) if unfit else self.order))

    @property
    def bound(self) -> str:
        """What takes longest."""
        learning = self.phases.reference + self.phases.trainer
        parts = {"sampling": self.phases.rollout, "training": learning, "sync": self.phases.sync}
        return max(parts, key=lambda name: parts[name])


class Search:
    """Candidates for a recipe on given devices.

    Raises:
        UserError: for TPUs, prompts without a bound, or models of unknown size.
    """

    def __init__(self, inputs: Inputs, cluster: Cluster) -> None:
        plan, device = inputs.plan, cluster.device
        if device.name.startswith("TPU"):
            raise UserError("--solve: Sixfold does not run on TPUs")
        if plan.longest_tokens is None:
            raise UserError("--solve sizes KV caches: set data.max_prompt_tokens")
        if plan.model.size is None or memory_of(plan, cluster.count) is None:
            raise UserError("--solve: sizes of the model or its reference are missing")
        self._inputs, self._size = inputs, plan.model.size
        self._heads = self._size.heads, self._size.keys * self._size.heads // self._size.queries
        self._device, self._values = device, flat(plan.recipe)
        node = max(n for n in range(1, device.devices_per_node + 1) if cluster.count % n == 0)
        self._machines = cluster.count // node, node
        self._total = round(device.memory_gb * 1e9)
        self.room = self._total - int(HEADROOM * self._total)
        self._plans: dict[object, MemoryPlan | None] = {}
        self._refusals: dict[object, str] = {}
        self._held = cache(self._held_bytes)

    @cached_property
    def found(self) -> list[Candidate]:
        """The best of each topology with each staleness: what runs, and what Sixfold lacks."""
        best: dict[tuple[str, bool, bool], Candidate] = {}
        for resorts in self._resorts():
            ready = [one.resorts for one in best.values() if one.runs]
            if ready and min(ready) < len(resorts):
                break
            for topology in TOPOLOGIES:
                for ahead in (False, True)[: 1 + topology.ahead]:
                    for one in self._best(topology, ahead, resorts):
                        key = topology.name, ahead, bool(one.refused)
                        best[key] = min(best.get(key, one), one, key=lambda c: c.preference)
        return sorted(best.values(), key=lambda one: one.preference)

    def _resorts(self) -> Iterator[tuple[Settings, ...]]:
        """Sets of last resorts, the smallest first, each with one value of a setting."""
        adapters = self._inputs.plan.recipe.model.lora.rank > 0
        rows = [one for one in (OF_ADAPTERS if adapters else LAST_RESORTS) if self.lines(one)]
        for count in range(len(rows) + 1):
            for chosen in combinations(rows, count):
                if len({key for one in chosen for key in one}) == count:
                    yield chosen

    def _best(
        self, topology: Topology, ahead: bool, resorts: tuple[Settings, ...]
    ) -> Iterator[Candidate]:
        """The best candidate that Sixfold runs, and a better one that it refuses for least."""
        lacks = None
        for one in sorted(self.candidates(topology, ahead, resorts), key=lambda c: c.preference):
            one = replace(one, refused=self._refused(one))
            if not one.refused:
                yield one
                break
            if lacks is None or one.preference < lacks.preference:
                lacks = one
        if lacks:
            yield lacks

    def _refused(self, one: Candidate) -> tuple[str, ...]:
        """Why Sixfold does not run a candidate: its topology, and its other lines."""
        own = {*ALONE, *one.topology.settings(one.split)}
        others = {key: value for key, value in one.settings.items() if key not in own}
        ranks = one.split.training
        other = self.refusal(others | self.lines(ALONE), ranks)
        topology = self.refusal(one.settings, ranks)
        return tuple(dict.fromkeys(reason for reason in (topology, other) if reason))

    def refusal(self, lines: Settings, ranks: int) -> str:
        """Why a run of several ranks with these lines would not start. "": it would."""
        checked = {key: value for key, value in lines.items() if key not in SIZES}
        case = ranks, frozenset(checked.items())
        if case not in self._refusals:
            try:
                changed = self._inputs.plan.recipe.with_settings(lines)
                plan = make_plan(Recipe.model_validate(changed.model_dump()))
                check_ranks(plan.recipe, plan.algorithm, ranks)
                self._refusals[case] = ""
            except (UserError, ValueError) as error:  # a ValidationError is a ValueError
                self._refusals[case] = str(error)
        return self._refusals[case]

    def lines(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Settings that differ from the recipe."""
        return {
            key: value
            for key, value in settings.items()
            if self._values.get(key, knobs()[key].default) != value
        }

    def candidates(
        self, topology: Topology, ahead: bool, resorts: tuple[Settings, ...] = ()
    ) -> Iterator[Candidate]:
        """All candidates of a topology, without the checks of recipes.

        Of a split that cannot fit, there is only the one that takes least memory.

        Args:
            ahead: sample a step ahead.
            resorts: last resorts that all of them have.
        """
        more = {key: value for one in resorts for key, value in one.items()}
        stale = max(1, self._inputs.plan.recipe.rollout.staleness) if ahead else 0
        own = topology.engine == OWN
        for split in topology.splits(*self._machines, self._size.heads):
            base = {**ALONE, "rollout.staleness": stale, **topology.settings(split), **more}
            sampler = None if own else self._sampler(topology.engine, split, more)
            if sampler is not None:
                base |= {"engine.release_kv": False, "engine.kv_tokens": sampler.tokens}
            for grid in self._grid(split, own):
                trainer = self._trainer(split, {**more, **grid}, own)
                one = self._candidate(topology, split, {**base, **grid}, trainer, sampler)
                yield replace(one, resorts=len(resorts))
                if self._held(split.training, tuple(more.items()), own) > self.room:
                    break
                if sampler is not None and sampler.size > self.room:
                    break

    def _grid(self, split: Split, own: bool) -> Iterator[dict[str, object]]:
        """Settings of the trainer, that with least memory first.

        Args:
            own: the ranks sample, so the memory of their engines is a choice too.
        """
        recipe, experts = self._inputs.plan.recipe, self._size.experts
        matrices = {module.name for module in self._size.linears or ()}
        replicas, listed = recipe.parallel.replicas, self._inputs.sizes_from.startswith("the table")
        budget, kv = recipe.trainer.max_tokens_per_microbatch, recipe.engine.kv_tokens
        choices = product(
            [n for n in reversed(GROUPS) if not any(size % n for size in self._heads)],
            reversed(GROUPS),
            [n for n in reversed(GROUPS) if experts and experts.count % n == 0] or [1],
            ("full", "selective", "none"),
            sorted({max(16, round(share * budget)) for share in TOKENS}),
            (True, False) if own else (False,),
            sorted({0, kv}) if own else (kv,),
        )
        for tensor, context, expert, mode, tokens, release, cache_tokens in choices:
            if split.ranks % (tensor * context * expert) or split.training % (
                replicas * tensor * context * expert
            ):
                continue
            # Widths in the table of public models are rounded.
            odd = not listed and self._size.intermediate % tensor
            if tensor > 1 and (experts or odd or DIVIDED - matrices):
                continue
            yield {
                "parallel.tensor": tensor,
                "parallel.context": context,
                "parallel.experts": expert,
                "trainer.activation_checkpointing": mode,
                "trainer.max_tokens_per_microbatch": tokens,
                **({"engine.release_kv": release, "engine.kv_tokens": cache_tokens} if own else {}),
            }

    def _memory(self, settings: Settings, ranks: int) -> MemoryPlan:
        """Memory of one of several ranks with other settings."""
        key = ranks, tuple(sorted(settings.items(), key=str))
        if key not in self._plans:
            changed = self._inputs.plan.recipe.with_settings(self.lines(settings))
            self._plans[key] = memory_of(replace(self._inputs.plan, recipe=changed), ranks)
        found = self._plans[key]
        assert found is not None
        return found

    def _trainer(self, split: Split, settings: Settings, own: bool) -> Need:
        """Memory of a device that trains. Its engine is counted too if the rank has its own."""
        elsewhere = {} if own else {"rollout.backend.kind": "vllm"}
        memory = self._memory({**ALONE, **elsewhere, **settings}, split.training)
        if own:
            fits = memory.cache_that_fits(self._total)
            tokens = memory.cache_least if fits is None else fits
            _, parts = memory.peak_parts(tokens)
            return Need(memory.needed(tokens), parts, tokens, tokens // memory.sequence)
        _, parts = memory.peak_parts(0)
        # A sync gathers one tensor after the other, in float32, while nothing is trained.
        tensors = [self._size.table, *(m.inputs * m.outputs for m in self._size.linears or ())]
        if self._size.experts:
            tensors.append(self._size.experts.parameters // self._size.experts.layers)
        gathered = 4 * max(tensors) if split.training > 1 else 0
        return Need(max(memory.training, memory.sampling + gathered), parts)

    def _sampler(self, engine: str, split: Split, settings: Settings) -> Need:
        """Memory of a device that only samples, with as large a KV cache as fits, or the least."""
        work = self._inputs.work
        alone = {**ALONE, "engine.release_kv": False, "engine.kv_tokens": 0, **settings}
        memory = self._memory(alone, 1)
        each, least, sequence = memory.cache_token, memory.cache_least, float(memory.sequence)
        parts = [part for part in memory.parts if part.name in OF_ENGINE]
        if engine == PROCESS:
            parts = self._lowered(parts)
        if engine == VLLM:
            width = self._inputs.plan.recipe.run.product_bytes
            weights = width * self._size.parameters // split.tensor
            says = f"{width} bytes per parameter, on {split.tensor} devices"
            parts = [Part("vLLM's weights", weights, says)]
            # Each device has whole key-value heads, and the cache a block that stays empty.
            each = -(-each // min(split.tensor, self._heads[1]))
            sequence = work.prompt_tokens + work.mean_tokens
            spare = CONTEXT + BLOCK * each
            parts.append(Part("vLLM's context", spare, "workspaces, and an empty block"))
        held = sum(part.size for part in parts)
        wanted = self._inputs.plan.recipe.engine.kv_tokens or memory.cache_wanted
        tokens = min(wanted, (self.room - held) // each // BLOCK * BLOCK)
        tokens = max(tokens, -(-least // BLOCK) * BLOCK)
        cached = Part(CACHE, tokens * each, f"{tokens:,} tokens")
        return Need(held + cached.size, (*parts, cached), tokens, int(tokens // sequence))

    def _lowered(self, parts: list[Part]) -> list[Part]:
        """Memory of a process that samples. A bfloat16 run stores its matrices in bfloat16 only."""
        size, recipe = self._size, self._inputs.plan.recipe
        if recipe.run.product_bytes > LOWERED or recipe.model.lora.rank:
            return parts
        rest = size.parameters - size.table
        says = f"2 bytes each for {rest:,} parameters, bfloat16; 4 for the others"
        weights = Part("weights", LOWERED * rest + WEIGHTS * size.table, says)
        head = Part("engine's weights", LOWERED * size.table, "2 bytes each: the table as the head")
        others = [part for part in parts if part.name not in (weights.name, head.name)]
        return [weights, *[head] * size.tied, *others]

    def _held_bytes(self, ranks: int, resorts: tuple[tuple[str, object], ...], own: bool) -> int:
        """Bytes that a device that trains holds whatever a micro-batch needs."""
        settings = {**ALONE, "engine.release_kv": True, **dict(resorts)}
        if not own:
            settings["rollout.backend.kind"] = "vllm"
        recipe = self._inputs.plan.recipe.with_settings(self.lines(settings))
        held = holdings(recipe, self._size, 1, ranks=ranks)  # any other reference has more
        assert held is not None
        parts = [part for part in held_parts(recipe, held) if not part.host]
        trains = sum(part.size for part in parts if part.trains)
        return max(trains, sum(part.size for part in parts if part.samples))

    def _candidate(
        self,
        topology: Topology,
        split: Split,
        settings: Mapping[str, object],
        trainer: Need,
        sampler: Need | None,
    ) -> Candidate:
        """The candidate with its times. The settings are all that the search chooses."""
        arch, work, k = self._inputs.arch, self._inputs.work, CONSTANTS
        samples, ahead = sampler or trainer, settings["rollout.staleness"] != 0
        reference, train = self._learning(split, settings)
        running = min(self._inputs.plan.recipe.engine.max_running, max(1, samples.running))
        used = Sampler(
            self._device, split.sampling or split.training, max(1, split.tensor), 2.0, running
        )
        whole = replace(work, prompts=split.prompts_each(work.prompts) * split.engines)
        if sampler is None:
            sync = colocated_sync(arch, self._device, work, split.training, k)
        else:
            found = weight_sync(
                arch,
                self._device,
                trainer_ranks=split.training,
                devices=split.training,
                sent_width=2,
                k=k,
            )
            # Whole weights in float32 go through a file in memory.
            sync = found["gather"] + 4 * arch.params_b / k.publish_gb_s
        phases = PhaseSeconds(
            rollout=sampling_seconds(arch, used, whole, "disaggregated", k),
            verifier=0.0,
            reference=reference,
            trainer=train,
            sync=sync,
        )
        return Candidate(
            topology=topology,
            split=split,
            settings=self.lines(settings),
            trainer=trainer,
            sampler=samples,
            phases=phases,
            step=step_time(
                phases, topology="disaggregated" if ahead else "colocated", sync_hidden=False
            ),
            ahead=ahead,
            excess=max(trainer.size, samples.size) - self.room,
        )

    def _learning(self, split: Split, settings: Mapping[str, object]) -> tuple[float, float]:
        """Seconds of scoring and of training. The rows of a group stay on one rank."""
        tensor, context = settings["parallel.tensor"], settings["parallel.context"]
        budget = settings["trainer.max_tokens_per_microbatch"]
        assert isinstance(tensor, int) and isinstance(context, int) and isinstance(budget, int)
        layout = Layout(split.training, tensor, context, 1)
        work, shares = self._inputs.work, split.training // (tensor * context)
        groups = -(-work.prompts // shares)
        one = replace(
            work,
            prompts=groups * shares,
            packed=min(budget, groups * work.samples * work.trained),
            recompute=str(settings["trainer.activation_checkpointing"]),
        )
        return learning_seconds(
            self._inputs.arch, self._device, one, split.training, CONSTANTS, layout
        )
