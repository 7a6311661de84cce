"""A single-file PPO in the manner of CleanRL for the corpus, with CleanRL's names in its log.

Its habits are kept: advantages normalized in each minibatch, clipped value loss, annealed learning
rate, metrics of the last minibatch, episodes cut by time taken for ended. The code is our own, and
so are the faults, which stand at the lines where programs go wrong.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from benchmarks.doctor_corpus.serving import serve
from benchmarks.doctor_corpus.wrappers import INSIDE, OUTSIDE, wrap

DEFAULTS: dict[str, Any] = {
    "learning_rate": 2.5e-4,
    "num_envs": 4,
    "num_steps": 128,
    "anneal_lr": True,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "num_minibatches": 4,
    "update_epochs": 4,
    "clip_coef": 0.2,
    "clip_vloss": True,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "target_kl": None,
    "normalize": False,
    "hidden": [64, 64],
    "log_std": 0.0,
    "activation": "Tanh",
}
"""Those of CleanRL's ppo.py."""
LOG, SETTINGS = "log.jsonl", "settings.json"


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights."""
    module = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def mlp(inputs: int, args: SimpleNamespace, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers, and a last one with its own gain."""
    layers: list[nn.Module] = []
    for width in args.hidden:
        layers += [layer(inputs, width), getattr(nn, args.activation)()]
        inputs = width
    return nn.Sequential(*layers, layer(inputs, outputs, gain))


class Agent(nn.Module):
    """Actor and critic."""

    def __init__(self, envs: SyncVectorEnv, args: SimpleNamespace) -> None:
        super().__init__()
        space = envs.single_action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        self.actions = int(space.n) if self.discrete else int(np.prod(space.shape))
        inputs = int(np.prod(envs.single_observation_space.shape))
        self.actor = mlp(inputs, args, self.actions, 0.01)
        self.critic = mlp(inputs, args, 1, 1.0)
        self.dropout = nn.Dropout(args.faults.get("dropout", 0.0))
        if not self.discrete:
            self.log_std = nn.Parameter(torch.full((1, self.actions), float(args.log_std)))

    def policy(self, obs: Tensor, temperature: float = 1.0) -> Any:
        """The distribution of actions."""
        out = self.dropout(self.actor(obs))
        if self.discrete:
            return Categorical(logits=out / temperature)
        return Normal(out, self.log_std.expand_as(out).exp())

    def judge(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of actions."""
        policy = self.policy(obs)
        log_prob, entropy = policy.log_prob(action), policy.entropy()
        return (log_prob, entropy) if self.discrete else (log_prob.sum(1), entropy.sum(1))


def make_env(env_id: str, args: SimpleNamespace) -> Any:
    """One environment, wrapped as CleanRL does."""
    env: Any = wrap(gym.make(env_id), args.inject, INSIDE)
    env = gym.wrappers.RecordEpisodeStatistics(env)
    if isinstance(env.action_space, gym.spaces.Box):
        env = gym.wrappers.ClipAction(env)
    env = wrap(env, args.inject, OUTSIDE)
    if args.normalize:
        env = gym.wrappers.NormalizeObservation(env)
        space = env.observation_space
        env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), space)
        env = gym.wrappers.NormalizeReward(env, gamma=args.gamma)
        env = gym.wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))
    return env


class Trainer:
    """One training."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.args = args = SimpleNamespace(**(DEFAULTS | job["settings"]))
        args.inject = [(name, value) for name, value in job["inject"]]
        self.faults = args.faults = dict(args.inject)
        torch.manual_seed(job["seed"])
        np.random.seed(job["seed"])  # noqa: NPY002
        late = "autoreset_late" in self.faults
        mode = AutoresetMode.NEXT_STEP if late else AutoresetMode.SAME_STEP
        makers = [lambda: make_env(job["env"], args)] * args.num_envs
        self.envs = SyncVectorEnv(makers, autoreset_mode=mode)
        self.agent = Agent(self.envs, args)
        self.actor = copy.deepcopy(self.agent)
        self.optimizer = self.make_optimizer()
        lead = (args.num_steps, args.num_envs)
        self.obs = torch.zeros(lead + self.envs.single_observation_space.shape)
        self.actions = torch.zeros(lead + self.envs.single_action_space.shape)
        self.log_probs, self.rewards, self.dones, self.values = (
            torch.zeros(lead) for _ in range(4)
        )
        first = self.envs.reset(seed=job["seed"])[0]
        self.next_obs = torch.as_tensor(first, dtype=torch.float32)
        self.next_done = torch.zeros(args.num_envs)
        self.steps, self.total = 0, int(job["steps"])
        self.episodes: list[tuple[float, float]] = []
        self.file = (folder / LOG).open("w")

    def make_optimizer(self) -> torch.optim.Adam:
        """Adam over what learns."""
        agent, args, faults = self.agent, self.args, self.faults
        if "dead_units" in faults:
            for module in (*agent.actor[:-1], *agent.critic[:-1]):
                if isinstance(module, nn.Linear):
                    nn.init.constant_(module.bias, -float(faults["dead_units"]))
        if "actor_frozen" in faults:
            agent.actor.requires_grad_(False)
        learned = copy.deepcopy(agent) if "optimizer_elsewhere" in faults else agent
        critic = [p for name, p in learned.named_parameters() if name.startswith("critic")]
        others = [p for name, p in learned.named_parameters() if not name.startswith("critic")]
        rate = args.learning_rate
        groups = [
            {"params": others, "lr": rate, "times": 1.0},
            {"params": critic, "lr": rate, "times": faults.get("critic_rate", 1.0)},
        ]
        return torch.optim.Adam(groups, eps=1e-5)

    def train(self) -> None:
        """Collect and update until the steps are done."""
        args, batch = self.args, self.args.num_envs * self.args.num_steps
        updates = max(1, self.total // batch)
        for update in range(updates):
            left = 1.0 - update / updates if args.anneal_lr else 1.0
            if "rate_zero" in self.faults and left < 1.0 - self.faults["rate_zero"]:
                left = 0.0
            for group in self.optimizer.param_groups:
                group["lr"] = left * args.learning_rate * group["times"]
            self.collect()
            if update % int(self.faults.get("stale", 1)) == 0:
                self.actor.load_state_dict(self.agent.state_dict())
            self.log(self.update() | {"charts/learning_rate": left * args.learning_rate})
        self.file.close()
        self.envs.close()

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions, and say with which log-probs they are stored."""
        faults, actor = self.faults, self.actor if "stale" in self.faults else self.agent
        actor.eval()
        policy = actor.policy(obs)
        action = policy.sample()
        log_prob = policy.log_prob(action)
        if "temperature" in faults:
            action = actor.policy(obs, faults["temperature"]).sample()
            log_prob = policy.log_prob(policy.sample())
        if "processed" in faults:
            drawn = actor.policy(obs, faults["processed"])
            action = drawn.sample()
            log_prob = drawn.log_prob(action)
        if "epsilon_greedy" in faults:
            stray = torch.rand(len(action)) < faults["epsilon_greedy"]
            action = torch.where(stray, torch.randint_like(action, actor.actions), action)
        return action, log_prob if actor.discrete else log_prob.sum(1)

    @torch.no_grad()
    def collect(self) -> None:
        """Fill the rollout."""
        for t in range(self.args.num_steps):
            self.steps += self.args.num_envs
            self.obs[t], self.dones[t] = self.next_obs, self.next_done
            self.values[t] = self.agent.critic(self.next_obs).flatten()
            self.actions[t], self.log_probs[t] = self.act(self.next_obs)
            action = self.actions[t].long() if self.agent.discrete else self.actions[t]
            obs, reward, terminated, truncated, infos = self.envs.step(action.numpy())
            self.next_done = torch.as_tensor(terminated | truncated, dtype=torch.float32)
            self.rewards[t] = torch.as_tensor(reward)
            self.next_obs = torch.as_tensor(obs, dtype=torch.float32)
            self.note(infos)
        if "misaligned" in self.faults:
            self.actions = self.actions.roll(1, 0)

    def note(self, infos: dict[str, Any]) -> None:
        """Remember episodes that ended."""
        infos = infos.get("final_info", infos)
        if "episode" in infos:
            over = infos["_episode"]
            ends = zip(infos["episode"]["r"][over], infos["episode"]["l"][over], strict=True)
            self.episodes += [(float(r), float(length)) for r, length in ends]

    @torch.no_grad()
    def advantages(self) -> Tensor:
        """GAE, as CleanRL writes it."""
        args, ends = self.args, "never_ends" not in self.faults
        result, last = torch.zeros_like(self.rewards), torch.zeros(args.num_envs)
        value, going = self.agent.critic(self.next_obs).flatten(), 1.0 - self.next_done * ends
        for t in reversed(range(args.num_steps)):
            delta = self.rewards[t] + args.gamma * value * going - self.values[t]
            last = delta + args.gamma * args.gae_lambda * going * last
            result[t], value, going = last, self.values[t], 1.0 - self.dones[t] * ends
        return -result if "advantage_sign" in self.faults else result

    def update(self) -> dict[str, float]:
        """Learn from the rollout; returns metrics of the last minibatch."""
        args, agent = self.args, self.agent
        agent.train()
        advantages = self.advantages()
        b_obs, b_actions = self.obs.flatten(0, 1), self.actions.flatten(0, 1)
        b_actions = b_actions.long() if agent.discrete else b_actions
        b_log_probs, b_values = self.log_probs.flatten(), self.values.flatten()
        b_advantages = advantages.flatten()
        b_returns = b_advantages + b_values
        rows, size = np.arange(len(b_obs)), len(b_obs) // args.num_minibatches
        clip_fractions, told = [], {}
        for _ in range(args.update_epochs):
            np.random.shuffle(rows)  # noqa: NPY002
            for start in range(0, len(rows), size):
                at = rows[start : start + size]
                batch = (b_obs[at], b_actions[at], b_log_probs[at], b_advantages[at])
                loss, told, outside = self.loss(*batch, b_returns[at], b_values[at])
                clip_fractions.append(outside)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                self.optimizer.step()
            stop = told["losses/old_approx_kl" if "k1_stop" in self.faults else "losses/approx_kl"]
            if args.target_kl is not None and stop > args.target_kl:
                break
        spread = float(b_returns.var())
        explained = 1.0 - float((b_returns - b_values).var()) / spread if spread else float("nan")
        told["losses/clipfrac"] = float(np.mean(clip_fractions))
        return told | {"losses/explained_variance": explained}

    def loss(
        self, obs: Tensor, actions: Tensor, old: Tensor, gain: Tensor, returns: Tensor, was: Tensor
    ) -> tuple[Tensor, dict[str, float], float]:
        """The loss of a minibatch, with its metrics and the share outside of the clip."""
        args, faults = self.args, self.faults
        log_prob, entropy = self.agent.judge(obs, actions)
        log_ratio = log_prob - old
        ratio = log_ratio.exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = torch.max(-gain * ratio, -gain * clipped).mean()
        value = self.agent.critic(obs).flatten()
        v_loss = (value - returns) ** 2
        if args.clip_vloss:
            near = was + (value - was).clamp(-args.clip_coef, args.clip_coef)
            v_loss = torch.max(v_loss, (near - returns) ** 2)
        v_loss, bonus = 0.5 * v_loss.mean(), entropy.mean()
        if "entropy_detached" in faults:
            bonus = bonus.detach()
        loss = pg_loss - args.ent_coef * bonus + v_loss * args.vf_coef
        told = {
            "losses/value_loss": v_loss.item(),
            "losses/policy_loss": pg_loss.item(),
            "losses/entropy": bonus.item(),
            "losses/old_approx_kl": (-log_ratio).mean().item(),
            "losses/approx_kl": ((ratio - 1) - log_ratio).mean().item(),
        }
        return loss, told, ((ratio - 1.0).abs() > args.clip_coef).float().mean().item()

    def log(self, row: dict[str, float]) -> None:
        """Write what CleanRL writes to TensorBoard as a line of JSON, with faults of logging."""
        faults = self.faults
        for name, key in LOGGED.items():
            if name in faults:
                row[key] = row[key] * float(faults[name])
        if self.episodes:
            row["charts/episodic_return"] = float(np.mean([r for r, _ in self.episodes]))
            row["charts/episodic_length"] = float(np.mean([n for _, n in self.episodes]))
            self.episodes = []
        step = self.steps
        if "counter_restarts" in faults and step > self.total * faults["counter_restarts"]:
            step -= int(self.total * faults["counter_restarts"])
        self.file.write(json.dumps({"global_step": step, **row}) + "\n")


LOGGED = {
    "kl_zero": "losses/approx_kl",
    "kl_sum": "losses/approx_kl",
    "kl_sign": "losses/approx_kl",
    "clip_sum": "losses/clipfrac",
    "entropy_sum": "losses/entropy",
    "entropy_sign": "losses/entropy",
}
"""Metrics that are logged with a factor, by the name of the fault."""


def run(job: dict[str, Any], folder: Path) -> None:
    """Train as a job says."""
    torch.set_num_threads(1)
    trainer = Trainer(job, folder)
    trainer.train()
    args = vars(trainer.args)
    known = {k: args[k] for k in DEFAULTS if isinstance(args[k], int | float)}
    known |= {"env_id": job["env"], "seed": job["seed"], "total_timesteps": job["steps"]}
    known["minibatch_size"] = args["num_envs"] * args["num_steps"] // args["num_minibatches"]
    (folder / SETTINGS).write_text(json.dumps(known))


if __name__ == "__main__":
    serve(run)
