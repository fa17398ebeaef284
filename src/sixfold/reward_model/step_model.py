"""Process reward models: make and save Sixfold's, load those of others by their conventions.

Whatever the class, a model becomes a body under a head with one output: the logit that a step is
right. Of two labels, or of the words + and -, it is the difference of their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from ..errors import UserError, nearest, one_line
from ..model.head import LogitFinish
from ..model.loading import Policy, use_own_kernels
from ..model.scalar_head import check_causal, scalar_head, with_scalar_head, zero
from ..model.split_check import context_of
from ..model.stop_tokens import model_turn_end
from ..renderer.renderer import Renderer
from ..trainer.logprobs import Root, ScalarRoot, read_states

ENDS = "step_ends"
"""Key of config.json of Sixfold's models: the way to end steps."""


@dataclass(frozen=True)
class Convention:
    """How a process reward model reads a solution.

    Attributes:
        ends: where steps end, if the user does not say.
        mark: text after every step, at whose last token its score is read. Empty: the score is read
            at the last token of the step, and the solution is encoded in one piece.
        after: text between a mark and the next step.
        apart: steps and marks are encoded each by itself.
        prompt: text of the prompt around "{}". Empty: the chat template renders it.
    """

    ends: str = "newline"
    mark: str = ""
    after: str = ""
    apart: bool = False
    prompt: str = ""


CONVENTIONS: dict[str, Convention] = {
    "sixfold": Convention(),
    "trl": Convention(mark="\n", apart=True, prompt="{}"),
    "math_shepherd": Convention(mark=" ки", after="\n", prompt="{} "),
    "skywork": Convention(mark="\n", apart=True, prompt="{}\n"),
    "qwen": Convention(ends="blank_line", mark="<extra_0>", apart=True),
}
"""Sixfold's own models; TRL's PRMTrainer (two labels); Math-Shepherd (a causal LM that says + or -
after the mark, arXiv:2312.08935); Skywork-o1-Open-PRM (one label, read by a sigmoid);
Qwen2.5-Math-PRM (two labels, arXiv:2501.07301).
"""

_CLASSES = {
    "ForProcessRewardModel": "qwen",
    "ForPrmModel": "skywork",
    "ForTokenClassification": "trl",
}
"""End of the name of the class in config.json -> convention."""


@dataclass(frozen=True)
class StepModel:
    """A process reward model with its tokenizer.

    Attributes:
        root: body and head, in evaluation mode.
        model: the model.
        renderer: with its tokenizer.
        name: a key of `CONVENTIONS`.
        mark: token ids of its mark.
        ends: where steps end, if the user does not say. As config.json has it, unchecked.
        context: longest sequence in tokens.
        models: models that compute a token. 1: the root scores steps. 2, a policy and a reference:
            it scores tokens, and the logit of a step is the sum up to it.
    """

    root: Root
    model: PreTrainedModel
    renderer: Renderer
    name: str
    mark: Sequence[int]
    ends: object
    context: int
    models: int = 1


class _Difference(nn.Module):
    """The second output of a head minus the first. The output of a head with one."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self._head = head

    def forward(self, states: Tensor) -> Tensor:
        """[N, 1] from states [N, hidden]."""
        found: Tensor = self._head(states)
        return found[:, 1:] - found[:, :1] if found.shape[1] == 2 else found


def step_root(model: PreTrainedModel, language: PreTrainedModel | None = None) -> ScalarRoot:
    """The root of a token classifier with one or two labels.

    Args:
        model: the token classifier.
        language: as for `ScalarRoot`.
    """
    head = _Difference(scalar_head(model))
    return ScalarRoot(model, head, partial(read_states, model), language)


def step_model_of(policy: Policy, whole: PreTrainedModel, ends: str) -> PreTrainedModel:
    """A process reward model with the body of a policy and a head of zeros.

    It is a token classifier with two labels, of which the second is right, as TRL's.

    Args:
        policy: the policy with its tokenizer.
        whole: its model in one piece.
        ends: where steps end, which is stored.

    Raises:
        UserError: if transformers has no token classifier of the policy's architecture.
    """
    model = with_scalar_head(whole, "token", "model.path: no process reward model for {}")
    one: Any = scalar_head(model)
    two = nn.Linear(one.in_features, 2, bias=one.bias is not None).to(one.weight)
    zero(two)
    (name,) = [name for name, child in model.named_children() if child is one]
    setattr(model, name, two)
    config: Any = model.config
    config.num_labels = 2
    setattr(config, ENDS, ends)
    return model.eval()


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """Parameters of a saved process reward model of Sixfold by name."""
    saved = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    return dict(saved.named_parameters())


def load_step_model(
    path: str,
    convention: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    setting: str = "process reward model",
) -> StepModel:
    """Load a process reward model from a folder or the hub.

    Args:
        path: model folder or hub id.
        convention: a key of `CONVENTIONS`, or "auto": by its config.json.
        device: device of the model.
        dtype: dtype of the body's weights.
        setting: name of the setting that holds the path, for error messages.

    Raises:
        UserError: if there is no such model, or it is no process reward model.
    """
    where = f"{setting} = '{path}'"
    try:
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        name = _convention(config, convention, where)
        for key, value in vars(config).items():
            if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)
        make, options = _class(name, config, where)
        loaded: Any = make.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        renderer = Renderer(tokenizer, model_turn_end(None, tokenizer).tokens)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{where}: cannot be loaded as a process reward model ({one_line(error)})"
        ) from error
    model, found = loaded
    if found["missing_keys"]:
        raise UserError(f"{where}: the weight '{sorted(found['missing_keys'])[0]}' is missing")
    mark = _encoded(renderer, CONVENTIONS[name].mark, where)
    head = _head(model, name, renderer, where)
    check_causal(model.eval(), where)
    use_own_kernels(model)
    for p in model.base_model.parameters():  # buffers keep float32: the angles of rotary embeddings
        p.data = p.data.to(dtype)
    model = model.to(device).eval().requires_grad_(False)
    return StepModel(
        ScalarRoot(model, _Difference(head.float().to(device)), partial(read_states, model)),
        model,
        renderer,
        name,
        mark,
        getattr(config, ENDS, CONVENTIONS[name].ends),
        context_of(model),
    )


def _convention(config: Any, asked: str, where: str) -> str:
    """The convention of a model.

    Raises:
        UserError: if it has none.
    """
    if asked != "auto":
        if asked not in CONVENTIONS:
            raise UserError(
                f"{where}: unknown convention {asked!r}. Use auto, {', '.join(CONVENTIONS)}."
                f"{nearest(asked, list(CONVENTIONS))}"
            )
        return asked
    if getattr(config, ENDS, None):
        return "sixfold"
    named = [str(name) for name in config.architectures or ()]
    for ending, name in _CLASSES.items():
        if any(one.endswith(ending) for one in named):
            return name
    raise UserError(
        f"{where} is no process reward model: its config.json names"
        f" {', '.join(named) or 'no class'}. Name the result of a stage of kind prm, a token"
        " classifier, or say how the model is read by environment.prm.convention ="
        " 'math_shepherd', 'qwen' or 'skywork'"
    )


def _class(name: str, config: Any, where: str) -> tuple[Any, dict[str, Any]]:
    """transformers' class of a convention, and arguments with which it is loaded.

    Raises:
        UserError: if there is none for the architecture.
    """
    if name == "math_shepherd":
        return AutoModelForCausalLM, {"trust_remote_code": False}
    if name in ("sixfold", "trl"):
        return AutoModelForTokenClassification, {"trust_remote_code": False}
    known: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if type(config) not in known:
        raise UserError(f"{where}: transformers has no token classifier of its architecture")
    base: Any = known[type(config)]
    config.num_labels = 1
    if name == "skywork":
        return base, {"key_mapping": {r"^v_head\.summary\.": "score."}}

    class _TwoLayers(base):
        """A token classifier with two layers in the head, as Qwen2.5-Math-PRM."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            size = config.hidden_size
            self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))
            self.post_init()

    return _TwoLayers, {}


@torch.no_grad()
def _head(model: PreTrainedModel, name: str, renderer: Renderer, where: str) -> nn.Module:
    """The head of a loaded model.

    Raises:
        UserError: if it has another number of labels.
    """
    if name == "math_shepherd":
        return _words_head(model, renderer, where)
    if name == "qwen":
        score: nn.Module = model.get_submodule("score")
        return score
    heads = [child for child in model.children() if isinstance(child, nn.Linear)]
    labels = heads[0].out_features if len(heads) == 1 else 0
    if labels != (1 if name == "skywork" else 2):
        raise UserError(
            f"{where}: {type(model).__name__} has {labels} labels, and a process reward model has"
            " two, wrong and right"
        )
    return heads[0]


def _encoded(renderer: Renderer, text: str, where: str) -> list[int]:
    """Token ids of a mark.

    Raises:
        UserError: if the tokenizer does not know it.
    """
    try:
        return renderer.encode_text(text, mark=True)
    except ValueError as error:
        raise UserError(f"{where}: its tokenizer does not know the mark {text!r}") from error


def _words_head(model: PreTrainedModel, renderer: Renderer, where: str) -> nn.Linear:
    """Head with the rows of the words + and - of a causal LM: no other logit is needed."""
    if LogitFinish.of(vars(model.config)) != LogitFinish():
        raise UserError(f"{where}: its logits are scaled or capped, which has no convention here")
    whole_text = _encoded(renderer, "+ -", where)
    ids = [whole_text[0], whole_text[-1]]
    if [renderer.piece(token).strip() for token in ids] != ["+", "-"]:
        raise UserError(f"{where}: its tokenizer has not one token for each of '+' and '-'")
    whole: Any = model.get_output_embeddings()
    head = nn.Linear(whole.in_features, 2, bias=whole.bias is not None)
    for place, token in enumerate(reversed(ids)):
        head.weight[place] = whole.weight[token]
        if whole.bias is not None:
            head.bias[place] = whole.bias[token]
    return head
