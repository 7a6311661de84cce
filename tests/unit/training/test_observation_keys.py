"""Observations may call their parts what they like; where a name is taken, one line says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from keel.config import from_dict
from keel.envs import BadStepError, VectorEnvs, make_envs
from keel.errors import InputError
from keel.training.runner import resume, start
from keel.training.session import train


class Named(gymnasium.Env[Any, Any]):
    """A walk of ten steps that is observed in two parts, one of which has the name `key`."""

    action_space = spaces.Discrete(2)

    def __init__(self, key: str, grouped: bool = False) -> None:
        self.key, self.grouped = key, grouped
        box = spaces.Box(-10.0, 10.0, (1,), np.float32)
        self.observation_space = spaces.Dict({"place": box, key: spaces.Discrete(2)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time = 0, 0
        return self.seen()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place, self.time = self.place + 2 * int(action) - 1, self.time + 1
        obs, info = self.seen()
        return obs, float(self.place), self.time == 10, False, info

    def seen(self) -> tuple[dict[str, Any], dict[str, Any]]:
        obs = {"place": np.float32([self.place]), self.key: self.time % 2}
        return obs, {"group": 0} if self.grouped else {}


gymnasium.register("keel/NamedParts-v0", Named)


def config(key: str, more: str = "", **parts: Any) -> dict[str, Any]:
    return {
        "env": "keel/NamedParts-v0",
        "total_steps": 128,
        "rollout_steps": 32,
        "envs": {"num": 2, "backend": "sync", "options": f"key={key}{more}"},
        "network": {"hidden": [8], "memory_size": 4},
        "region": {"minibatch": 32, "epochs": 2},
        "evaluation": {"episodes": 2},
        "compile": "off",
        **parts,
    }


@pytest.mark.parametrize("algo", ["ppo", "trpo"])
@pytest.mark.parametrize("memory", ["none", "both"])
def test_a_part_called_starts_is_a_part_like_any_other(algo: str, memory: str) -> None:
    """The name of a part has no influence on what is learned."""
    network = {"hidden": [8], "memory": memory, "memory_size": 4}
    losses = []
    for key in ("starts", "stays"):
        settings = config(key, algo=algo, network=network)
        losses.append([x.metrics["train/value_loss"] for x in train(from_dict(settings))])
    assert losses[0] == losses[1]


def test_a_run_that_remembers_is_resumed_with_such_a_part(tmp_path: Path) -> None:
    network = {"hidden": [8], "memory": "both", "memory_size": 4}
    settings = from_dict(config("starts", network=network))
    (*_, last) = start(settings, tmp_path, "run")
    longer = from_dict({"total_steps": 192}, settings)
    with pytest.warns(match="cannot save their state"):
        (*_, last) = resume(last.path, longer)
    assert last.steps == 192


def test_a_part_called_group_is_not_taken_for_a_group() -> None:
    settings = from_dict(config("group", advantage={"normalize": "group"}))
    with pytest.raises(InputError) as error:
        list(train(settings))
    assert str(error.value) == (
        "advantage.normalize group: observation 'group': Keel has a key of that name for itself; "
        "rename it"
    )


def test_a_part_and_an_info_called_group_do_not_overwrite_each_other() -> None:
    message = r"info\['group'\]: the observation has a part of that name, too; rename one of them"
    kwargs = {"key": "group", "grouped": True}
    envs = make_envs("keel/NamedParts-v0", 2, backend="sync", seed=0, env_kwargs=kwargs)
    with pytest.raises(BadStepError, match=message):
        envs.reset(0)
    vector = VectorEnvs(SyncVectorEnv([lambda: Named("group", grouped=True)] * 2))
    with pytest.raises(BadStepError, match=message):
        vector.reset(0)
