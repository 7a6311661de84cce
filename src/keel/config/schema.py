"""The configuration of a run: small frozen dataclasses, one per stage.

Nothing here imports torch, so that `--help` stays quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.conf import Suppress

from keel.config import common
from keel.config.common import (
    Backend,
    Controllers,
    Distribution,
    Estimator,
    Group,
    NetworkKind,
    RunSettings,
    TrustRegion,
)
from keel.config.values import NAMED, settle_texts


@dataclass(frozen=True)
class Envs:
    """How environments are run."""

    num: Annotated[int, common.ABOVE_0] = 8
    """Environments stepped together."""
    backend: Backend = "auto"
    """`auto` takes the fastest that is installed."""
    normalize_obs: bool = False
    """Centre and scale observations by running moments, frozen through rollout and update."""
    normalize_reward: bool = False
    """Divide rewards by the standard deviation of the discounted return."""
    clip_reward: float | None = None
    """Bound on the (normalized) reward."""
    guard: bool = True
    """Stop at non-finite or misshapen observations and rewards, before they are stored."""
    timeout: Annotated[float, common.ABOVE_0] = 60.0
    """Seconds after which a silent worker counts as hung."""
    options: Annotated[dict[str, Any], NAMED] = field(default_factory=dict, hash=False)
    """Constructor options: a mapping; name=value,… on the command line, also 'a={"b": [1, 2]}'."""
    wrappers: tuple[str, ...] = ()
    """Wrappers of each environment as module:attribute, the innermost first."""

    def __post_init__(self) -> None:
        settle_texts(self, "envs.")


@dataclass(frozen=True)
class Agents:
    """Several agents in one environment."""

    sharing: Literal["none", "all", "kind"] = "none"
    """Who acts with whose network: each with its own; all with one, which sees who it is; or those
    of a kind, by the name before the number (wolf_0, wolf_1)."""
    critic: Literal["central", "own"] = "central"
    """Whether critics see the state of the whole environment (MAPPO), or what their agents see
    (IPPO)."""
    order: Literal["together", "sequential"] = "together"
    """`sequential`: agents learn one after the other, in random order, each with its advantages
    weighted by how those before it have changed (HAPPO)."""


@dataclass(frozen=True)
class Atari:
    """How Atari games are shown; returns are always those of whole games, unclipped."""

    episodic_life: bool = False
    """A lost life ends an episode for the learner; the game goes on."""
    fire_reset: bool = True
    """Press FIRE after a reset, and after a lost life of an episodic one, where a game waits."""
    sticky: Annotated[float, common.SHARE] = 0.0
    """The probability that the last action is repeated."""
    noop_max: int = 30
    """At most so many steps without action at the beginning."""
    frame_skip: Annotated[int, common.ABOVE_0] = 4
    """Frames per step of the agent."""
    frame_stack: Annotated[int, common.ABOVE_0] = 4
    """Pictures that it sees at once."""


@dataclass(frozen=True)
class Network:
    """The shape of actor and critic."""

    kind: NetworkKind = "auto"
    """`auto`: a CNN with shared trunk for pixels, else two MLPs. `pointer`: actions choose among
    the rows of a matrix, each of which is scored by the same network. `module:attribute`: a network
    of your own, made by `(observation_space, action_space) -> nn.Module`."""
    distribution: Distribution = "auto"
    """Of the actions: `auto`: that of the action space. `module:attribute`: one of your own, made
    by `(action_space)`."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers (MLP), or the width of the branches (decoupled)."""
    activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Between the layers of an MLP."""
    log_std: Annotated[float, common.ANY_NUMBER] = 0.0
    """Initial log standard deviation of continuous actions."""
    state_std: bool = False
    """Let the standard deviation depend on the observation."""
    squash: bool = False
    """Squash continuous actions into their bounds by tanh, in place of clipping."""
    features: Annotated[int, common.ABOVE_0] = 512
    """Width of the CNN's last layer, and of the decoupled network's projection."""
    cnn: Literal["nature", "small"] = "nature"
    """`nature`: three convolutions (Mnih et al. 2015); `small`: two (2013), a third of the time."""
    share: bool = True
    """Whether actor and critic see pixels through one CNN, or each through its own."""
    recurrent: Literal["none", "actor", "critic", "both"] = "none"
    """Which of them has a GRU; minibatches are then whole sequences."""
    recurrent_size: Annotated[int, common.ABOVE_0] = 64
    """Width of the GRU."""


@dataclass(frozen=True)
class Critic:
    """What the critic says about the return: its mean, or its distribution."""

    kind: Literal["scalar", "quantile", "two_hot", "hl_gauss"] = "scalar"
    """`scalar`: the mean; `quantile`: quantiles; `two_hot`, `hl_gauss`: a histogram, whose targets
    are spread over the two nearest atoms, or by a Gaussian."""
    quantiles: Annotated[int, common.AT_LEAST_2] = 32
    """Number of quantiles."""
    kappa: float = 0.02
    """Where the quantile Huber loss turns linear, in the critic's units; 0: at once. Above the
    spread of the return the quantiles come out too narrow."""
    ordered: bool = False
    """Quantiles that cannot cross."""
    atoms: Annotated[int, common.AT_LEAST_2] = 101
    """Of the histogram."""
    reach: Annotated[float, common.ABOVE_0] = 8.0
    """The histogram covers ± this, in the critic's units: standard deviations of the return where
    returns are normalized."""
    normalize: Literal["auto", "on", "off"] = "auto"
    """Learn returns in units of their own mean and spread; `auto`: all but `scalar` do."""
    targets: Literal["sampled", "mean"] = "sampled"
    """What the distribution is fitted to: samples of the return, which bootstrap from samples of
    the distribution itself, or λ-returns, which bootstrap from its mean and vary too little."""
    cvar: Annotated[float, common.SHARE_ABOVE_0] = 1.0
    """Advantages are measured against the mean of this lowest share of the distribution; 1: all."""


@dataclass(frozen=True)
class Advantage:
    """How advantages are estimated and scaled."""

    estimator: Estimator = "gae"
    """How advantages and value targets come from rewards and values; `module:attribute`: a function
    of your own."""
    gamma: Annotated[float, common.SHARE] = 0.99
    """Discount."""
    lam: Annotated[float, common.SHARE] = 0.95
    """λ of GAE: 0 looks one step ahead, 1 to the end."""
    normalize: Literal["none", "batch", "global", "group", "robust"] = "batch"
    """Centre and scale advantages over the rollout: `batch` (or `global`) by mean and standard
    deviation, `robust` by median and quartiles, `group` within groups of rows."""
    group: Group = ""
    """Where groups come from: "" takes info["group"]; module:function is called with the
    observations, a dictionary of arrays `[T, N, …]`, and gives whole numbers `[T, N]`."""
    clamp: float | None = None
    """Bound on the normalized advantage; 10 is common where returns are heavy-tailed."""
    recompute: bool = False
    """Compute advantages anew for every epoch, with the critic as it is by then."""


@dataclass(frozen=True)
class Region(TrustRegion):
    """The trust region, and the optimisation inside of it."""

    symmetric: bool = False
    """Clip to [1/(1+ε), 1+ε]."""
    kl_coef: float = 0.0
    """Penalty: this times the exact KL(old‖new) is added to the loss."""
    kl_measure: Literal["exact", "k1", "k3"] = "exact"
    """KL that stops an update early: the exact one, or an estimate (k1, k3) from the actions that
    were taken. Certification is always exact."""
    adaptive_clip: bool = False
    """Narrow or widen `clip` to keep the KL near `target_kl`."""
    adaptive_kl: bool = False
    """Double or halve `kl_coef` to keep the KL near `target_kl`."""
    early_stop: Literal["off", "minibatch", "epoch"] = "off"
    """Stop an update at 1.5 × `target_kl`."""
    critic_learning_rate: Annotated[float | None, common.ABOVE_0] = None
    """Adam's step size for the critic's own layers, where it differs; schedule and adaptive rate
    scale both alike. (TRPO's `learning_rate` is the critic's.)"""
    adaptive_rate: bool = False
    """Steer the learning rate by the KL towards `target_kl`, in place of a schedule."""


@dataclass(frozen=True)
class Natural:
    """TRPO's step: the natural gradient, scaled to the exact KL, and the line search (algo trpo).

    The critic is fitted apart, by `region.epochs` passes in minibatches of `region.minibatch` at
    `region.learning_rate`.
    """

    cg_iters: Annotated[int, common.ABOVE_0] = 15
    """Iterations of conjugate gradient: one Fisher-vector product each."""
    damping: float = 0.1
    """Added to the diagonal of the Fisher matrix."""
    fisher_fraction: Annotated[float, common.SHARE_ABOVE_0] = 0.5
    """Share of the rollout, drawn anew for every update, on which the Fisher matrix is taken."""
    backtrack_iters: Annotated[int, common.ABOVE_0] = 10
    """Step lengths that the line search tries."""
    backtrack_coeff: Annotated[float, common.BETWEEN_0_AND_1] = 0.8
    """Each of them is this times the one before."""
    accept_ratio: float = 0.1
    """The least share of the predicted improvement that a step must bring."""
    rescale_to_kl: bool = True
    """Scale the step, up or down, to the exact KL bound; else as the quadratic model says."""
    max_kl_end: Annotated[float | None, common.ABOVE_0] = None
    """Where `region.max_kl` goes by the end of the run; `None` leaves it."""
    max_kl_hold: Annotated[float, common.SHARE] = 0.0
    """The share of the run during which it stays where it began."""
    max_kl_schedule: Literal["linear", "geometric"] = "linear"
    """How it goes from there: by equal differences, or by equal factors."""


@dataclass(frozen=True)
class Stabilizer:
    """Line-search stabilizer: tighten the region after failed steps, widen it after recovery."""

    ls_fail_threshold: int = 20
    """Updates in a row without an acceptable step, after which it tightens; 0: never."""
    max_kl_decay: Annotated[float, common.DECAY] = 0.8
    """Factor on `max_kl`."""
    min_max_kl: float = 0.005
    """Where that ends."""
    damping_growth: Annotated[float, common.GROWTH] = 1.2
    """Factor on `damping`."""
    max_damping: float = 0.2
    """Where that ends."""
    min_gain: float = 0.25
    """An accepted step that brings less than this share of what was predicted counts as failed."""
    recovery: int = 20
    """Good updates in a row, after which one tightening is taken back; 0: never."""


@dataclass(frozen=True)
class Explore:
    """What keeps the policy from settling too early."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    entropy_decay: float = 1.0
    """Factor on `entropy_coef` after every update, such as 0.9995."""
    entropy_coef_min: float = 0.0
    """Lower end of that decay, such as 0.01."""
    entropy_floor: float | None = None
    """Entropy in nats below which a differentiable penalty sets in, such as 0.5."""
    pulses: bool = False
    """Temperature pulses: raise the policy's temperature for a few updates at a time."""
    pulse_interval: Annotated[int, common.ABOVE_0] = 8
    """Updates between pulses; of a block under `hierarchical`."""
    pulse_magnitude: Annotated[float, common.ABOVE_0] = 2.0
    """The temperature during a pulse; the highest under `hierarchical`."""
    stagnation_threshold: float = 0.005
    """A relative change of the return below this counts as stagnation."""
    stagnation_memory: int = 5
    """Updates over which stagnation is judged; it triggers a pulse by itself."""
    hierarchical: bool = False
    """Choose the temperature of blocks of updates by a bandit on their returns, in place of pulses:
    how much to explore above, the policy's own sampling below."""


@dataclass(frozen=True)
class Demonstrations:
    """Demonstrations: behavior cloning beside the run's own experience.

    `coef` times the mean of −log π of what was shown is added to the loss of the policy, inside of
    the same trust region.
    """

    path: str = ""
    """A folder that `keel demos record` wrote, or minari:ID; empty: no demonstrations."""
    episodes: Annotated[int | None, common.AT_LEAST_1] = None
    """Only so many of their episodes, the first."""
    loss: Literal["plain", "filtered", "weighted"] = "plain"
    """`plain` takes all that was shown alike; `filtered` what earned more than the critic expects;
    `weighted` gives it the weight exp(A / temperature), A being that difference over its rms."""
    temperature: Annotated[float, common.ABOVE_0] = 1.0
    """Temperature of the weights."""
    cap: Annotated[float, common.ABOVE_0] = 20.0
    """The largest weight."""
    coef: float = 1.0
    """Weight of the loss on demonstrations."""
    control: Literal["fixed", "decay", "adaptive"] = "adaptive"
    """`decay` multiplies `coef` by `decay` after every update; `adaptive` lowers it while
    demonstrations pull harder than `max_ratio` allows or against what the reward teaches, and
    raises it again when they no longer do."""
    steer: Literal["gradient", "loss"] = "gradient"
    """Ratio that `adaptive` and the warning go by: of the gradients' norms, with their cosine, or
    of the losses, of which PPO's is near 0 whatever it teaches."""
    max_ratio: Annotated[float, common.ABOVE_0] = 1.0
    """The largest ratio of cloning to PPO that `adaptive` lets be."""
    coef_min: float = 0.01
    """Lower end of `decay` and `adaptive`."""
    decay: Annotated[float, common.SHARE] = 0.99
    """Factor on `coef` after every update, under control `decay`."""


@dataclass(frozen=True)
class Faults:
    """Deliberate bugs for experiments: to measure them, and to see what the gate stops."""

    wrong_actor: bool = False
    """Updates replay everybody's actions with the first agent's network, and without the mask."""
    mask_drift: bool = False
    """Updates see the mask of the step after."""
    first_actions: int = 0
    """Updates know only so many legal actions, the first, and take any other for the last of them;
    the log-prob is that of the choice among all. 0: all."""
    epsilon_greedy: Annotated[float, common.SHARE] = 0.0
    """This share of the actions is random, with the log-prob of the action that was meant."""
    interleaved_gae: bool = False
    """Advantages run through all agents, as if they acted one after the other."""
    entropy_outside_acceptance: bool = False
    """TRPO aims its step with the entropy bonus and accepts it without."""
    reward_gain: Annotated[float, common.ABOVE_0] = 1.0
    """Updates see rewards so many times larger; returns and observations stay as they are."""
    plain_descent: bool = False
    """Steps follow the gradient itself, without Adam's division by its size."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation episodes beside training, in environments of their own."""

    every: int = 0
    """Agent steps between evaluations; 0: only at the end."""
    episodes: int = 10
    """Episodes per evaluation; 0: no evaluations at all."""
    deterministic: bool = True
    """Take the likeliest action, in place of sampling."""
    max_episode_steps: int = 0
    """Agent steps after which an episode that has not ended is cut, with a warning, and counted in
    `eval/episodes_cut`; 0: the environment's own time limit, or 27,000 where it has none."""


@dataclass(frozen=True)
class Config(RunSettings):
    """A whole run."""

    env: Suppress[str] = "CartPole-v1"
    """A Gymnasium id, or an alias such as Breakout."""
    algo: Literal["ppo", "trpo"] = "ppo"
    """The algorithm: clipped steps of Adam, or one natural-gradient step with a line search."""
    rollout_steps: Annotated[int, common.ABOVE_0] = 128
    """Steps per environment between updates."""
    envs: Envs = field(default_factory=Envs)
    atari: Atari = field(default_factory=Atari)
    agents: Agents = field(default_factory=Agents)
    network: Network = field(default_factory=Network)
    critic: Critic = field(default_factory=Critic)
    advantage: Advantage = field(default_factory=Advantage)
    region: Region = field(default_factory=Region)
    natural: Natural = field(default_factory=Natural)
    stabilizer: Stabilizer = field(default_factory=Stabilizer)
    explore: Explore = field(default_factory=Explore)
    demos: Demonstrations = field(default_factory=Demonstrations)
    faults: Faults = field(default_factory=Faults)
    evaluation: Evaluation = field(default_factory=Evaluation)
    controllers: Controllers = ()
    """Controllers that change hyperparameters after every update, beside those that other settings
    switch on: names, or `module:attribute` of your own."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Let torch compile the optimizer step. Small MLPs have loops of their own, which `on` passes
    by; `auto` compiles what else gains by it, in runs long enough to earn it back."""

    @property
    def batch(self) -> int:
        """Rows per rollout."""
        return self.envs.num * self.rollout_steps

    @property
    def iterations(self) -> int:
        """Rollouts until `total_steps` are reached."""
        return math.ceil(self.total_steps / self.batch)
