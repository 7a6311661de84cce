"""Policies act without their environment, bit for bit as evaluations do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from keel.config import from_dict
from keel.envs import env_seeds, make_envs
from keel.envs.names import named_maker
from keel.errors import InputError
from keel.training.policy import Policy, evaluate_policy, open_policy
from keel.training.runner import start

pytestmark = pytest.mark.filterwarnings("ignore::keel.training.evaluation.EvaluationWarning")
TOYS = Path(__file__).parents[1] / "envs"
LONGEST = 1000
"""Steps after which an episode is cut, here and in the evaluation beside it."""
SMALL = {
    "total_steps": 256,
    "rollout_steps": 32,
    "envs": {"num": 2, "backend": "sync"},
    "network": {"hidden": [8]},
    "region": {"minibatch": 32, "epochs": 1},
    "evaluation": {"episodes": 1, "max_episode_steps": 50},
    "compile": "off",
}


class Rooms(gymnasium.Env[Any, Any]):
    """A picture, a room counted from 5, numbers in a matrix; actions from 3, with a mask."""

    observation_space = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (9, 8, 3), np.uint8),
            "inner": spaces.Tuple([spaces.Discrete(4, start=5), spaces.Box(-1, 1, (1, 2))]),
        }
    )
    action_space = spaces.Discrete(3, start=3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self.seen(), {"action_mask": self.mask()}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        assert self.mask()[action - 3]
        self.time += 1
        reward = float(action) * self.np_random.random()
        return self.seen(), reward, self.time == 9, False, {"action_mask": self.mask()}

    def seen(self) -> Any:
        picture = self.np_random.integers(0, 256, (9, 8, 3), np.uint8)
        numbers = self.np_random.uniform(-1, 1, (1, 2)).astype(np.float32)
        return {"picture": picture, "inner": (5 + self.time % 4, numbers)}

    def mask(self) -> np.ndarray:
        return np.arange(3) != self.time % 3


def trained(root: Path, env: str, **changes: Any) -> Policy:
    config = from_dict({**SMALL, "env": env})
    *_, last = start(from_dict(changes, config), root, "run")
    return open_policy(last.path)


def played(policy: Policy, env: Any, seed: int, deterministic: bool) -> float:
    """Return the return of one episode, in the loop of a user."""
    obs, info = env.reset(seed=env_seeds(seed, 1)[0])
    rng, state, total = np.random.default_rng(seed), None, 0.0
    for _ in range(LONGEST):
        action, state = policy.act(obs, state, deterministic, mask=info.get("action_mask"), rng=rng)
        obs, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        if terminated or truncated:
            break
    return total


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "cartpole": ("CartPole-v1", {}),
    "halfcheetah": ("HalfCheetah-v5", {"envs": {"normalize_obs": True}}),
    "squashed": ("Pendulum-v1", {"network": {"squash": True}}),
    "gru": ("CartPole-v1", {"network": {"recurrent": "both", "recurrent_size": 8}}),
    "rooms": (f"{__name__}:Rooms", {"network": {"features": 8, "cnn": "small"}}),
    "masked": ("env_toys:MaskedInObservation", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_ones_own_gives_the_returns_of_an_evaluation(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOYS)
    name, changes = KINDS[kind]
    policy = trained(tmp_path, name, **changes)
    maker = named_maker(name, {})
    env = gymnasium.make(name) if maker is None else maker.make()
    for seed, deterministic in ((1, True), (2, False)):
        score = evaluate_policy(
            policy, episodes=1, seed=seed, deterministic=deterministic, max_episode_steps=LONGEST
        )
        assert [played(policy, env, seed, deterministic)] == score.returns


def test_a_batch_acts_as_an_evaluation_in_as_many_environments(tmp_path: Path) -> None:
    """Three episodes of different lengths; one that has ended is acted for, and not counted."""
    policy = trained(tmp_path, "CartPole-v1", network={"recurrent": "actor", "recurrent_size": 4})
    score = evaluate_policy(policy, episodes=3, seed=5, max_episode_steps=500)
    envs = [gymnasium.make("CartPole-v1") for _ in range(3)]
    obs = [env.reset(seed=seed)[0] for env, seed in zip(envs, env_seeds(5, 3), strict=True)]
    state, returns, running = None, np.zeros(3), np.ones(3, bool)
    while running.any():
        actions, state = policy.act(np.stack(obs), state)
        for i, env in enumerate(envs):
            if running[i]:
                obs[i], reward, ended, cut, _ = env.step(actions[i])
                returns[i] += float(reward)
                running[i] = not (ended or cut)
    assert returns.tolist() == score.returns
    assert len(set(score.lengths)) > 1


def test_two_agents_act_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOYS)
    changes = {"agents": {"critic": "own"}, "total_steps": 128}
    for number, name in enumerate(("Countdown", "Stated")):
        policy = trained(tmp_path / str(number), f"parallel_toys:{name}", **changes)
        maker = named_maker(f"parallel_toys:{name}", {})
        assert maker is not None
        env = maker.make()
        for seed, deterministic in ((1, True), (2, False)):
            score = evaluate_policy(policy, episodes=1, seed=seed, deterministic=deterministic)
            obs, info = env.reset(seed=env_seeds(seed, 1)[0])
            rng, total = np.random.default_rng(seed), dict.fromkeys(env.possible_agents, 0.0)
            while env.agents:
                mask = {a: x["action_mask"] for a, x in info.items() if x}
                here = {agent: obs[agent] for agent in env.agents}
                actions, _ = policy.act(here, None, deterministic, mask=mask, rng=rng)
                assert set(actions) == set(env.agents)
                obs, rewards, *_, info = env.step(actions)
                total = {agent: x + rewards.get(agent, 0.0) for agent, x in total.items()}
            assert total == {agent: x[0] for agent, x in score.agents.items()}


def test_agents_act_as_arrays_with_an_axis_of_their_own(tmp_path: Path) -> None:
    policy = trained(tmp_path, "land", rollout_steps=60, region={"minibatch": 30})
    envs = make_envs("land", 2, seed=0)
    obs = envs.reset(3)
    actions, state = policy.act(obs)
    assert actions.shape == (2, len(envs.agents))
    assert state is None
    one, _ = policy.act({key: x[0] for key, x in obs.items()})
    assert (one == actions[0]).all()
    with pytest.raises(InputError, match="masks"):
        policy.act({key: x for key, x in obs.items() if key != "action_mask"})


def test_one_observation_gives_one_action_and_a_batch_a_batch(tmp_path: Path) -> None:
    policy = trained(tmp_path, "Pendulum-v1")
    one = np.array([1.0, 0.0, 8.0])
    action, state = policy.act(one)
    assert action.shape == (1,)
    assert action.dtype == np.float32
    assert state is None
    batch, _ = policy.act(np.stack([one, -one]))
    assert batch.shape == (2, 1)
    sampled = [policy.act(one, deterministic=False)[0] for _ in range(9)]
    assert all(np.abs(x) <= 2.0 for x in sampled)  # clipped, as the environment's bounds say
    again = open_policy(policy.path, seed=0)
    assert sampled == [again.act(one, deterministic=False)[0] for _ in range(9)]
    other = open_policy(policy.path, seed=1)
    assert sampled != [other.act(one, deterministic=False)[0] for _ in range(9)]
    with pytest.raises(InputError, match=r"expected shape \[3\] or \[N, 3\], got \[4\]"):
        policy.act(np.zeros(4))
    with pytest.raises(InputError, match="state: is not that of 1 observations"):
        policy.act(one, {"memory/actor": np.zeros((1, 4))})


def test_episodes_begin_where_it_is_said(tmp_path: Path) -> None:
    policy = trained(tmp_path, "CartPole-v1", network={"recurrent": "both", "recurrent_size": 8})
    obs = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    _, fresh = policy.act(obs)
    _, second = policy.act(obs, fresh)
    _, mixed = policy.act(obs, fresh, episode_starts=[True, False])
    assert fresh is not None
    assert second is not None
    assert mixed is not None
    for key in fresh:
        assert (mixed[key][0] == fresh[key][0]).all()
        assert (mixed[key][1] == second[key][1]).all()
        assert not (second[key] == fresh[key]).all()
    with pytest.raises(InputError, match="episode_starts: expected 2, got 3"):
        policy.act(obs, fresh, episode_starts=[True] * 3)


def test_a_mask_that_is_missing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOYS)
    policy = trained(tmp_path, "env_toys:Masked")
    obs = np.zeros(2, np.float32)
    with pytest.raises(InputError, match="says which actions are legal"):
        policy.act(obs)
    with pytest.raises(InputError, match=r"mask: expected shape \[1, 2\], got \[3\]"):
        policy.act(obs, mask=[1, 0, 1])
    assert policy.act(obs, mask=[0, 1])[0] == 1
    assert policy.act(obs, mask=[1, 0])[0] == 0


def test_acting_imports_nothing_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy acts on another machine, where there is no environment."""
    monkeypatch.syspath_prepend(TOYS)
    policy = trained(tmp_path, "env_toys:MaskedInObservation")
    folder = policy.path / "checkpoints" / "00000256"
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from keel.training.policy import open_policy\n"
        f"policy = open_policy(Path({str(folder)!r}))\n"
        "obs = {'observation': np.zeros(2), 'action_mask': [0, 1]}\n"
        "print(policy.act(obs)[0], policy.step, 'env_toys' in sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.split() == ["1", "256", "False"], shown.stderr
