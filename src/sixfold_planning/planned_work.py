"""Inputs of planning: sizes of a recipe's model, and the work of one step. No torch.

`sixfold plan` and the prediction of a run both start from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sixfold.data.profile import Measured, measured
from sixfold.errors import UserError
from sixfold.recipe.model_shape import ModelShape
from sixfold.recipe.plan import Plan, make_plan
from sixfold.recipe.schema import Placement, RayPlacement, Recipe, RolloutConfig, SamplersApart
from sixfold.sizing.layers import ExpertSize, LinearModule
from sixfold.sizing.model_size import ModelSize

from .architectures import Architecture, find
from .hardware import Accelerator
from .measured_rates import MeasuredRates
from .placed import Placed
from .workload import Workload

PROMPT_TOKENS = 256
"""Mean length of prompts if the recipe does not bound it. Otherwise half of the bound."""


@dataclass(frozen=True)
class Inputs:
    """What `sixfold plan` computes with.

    Attributes:
        title: name of the recipe or model, for the heading.
        plan: the resolved recipe, with the model's sizes.
        arch: sizes of the model for the arithmetic of time.
        sizes_from: where the sizes of the model come from.
        assumed: assumptions that follow from no setting, one sentence each.
        rates: pass rates of the tasks that the recipe's profile has. Empty: it names none.
        check_s: seconds of a reward check after the last token. 0: it hides behind sampling.
    """

    title: str
    plan: Plan
    arch: Architecture
    work: Workload
    sizes_from: str
    assumed: tuple[str, ...]
    rates: tuple[float, ...] = ()
    check_s: float = 0.0


def planned_inputs(
    title: str, recipe: Recipe, arch: Architecture | None = None, *, mean_tokens: float | None
) -> Inputs:
    """Sizes and work of a recipe.

    Args:
        title: name of the recipe or model.
        arch: sizes of the model. None: those of its config.json, or of the table of public models.
        mean_tokens: mean length of completions. None: that of the recipe's profile of pass rates
            (`data.curriculum.profile`), or half of the bound.

    Raises:
        UserError: if the model's sizes are not known, or the profile cannot be read.
    """
    plan = make_plan(recipe)
    size, origin = plan.model.size, "its config.json"
    if not recipe.model.path and arch is None:
        origin = "the recipe"
    if size is None or arch is not None:
        folder = arch is None and Path(recipe.model.path).expanduser().is_dir()
        arch = arch or (None if folder else find(recipe.model.path))
        if arch is None and plan.model.unknown:
            raise UserError(f"{recipe.model.path}: {plan.model.unknown}")
        if arch is None:
            raise UserError(
                f"the sizes of {recipe.model.path} are not known. Get its config.json, without the"
                f" weights: hf download {recipe.model.path} config.json"
            )
        size, origin = size_of(arch), "the table of public models"
        plan = replace(plan, model=_shape(plan.model, arch, size))
    else:
        arch = architecture_of(Path(recipe.model.path).name or "model from scratch", size)
    profile = recipe.data.curriculum.profile
    found = measured(Path(profile).expanduser()) if profile else None
    work, assumed = _workload(plan, mean_tokens, found)
    return Inputs(title, plan, arch, work, origin, assumed, found.rates if found else ())


def with_recipe(inputs: Inputs, recipe: Recipe) -> Inputs:
    """The same question with another recipe, which keeps model and lengths."""
    plan = replace(inputs.plan, recipe=recipe)
    work, _ = _workload(plan, inputs.work.mean_tokens)
    prompt = inputs.work.prompt_tokens if inputs.rates else work.prompt_tokens
    return replace(inputs, plan=plan, work=replace(work, prompt_tokens=prompt))


def _workload(
    plan: Plan, mean_tokens: float | None, found: Measured | None = None
) -> tuple[Workload, tuple[str, ...]]:
    recipe, assumed = plan.recipe, []
    longest = float(recipe.episode_tokens)
    if found and mean_tokens is None:
        mean_tokens = min(max(1.0, found.completion_tokens), longest)
        assumed.append(
            f"completions have {mean_tokens:,.0f} tokens, the mean of {len(found.rates):,} tasks in"
            f" {recipe.data.curriculum.profile}"
        )
    if mean_tokens is None:
        mean_tokens = longest / 2
        assumed.append(f"completions have half of their bound of {longest:,.0f} tokens (--length)")
    prompt = recipe.data.max_prompt_tokens / 2 or float(PROMPT_TOKENS)
    if not recipe.model.path and plan.model.context:
        prompt = min(prompt, max(1.0, (plan.model.context - longest) / 2))
    if found:
        prompt = max(1.0, found.prompt_tokens)
    assumed.append(f"prompts have {prompt:,.0f} tokens")
    work = Workload(
        prompts=recipe.rollout.prompts_per_step,
        samples=recipe.rollout.samples_per_prompt,
        prompt_tokens=prompt,
        mean_tokens=mean_tokens,
        longest_tokens=longest,
        packed=recipe.trainer.max_tokens_per_microbatch,
        recompute=recipe.trainer.activation_checkpointing,
        adapters=bool(recipe.model.lora.rank),
        shared_prompt=recipe.trainer.share_prefix,
        reference=plan.keeps_reference,
        critic=plan.algorithm.needs_critic,
        shared_weights=not recipe.samples_apart,
        sent_width=1.0 if recipe.sync.quantised else 2.0,
        epochs=plan.algorithm.epochs,
        proximal=plan.algorithm.needs_proximal,
    )
    return work, tuple(assumed)


def trainer_threads(placement: Placement, rollout: RolloutConfig, threads: int) -> int:
    """CPU threads of the trainer while it trains. 0: the recipe asks for no number.

    Args:
        placement: which processes sample and train.
        rollout: how far ahead it samples.
        threads: `run.threads`.
    """
    if isinstance(placement, RayPlacement) and placement.ranks > 1:
        threads = max(1, threads)
    if rollout.staleness and not placement.apart and threads:
        return max(1, threads // 2)  # the sampler has the other half
    return threads


def placed(
    placement: Placement,
    rollout: RolloutConfig,
    threads: int,
    device: Accelerator,
    sharing: int = 1,
) -> Placed:
    """Where the roles of a recipe compute.

    Engines on a GPU share it with the trainer. vLLM and servers have devices of their own, and so
    have actors of a Ray cluster, unless the run starts the cluster on this CPU.

    Args:
        placement: which processes sample.
        rollout: what samples, and how far ahead.
        threads: CPU threads of the trainer while it trains. 0: as many as were measured.
        device: device of a trainer rank.
        sharing: trainer ranks on that device.

    Raises:
        UserError: if a CPU was measured with another number of threads than the run has, or if
            several ranks share it.
    """
    ahead, rates = rollout.staleness, device.measured
    if rollout.backend.kind != "engine":
        return Placed(staleness=ahead)
    apart = placement if isinstance(placement, SamplersApart) and placement.apart else None
    processes = apart.samplers if apart else 0
    actors = apart if isinstance(apart, RayPlacement) and apart.ranks == 1 else None
    if rates is None or not rates.threads:
        if actors:
            return Placed(processes, processes, ahead)
        return Placed(processes, staleness=ahead, slowdown=2.0)
    if sharing > 1:
        raise UserError(
            f"{sharing} trainer ranks share one CPU, and how much they slow each other down is not"
            " measured"
        )
    own = threads or rates.threads
    sampler = apart.threads if apart else own
    _check_threads(rates, own, sampler)
    if ahead and not processes:
        # The interpreter runs one of them at a time.
        return Placed(staleness=ahead, slowdown=2.0)
    if actors and actors.address:
        return Placed(processes, processes, ahead)
    crowd = rates.slowed(max(1, processes) * sampler)
    both = rates.slowed(own + processes * sampler)
    return Placed(processes, max(1, processes), ahead, crowd, both / crowd)


def _check_threads(rates: MeasuredRates, trainer: int, sampler: int) -> None:
    if trainer != sampler:
        raise UserError(
            f"the trainer has {trainer} CPU threads and each sampler {sampler}: their time is known"
            " for equal numbers. Set run.threads and placement.threads to the same number"
        )
    if trainer != rates.threads:
        raise UserError(
            f"trainer and samplers have {trainer} CPU threads each, and this CPU was measured with"
            f" {rates.threads}. Measure it with OMP_NUM_THREADS={trainer} sixfold plan --measure"
        )


def architecture_of(name: str, size: ModelSize) -> Architecture:
    """Sizes for the arithmetic of time, from those of a config.json."""
    head = size.queries // size.heads
    experts = size.experts
    idle = 0.0
    if experts is not None:
        idle = experts.parameters * (1 - experts.top_k / experts.count)
    return Architecture(
        name=name,
        params_b=size.parameters / 1e9,
        active_b=(size.parameters - idle) / 1e9,
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.keys // head,
        head_size=head,
        vocab=size.vocabulary,
        tied=size.tied,
        experts=0 if experts is None else experts.count,
        experts_per_token=0 if experts is None else experts.top_k,
        value_size=size.values // size.heads,
        latent=size.latent,
        rotary=size.rotary,
    )


def size_of(arch: Architecture) -> ModelSize:
    """Sizes for the memory plan, from those of a public model."""
    queries, keys = arch.heads * arch.head_size, arch.kv_heads * arch.head_size
    inner, hidden = round(arch.mlp_width), arch.hidden
    linears = (
        *(("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys)),
        *(("o_proj", queries, hidden), ("gate_proj", hidden, inner), ("up_proj", hidden, inner)),
        ("down_proj", inner, hidden),
    )
    return ModelSize(
        parameters=round(arch.params_b * 1e9),
        layers=arch.layers,
        hidden=hidden,
        intermediate=inner,
        heads=arch.heads,
        queries=queries,
        keys=keys,
        vocabulary=arch.vocab,
        tied=arch.tied,
        linears=None
        if arch.experts
        else tuple(LinearModule(name, i, o, arch.layers) for name, i, o in linears),
        experts=ExpertSize(
            arch.layers, arch.experts, arch.experts_per_token, round(arch.expert_params)
        )
        if arch.experts
        else None,
        values=arch.kv_heads * arch.value_size,
        latent=arch.latent,
        rotary=arch.rotary,
        cached_layers=arch.attention_layers,
    )


def _shape(shape: ModelShape, arch: Architecture, size: ModelSize) -> ModelShape:
    return replace(shape, origin=arch.name, parameters=size.parameters, size=size)
