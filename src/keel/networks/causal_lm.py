"""Language models as agents: any causal LM of Hugging Face, with or without a critic.

The model's parameters are a row of a matrix like those of every agent, so optimizer, roll-back and
certificate are the same for tokens as for joints and joysticks. The head is kept apart from what
the model sees: logits are made where they are needed, a few tokens at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from keel.distributions.vocabulary import HEAD, Vocabulary
from keel.errors import InputError
from keel.networks import shared_prefix
from keel.networks.actor_critic import Outputs, Part, Scalar
from keel.networks.agent import Agent, Evaluation
from keel.resources import threads
from keel.types import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS, ATTENTION, RESPONSE_MASK = "tokens", "attention", "response_mask"
"""What a language model observes: `[R, T]` tokens, bool `[R, T]` where there are any, and `[R, L]`,
1 for those of the last L that the policy wrote."""

CriticKind = Literal["none", "head", "model"]


class Parts(NamedTuple):
    """A causal LM taken apart."""

    backbone: PreTrainedModel
    """from tokens to hidden states, after the last norm"""
    head: nn.Linear
    """from hidden states to logits"""


def parts_of(model: PreTrainedModel) -> Parts:
    """The backbone and the head; of a model with adapters, with these in place."""
    whole: Any = model
    if hasattr(model, "get_base_model"):  # adapters around it
        whole = model.get_base_model()  # type: ignore[operator]
    head, backbone = whole.get_output_embeddings(), whole.base_model
    name = type(whole).__name__
    if not isinstance(head, nn.Linear) or backbone is whole:
        raise InputError(f"{name}: expected a causal language model with a linear head")
    for setting in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(whole.config, setting, None):
            raise InputError(
                f"{name}: its logits are no linear function of its hidden states ({setting}), from "
                "which the exact KL over the vocabulary is computed"
            )
    return Parts(backbone, head)


class LanguageNetwork(nn.Module):
    """Tokens to hidden states and, with a critic, to the value of every prefix.

    What a critic shares with the policy stands under `trunk`, so that both are walked back
    together; a critic of its own leaves the policy under `actor`.
    """

    def __init__(self, model: PreTrainedModel, critic: CriticKind = "none") -> None:
        super().__init__()
        self.critic_kind = critic
        self.shares_prompts = shared_prefix.can_share(parts_of(model).backbone)
        setattr(self, "trunk" if critic == "head" else "actor", model)
        width = parts_of(model).head.in_features
        if critic == "head":
            self.critic: nn.Module = _value_head(width)
        elif critic == "model":
            self.critic = nn.ModuleDict(
                {"model": copy.deepcopy(parts_of(model).backbone), "value": _value_head(width)}
            )

    @property
    def model(self) -> PreTrainedModel:
        """The causal LM."""
        return self.trunk if self.critic_kind == "head" else self.actor  # type: ignore[return-value]

    def forward(self, obs: Tree, part: Part = "both") -> Outputs:
        """Hidden states `[R, L, H]` that the last L tokens are drawn from; values `[R, L, 1]`."""
        backbone, head = parts_of(self.model)
        hidden = value = None
        if part != "critic" or self.critic_kind == "head":
            hidden = _hidden(backbone, obs, self.shares_prompts)
        if part != "actor" and self.critic_kind == "head":
            value = self.critic(hidden)
        if part != "actor" and self.critic_kind == "model":
            seen = _hidden(self.critic["model"], obs, self.shares_prompts)  # type: ignore[index]
            value = self.critic["value"](seen)  # type: ignore[index]
        if hidden is not None and head.bias is not None:
            hidden = torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1)
        return Outputs(None if part == "critic" else hidden, value)


def _value_head(width: int) -> nn.Linear:
    """Values begin at 0: what is not known yet must not teach anything."""
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _hidden(backbone: nn.Module, obs: Tree, shares_prompts: bool) -> Tensor:
    """`[R, L, H]`: what the model knows before each of the last L tokens."""
    tokens, attention, length = obs[TOKENS], obs[ATTENTION].bool(), obs[RESPONSE_MASK].shape[1]
    if shares_prompts:
        own = dict(backbone.named_parameters())
        return shared_prefix.states(backbone, own, tokens, attention, length)
    if bool(attention.all()):  # without a mask attention takes its fast way
        found = backbone(input_ids=tokens, use_cache=False)
    else:
        found = backbone(
            input_ids=tokens,
            attention_mask=attention.long(),
            position_ids=positions(attention),
            use_cache=False,
        )
    states: Tensor = found.last_hidden_state
    return states[:, -length - 1 : -1]


def positions(attention: Tensor) -> Tensor:
    """`[R, T]`: how many tokens stand before each; padding counts for nothing."""
    return (attention.long().cumsum(1) - 1).clamp(min=0)


class TokenAgent(Agent):
    """A language model and what its outputs mean; holds no parameters."""

    network: LanguageNetwork

    def __init__(self, model: PreTrainedModel, critic: CriticKind = "none") -> None:
        head = parts_of(model).head
        width = head.in_features + (head.bias is not None)
        model.train(False)  # no dropout: replaying must be sampling
        network = LanguageNetwork(model, critic)
        super().__init__(network, Vocabulary(head.out_features, width), critic=Scalar())
        backbone = parts_of(model).backbone
        own = {"weight": head.weight, "bias": head.bias}
        self._head_names = _names_of(network, {k: p for k, p in own.items() if p is not None})
        self._backbone_names = _names_of(network, dict(backbone.named_parameters()))

    @property
    def workers(self) -> int:
        """Threads that take rows in parallel: on the CPU all, where a pass leaves the modules as
        they are."""
        alone = self.initial.device.type == "cpu" and self._stateless
        return threads() if alone else 1

    @property
    def _frozen(self) -> Tree:
        """Parameters of the backbone that are not learned, and so in no tree."""
        known = set(self.layout.names)
        return {
            own: parameter.detach()
            for own, parameter in self.backbone.named_parameters()
            if self._backbone_names[own] not in known
        }

    @property
    def _stateless(self) -> bool:
        return self.network.shares_prompts and self.network.critic_kind != "model"

    def outputs_of(self, tree: Tree, obs: Tree, part: Part = "both") -> Outputs:
        """See `Agent`. `functional_call` puts parameters into the modules for a while, which no
        other thread may see: where the pass is ours, it takes them from the tree."""
        if not self._stateless:
            return super().outputs_of(tree, obs, part)
        tokens, length = obs[TOKENS], obs[RESPONSE_MASK].shape[1]
        own = {**self._frozen, **self.backbone_tree(tree)}
        hidden = shared_prefix.states(self.backbone, own, tokens, obs[ATTENTION].bool(), length)
        value = None
        if part != "actor" and self.network.critic_kind == "head":
            value = linear(hidden, tree["critic.weight"], tree["critic.bias"])
        return Outputs(None if part == "critic" else self.widened(hidden), value)

    def head_of(self, tree: Tree) -> Tensor:
        """`[V, H]`, from parameters by name; what is frozen is the module's own."""
        module = parts_of(self.network.model).head
        parts = [
            tree[name] if name in tree else getattr(module, kind)
            for kind, name in self._head_names.items()
        ]
        weight = parts[0]
        return weight if len(parts) == 1 else torch.cat([weight, parts[1][:, None]], 1)

    def head(self, params: Tensor) -> Tensor:
        """`[V, H]` at parameters `[1, P]`."""
        return self.head_of(self.layout.unflatten(params[0]))

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return parts_of(self.network.model).backbone

    def backbone_tree(self, tree: Tree) -> Tree:
        """The parameters of the backbone, by its own names."""
        return {own: tree[name] for own, name in self._backbone_names.items() if name in tree}

    def widened(self, hidden: Tensor) -> Tensor:
        """Hidden states as the head takes them: with a 1 for its bias, where it has one."""
        if hidden.shape[-1] == self.dist.outputs:
            return hidden
        return torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1)

    def policy(self, params: Tensor, obs: Tree, temperature: float | Tensor = 1.0) -> Tree:
        """The distribution of every token."""
        tree = self.layout.unflatten(params[0])
        hidden = self.outputs_of(tree, obs, "actor").policy
        assert hidden is not None
        return self.dist.params(hidden, None, temperature) | {HEAD: self.head_of(tree)}

    def raw_value(self, params: Tensor, obs: Tree) -> Tensor:
        """`[R, L, 1]`; 0 without a critic."""
        if self.network.critic_kind == "none":
            return torch.zeros_like(obs[RESPONSE_MASK], dtype=params.dtype)[..., None]
        return super().raw_value(params, obs)

    def evaluate(self, params: Tensor, obs: Tree, temperature: float | Tensor = 1.0) -> Evaluation:
        """Policy and value of every token, in one pass."""
        tree = self.layout.unflatten(params[0])
        hidden, value, _ = self.outputs_of(tree, obs)
        assert hidden is not None
        if value is None:
            value = torch.zeros_like(hidden[..., :1])
        policy = self.dist.params(hidden, None, temperature) | {HEAD: self.head_of(tree)}
        return Evaluation(policy, value)


def _names_of(network: nn.Module, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Under which names parameters stand among the network's; tied ones by the first."""
    known = {id(p): name for name, p in network.named_parameters()}
    return {name: known[id(p)] for name, p in own.items()}
