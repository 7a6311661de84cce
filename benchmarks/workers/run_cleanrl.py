"""A single-file PPO in the manner of CleanRL: SyncVectorEnv, torch eager, one Adam.

Its habits are kept (per-minibatch advantage normalization, clipped value loss, orthogonal weights,
Adam with ε = 1e-5, per-environment normalizing wrappers); the code is our own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from common import Clock, answer, job
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical, Normal


def make_env(work: SimpleNamespace) -> Callable[[], gym.Env[Any, Any]]:
    def thunk() -> gym.Env[Any, Any]:
        if work.pixels:
            import ale_py
            from stable_baselines3.common import atari_wrappers as atari

            gym.register_envs(ale_py)
            env: Any = gym.wrappers.RecordEpisodeStatistics(gym.make(work.peer_env))
            for wrapper in (
                atari.NoopResetEnv,
                atari.MaxAndSkipEnv,
                atari.EpisodicLifeEnv,
                atari.FireResetEnv,
                atari.ClipRewardEnv,
            ):
                env = wrapper(env)
            env = gym.wrappers.ResizeObservation(env, (84, 84))
            env = gym.wrappers.GrayscaleObservation(env)
            return gym.wrappers.FrameStackObservation(env, 4)
        env = gym.make(work.peer_env)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if isinstance(env.action_space, gym.spaces.Box):
            env = gym.wrappers.ClipAction(env)
        if work.normalize:
            env = gym.wrappers.NormalizeObservation(env)
            env = gym.wrappers.TransformObservation(
                env, lambda obs: np.clip(obs, -10, 10), env.observation_space
            )
            env = gym.wrappers.NormalizeReward(env, gamma=work.gamma)
            env = gym.wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))
        return env

    return thunk


def layer(module: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def mlp(inputs: int, hidden: list[int], outputs: int, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [layer(nn.Linear(inputs, width)), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, layer(nn.Linear(inputs, outputs), gain))


class Agent(nn.Module):
    def __init__(self, envs: SyncVectorEnv, work: SimpleNamespace) -> None:
        super().__init__()
        space = envs.single_action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        outputs = int(space.n) if self.discrete else int(np.prod(space.shape))
        self.pixels = work.pixels
        if work.pixels:
            self.trunk = nn.Sequential(
                layer(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(),
                layer(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
                layer(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
                nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
            )  # fmt: skip
            self.actor, self.critic = mlp(512, [], outputs, 0.01), mlp(512, [], 1, 1.0)
        else:
            self.trunk = nn.Identity()
            inputs = int(np.prod(envs.single_observation_space.shape))
            self.actor = mlp(inputs, work.hidden, outputs, 0.01)
            self.critic = mlp(inputs, work.hidden, 1, 1.0)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(1, outputs))

    def features(self, obs: Tensor) -> Tensor:
        return self.trunk(obs / 255.0) if self.pixels else obs

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(self.features(obs))

    def act(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        x = self.features(obs)
        out = self.actor(x)
        if self.discrete:
            policy: Any = Categorical(logits=out)
        else:
            policy = Normal(out, self.log_std.expand_as(out).exp())
        action = policy.sample() if action is None else action
        log_prob, entropy = policy.log_prob(action), policy.entropy()
        if not self.discrete:
            log_prob, entropy = log_prob.sum(1), entropy.sum(1)
        return action, log_prob, entropy, self.critic(x)


class Storage:
    def __init__(self, envs: SyncVectorEnv, work: SimpleNamespace) -> None:
        lead = (work.rollout_steps, work.num_envs)
        self.obs = torch.zeros(lead + envs.single_observation_space.shape)
        self.actions = torch.zeros(lead + envs.single_action_space.shape)
        self.log_probs, self.rewards, self.dones, self.values = (
            torch.zeros(lead) for _ in range(4)
        )


def collect(
    envs: SyncVectorEnv, agent: Agent, store: Storage, obs: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    for t in range(len(store.rewards)):
        store.obs[t], store.dones[t] = obs, done
        with torch.no_grad():
            action, log_prob, _, value = agent.act(obs)
        store.values[t] = value.flatten()
        store.actions[t], store.log_probs[t] = action, log_prob
        seen, reward, terminated, truncated, _ = envs.step(action.numpy())
        done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        store.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(seen, dtype=torch.float32)
    return obs, done


@torch.no_grad()
def advantages(
    agent: Agent, store: Storage, obs: Tensor, done: Tensor, work: SimpleNamespace
) -> Tensor:
    result, last = torch.zeros_like(store.rewards), torch.zeros(work.num_envs)
    next_value, going = agent.value(obs).flatten(), 1.0 - done
    for t in reversed(range(work.rollout_steps)):
        delta = store.rewards[t] + work.gamma * next_value * going - store.values[t]
        last = delta + work.gamma * work.lam * going * last
        result[t], next_value, going = last, store.values[t], 1.0 - store.dones[t]
    return result


def update(
    agent: Agent, optimizer: torch.optim.Adam, store: Storage, gain: Tensor, work: SimpleNamespace
) -> None:
    flat = [
        x.flatten(0, 1) for x in (store.obs, store.actions, store.log_probs, store.values, gain)
    ]
    b_obs, b_actions, b_log_probs, b_values, b_advantages = flat
    b_returns = b_advantages + b_values
    rows = np.arange(len(b_obs))
    clip_fractions: list[float] = []
    for _ in range(work.epochs):
        np.random.shuffle(rows)  # noqa: NPY002
        for start in range(0, len(rows), work.minibatch):
            at = rows[start : start + work.minibatch]
            actions = b_actions.long()[at] if agent.discrete else b_actions[at]
            _, log_prob, entropy, value = agent.act(b_obs[at], actions)
            log_ratio = log_prob - b_log_probs[at]
            ratio = log_ratio.exp()
            with torch.no_grad():
                _ = (-log_ratio).mean(), ((ratio - 1) - log_ratio).mean()
                outside = ((ratio - 1.0).abs() > work.clip).float()
                clip_fractions.append(outside.mean().item())
            mb = b_advantages[at]
            mb = (mb - mb.mean()) / (mb.std() + 1e-8)
            clipped = torch.clamp(ratio, 1 - work.clip, 1 + work.clip)
            policy_loss = torch.max(-mb * ratio, -mb * clipped).mean()
            value, old = value.flatten(), b_values[at]
            near = old + torch.clamp(value - old, -work.clip, work.clip)
            errors = ((value - b_returns[at]) ** 2, (near - b_returns[at]) ** 2)
            value_loss = 0.5 * torch.max(*errors).mean()
            bonus = work.entropy_coef * entropy.mean()
            loss = policy_loss - bonus + work.value_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), work.max_grad_norm)
            optimizer.step()


def main() -> None:
    work = job()
    torch.set_num_threads(work.threads)
    torch.manual_seed(work.seed)
    np.random.seed(work.seed)  # noqa: NPY002
    envs = SyncVectorEnv(
        [make_env(work) for _ in range(work.num_envs)], autoreset_mode=AutoresetMode.SAME_STEP
    )
    agent, store, clock = Agent(envs, work), Storage(envs, work), Clock(work)
    optimizer = torch.optim.Adam(agent.parameters(), lr=work.learning_rate, eps=1e-5)
    obs = torch.as_tensor(envs.reset(seed=work.seed)[0], dtype=torch.float32)
    done = torch.zeros(work.num_envs)
    for _ in range(work.warmup + work.iterations):
        clock.tick()
        obs, done = collect(envs, agent, store, obs, done)
        update(agent, optimizer, store, advantages(agent, store, obs, done, work), work)
    clock.tick()
    envs.close()
    answer(clock, ["torch", "gymnasium"])


if __name__ == "__main__":
    main()
