"""The configuration of a run on tokens: small frozen dataclasses, one per stage.

Nothing here imports torch, so that `--help` stays quick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Suppress

from keel.apps.language.checks import check
from keel.apps.language.registries import Algo, RewardNames, TaskName
from keel.config import Checkpoints, common, describe, merged
from keel.config.common import RunSettings, TrustRegion
from keel.config.reading import with_import_paths
from keel.config.values import NAMED, settle_texts
from keel.errors import InputError

Place = Literal["none", "reward", "loss", "both"]
Estimator = Literal["k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"]
"""Sample estimates of the KL; `kl` is k1, `mse` is k2, `low_var_kl` is k3 with verl's clamps."""
KLLoss = Literal[
    "weighted_k2", "ratio_k3", "straight_through", "full",
    "k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl",
]  # fmt: skip
REDUCTIONS = Literal["auto", "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]


@dataclass(frozen=True)
class Model:
    """The language model: one that is there, or a small one made from scratch."""

    path: str = ""
    """A folder in the format of Hugging Face, with safetensors; by default a model is made."""
    kind: Literal["qwen3", "llama"] = "qwen3"
    """The architecture of a model that is made."""
    hidden: Annotated[int, common.AT_LEAST_2] = 128
    """Width of its hidden states."""
    layers: Annotated[int, common.AT_LEAST_1] = 4
    """Layers of the decoder."""
    heads: Annotated[int, common.AT_LEAST_1] = 4
    """Attention heads, of `hidden` / `heads` numbers each."""
    positions: Annotated[int, common.AT_LEAST_1] = 256
    """The longest text it can read."""
    critic: Literal["auto", "none", "head", "model"] = "auto"
    """Values by a head on the same trunk, or by a model of their own; `auto`: a head for PPO, none
    where advantages come from groups."""
    lora_rank: int = 0
    """Learn adapters of this rank (needs peft) in place of all parameters; 0: all parameters."""
    lora_alpha: Annotated[float, common.ABOVE_0] = 16.0
    """Their scale, divided by the rank."""


@dataclass(frozen=True)
class Sample:
    """How completions are drawn."""

    prompts: Annotated[int, common.AT_LEAST_1] = 8
    """Different prompts per update."""
    group: Annotated[int, common.AT_LEAST_1] = 8
    """Completions of each."""
    max_new_tokens: int = 0
    """Length of a completion; 0: as much as the task needs."""
    temperature: Annotated[float, common.ABOVE_0] = 1.0
    """Temperature of the softmax that tokens are drawn from."""
    top_k: int = 0
    """Only from the k likeliest tokens; 0: from all."""
    top_p: Annotated[float, common.SHARE_ABOVE_0] = 1.0
    """Only from the likeliest tokens that make up this share."""
    max_importance: Annotated[float | None, common.ABOVE_0] = None
    """Weight tokens by policy over sampler, at most this much: for samplers that are not quite the
    policy (top-k, top-p, another engine)."""
    state_masking: bool = True
    """Do not learn from what tools wrote; without it, that text counts as the policy's own."""
    tool_calls: int = 4
    """The most calls of a tool in one completion."""


@dataclass(frozen=True)
class KL:
    """The pull towards the reference."""

    place: Place = "none"
    """In the reward (k1), in the loss, in both, or nowhere: then no reference is kept."""
    coef: float = 0.01
    """β, the weight of the pull."""
    reward: Estimator = "k1"
    """The estimator in the reward; another than k1 warns."""
    loss: KLLoss = "weighted_k2"
    """The form in the loss: weighted_k2, ratio_k3, straight_through, or full (exact); on-policy
    also k2; others warn."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` turns β until the measured KL is `target`."""
    target: Annotated[float, common.ABOVE_0] = 0.1
    """Exact KL(policy‖reference) to hold, in nats per `unit`."""
    horizon: Annotated[float, common.ABOVE_0] = 2_000.0
    """Completions in which β may change by e^±0.2, or thereabouts."""
    unit: Literal["token", "sequence"] = "token"
    """Nats per token that the policy wrote, or per completion."""
    low: float = 1e-5
    """Lower bound on an adaptive β."""
    high: Annotated[float, common.ABOVE_0] = 10.0
    """Upper bound on an adaptive β."""
    refresh: int = 0
    """Every so many updates the reference becomes the policy; 0: never."""
    ema: Annotated[float, common.SHARE] = 0.0
    """The reference follows the policy by this share after every update; 0: it stays."""


@dataclass(frozen=True)
class Region(TrustRegion):
    """The trust region and the steps inside of it."""

    clip: Annotated[float | None, common.ABOVE_0] = 0.2
    clip_high: Annotated[float | None, common.ABOVE_0] = None
    dual_clip: Annotated[float | None, common.ABOVE_0] = None
    value_clip: Annotated[float | None, common.ABOVE_0] = None
    target_kl: Annotated[float | None, common.ABOVE_0] = None
    """Stop an update early at 1.5 × this exact KL."""
    epochs: Annotated[int, common.AT_LEAST_1] = 1
    minibatch: Annotated[int, common.AT_LEAST_1] = 64
    learning_rate: Annotated[float, common.ABOVE_0] = 5e-4
    schedule: Literal["constant", "linear"] = "constant"
    max_grad_norm: Annotated[float, common.ABOVE_0] = 1.0
    micro: int = 0
    """Completions at once on the device; 0: the whole minibatch. The result is the same."""
    form: Literal["token", "sequence", "cispo"] = "token"
    """Ratios per token, per sequence (GSPO), or as a clipped weight (CISPO)."""
    reduction: REDUCTIONS = "auto"
    """How tokens are averaged; `auto`: over all tokens, for Dr.GRPO by the longest answer."""
    covariance: Literal["none", "clip", "kl"] = "none"
    """Hold the tokens that drain the entropy: without their gradient (Clip-Cov), or by a penalty
    (KL-Cov)."""
    covariance_share: Annotated[float, common.SHARE_ABOVE_0] = 2e-3
    """How many of them."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""


@dataclass(frozen=True)
class Advantage:
    """From rewards to what is learned from."""

    gamma: Annotated[float, common.SHARE] = 1.0
    """Discount."""
    lam: Annotated[float, common.SHARE] = 0.95
    """λ of PPO's GAE along tokens."""
    clamp: Annotated[float | None, common.ABOVE_0] = 10.0
    """Bound on normalized advantages."""


@dataclass(frozen=True)
class Reward:
    """Who says how good a completion is."""

    functions: RewardNames = ()
    """`module:function` of your own, in place of the task's verifier; each may carry a weight,
    `mine:length*0.2`."""
    timeout: Annotated[float | None, common.ABOVE_0] = None
    """Seconds a function has for one completion; without, it runs inside of this process."""
    max_failures: Annotated[float, common.SHARE] = 0.2
    """The share of completions that may not be scored before the run stops."""
    soft_length: int = 0
    """From this many tokens on a completion costs, up to 1 at its longest; 0: it does not."""

    def __post_init__(self) -> None:
        settle_texts(self, "reward.")


@dataclass(frozen=True)
class WarmUp:
    """Supervised learning before RL: a policy that never succeeds learns nothing from rewards."""

    examples: int = 256
    """A fixed set of perfect completions; 0: no warm-up."""
    until: Annotated[float, common.SHARE] = 0.3
    """Stop when this share of held-out prompts is solved by sampling."""
    epochs: Annotated[int, common.AT_LEAST_1] = 200
    """Stop after so many passes, whatever is solved."""
    minibatch: Annotated[int, common.AT_LEAST_1] = 32
    """Examples per step of Adam."""
    learning_rate: Annotated[float, common.ABOVE_0] = 1e-3
    """Adam's step size."""
    every: Annotated[int, common.AT_LEAST_1] = 2
    """Passes between two looks at how much is solved."""


@dataclass(frozen=True)
class Evaluation:
    """Completions of prompts that were never trained on."""

    every: int = 0
    """Completions trained on between evaluations; 0: at the beginning and the end."""
    prompts: Annotated[int, common.AT_LEAST_1] = 200
    """Held-out prompts per evaluation."""
    greedy: bool = False
    """Take the likeliest tokens, in place of sampling."""


@dataclass(frozen=True)
class Language(RunSettings):
    """A whole run."""

    env: Suppress[str] = "language"
    task: TaskName = "lookup"
    """What is to be learned; `module:attribute`: a task of your own."""
    task_options: Annotated[dict[str, Any], NAMED] = field(default_factory=dict, hash=False)
    """What the task is made with: a mapping; name=value,… on the command line."""
    algo: Algo = "grpo"
    """Where advantages come from: a critic (ppo), the other completions of a prompt, or
    `module:attribute`: a function of your own."""
    total_steps: Annotated[int, common.AT_LEAST_1] = 6_400
    """Completions to train on."""
    model: Model = field(default_factory=Model)
    sample: Sample = field(default_factory=Sample)
    kl: KL = field(default_factory=KL)
    region: Region = field(default_factory=Region)
    advantage: Advantage = field(default_factory=Advantage)
    reward: Reward = field(default_factory=Reward)
    warmup: WarmUp = field(default_factory=WarmUp)
    evaluation: Evaluation = field(default_factory=Evaluation)
    control: bool = True
    """After the run, train the warmed-up model on its warm-up data with as much computing, and
    judge it beside."""
    preflight: bool = True
    """Before the first update, check what must hold: ratios of 1, no KL to the reference, no
    difference by padding, micro-batches or shifts."""
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(every=3_200))

    @property
    def batch(self) -> int:
        """Completions per update."""
        return self.sample.prompts * self.sample.group

    @property
    def iterations(self) -> int:
        """Updates until `total_steps` are reached."""
        return math.ceil(self.total_steps / self.batch)

    @property
    def critic(self) -> Literal["none", "head", "model"]:
        """What `model.critic` comes down to."""
        if self.model.critic == "auto":
            return "head" if self.algo == "ppo" else "none"
        return self.model.critic


VERL = {"kl_ctrl.type": "controller", "kl_ctrl.kl_coef": "coef", "kl_ctrl.target_kl": "target",
        "kl_ctrl.horizon": "horizon"}  # fmt: skip
"""verl's names for fields of `kl`."""


def from_dict(data: Mapping[str, Any], base: Language | None = None) -> Language:
    """Strictly, like every configuration; verl's `kl_ctrl` and `state_masking` are understood."""
    given = dict(data)
    control = given.pop("kl_ctrl", None)
    if control is not None:
        if not isinstance(control, Mapping):
            raise InputError(f"kl_ctrl: expected keys and values, got {describe(control)}")
        known = {name.partition(".")[2]: own for name, own in VERL.items()}
        for key in control:
            if key not in known:
                written = key if str(key).isidentifier() else describe(key)
                raise InputError(f"kl_ctrl.{str(written)[:80]}: expected one of {', '.join(known)}")
        own = {known[key]: value for key, value in control.items()}
        given["kl"] = {**own, **_section(given, "kl")}
    if "state_masking" in given:
        masking = {"state_masking": given.pop("state_masking")}
        given["sample"] = {**masking, **_section(given, "sample")}
    config = merged(base if base is not None else Language(), given)
    check(config)
    return config


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = given.get(name, {})
    if not isinstance(section, Mapping):
        raise InputError(f"{name}: expected keys and values, got {describe(section)}")
    return section


def anchored(config: Language) -> Language:
    """Return `config` with the absolute path of its model, so that a run can be opened anywhere."""
    config = with_import_paths(config)
    if not config.model.path:
        return config
    model = replace(config.model, path=str(Path(config.model.path).expanduser().resolve()))
    return replace(config, model=model)


def decoding(config: Language, greedy: bool | None = None) -> str:
    """Say how the completions of an evaluation are drawn, for displays and summaries.

    Args:
        config: The run.
        greedy: Whether the likeliest tokens are taken; by default as in the run's evaluations.

    Examples:
        >>> decoding(Language()), decoding(Language(), greedy=True)
        ('sampled at temperature 1', 'greedy')
    """
    if config.evaluation.greedy if greedy is None else greedy:
        return "greedy"
    sample = config.sample
    limits = [
        *([f"top-k {sample.top_k}"] if sample.top_k else []),
        *([f"top-p {sample.top_p:g}"] if sample.top_p < 1.0 else []),
    ]
    return ", ".join([f"sampled at temperature {sample.temperature:g}", *limits])
