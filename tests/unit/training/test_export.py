"""ONNX files that do what the policy does, or are not there."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.config import Config, Network
from keel.envs import MissingExtraError, ObsNormalizer
from keel.envs.space_data import Interface
from keel.errors import InputError
from keel.networks.build import build_agent
from keel.training import export
from keel.training.export import ExportError, export_onnx, run_onnx
from keel.training.policy import Policy
from keel.types import EPISODE_STARTS

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
MIXED = spaces.Dict({"kind": spaces.Discrete(4), "place": spaces.Box(-9.0, 9.0, (2,), np.float32)})
PIXELS = spaces.Box(0, 255, (4, 44, 44), np.uint8)
REACH = spaces.Box(np.float32([-0.1, -2.0]), np.float32([0.3, 1.0]))

CASES = {
    "discrete": (BOX, spaces.Discrete(3), Network(hidden=(16,)), False),
    "continuous": (BOX, REACH, Network(hidden=(16,), log_std=-0.7), False),
    "squashed": (BOX, REACH, Network(hidden=(16,), squash=True, activation="relu"), False),
    "choices, masked": (MIXED, spaces.MultiDiscrete([3, 2]), Network(hidden=(8,)), True),
    "switches": (MIXED, spaces.MultiBinary(4), Network(kind="decoupled", features=8), False),
    "remembering": (BOX, spaces.Discrete(3), Network(recurrent="both", recurrent_size=8), False),
    "remembering critic": (BOX, REACH, Network(recurrent="critic", recurrent_size=8), False),
    "pixels": (PIXELS, spaces.Discrete(4), Network(features=16), False),
}


def policy(name: str) -> Policy:
    """Random weights large enough to reach the bounds, and statistics far from 0 and 1."""
    observation, action, network, masked = CASES[name]
    agent = build_agent(observation, action, network, seed=0)
    noise = torch.randn(agent.initial.shape, generator=torch.Generator().manual_seed(1))
    params = agent.initial + (0.02 if observation is PIXELS else 0.3) * noise
    if observation is PIXELS:  # random frames are alike: let the logits be near each other
        params[:, agent.layout.slice_of("actor.layers.0.bias")] = 0.0
    normalizer = ObsNormalizer.for_space(observation)
    rng = np.random.default_rng(2)
    batch = {
        key: rng.normal(5.0, 0.4, (50, 1, *known.mean.shape)).astype(np.float32)
        for key, known in normalizer.moments.items()
    }
    return Policy(
        agent=agent,
        params=params,
        normalizer=normalizer.absorb(batch).settle(0.9),
        config=Config(),
        step=7,
        path=Path("runs/toy/seed-0"),
        interface=Interface(observation, action, (), masked),
    )


def observations(of: Policy, rows: int) -> dict[str, np.ndarray]:
    """Around the normalizer's mean, and beyond its clip."""
    obs = export.random_observations(of, rows, seed=3)
    for key in of.normalizer.moments:
        obs[key] = (5.0 + 0.5 * obs[key]).astype(np.float32)
        obs[key][0] += 100.0
    return obs


REMEMBERING = ("remembering", "remembering critic")


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_remembered_sequence_is_the_same_step_by_step(name: str, tmp_path: Path) -> None:
    """The file, given its own memory back, against the whole sequence in one pass."""
    original = policy(name)
    written = export_onnx(original, tmp_path / "policy.onnx")
    agent, steps = original.agent, 6
    rows = [export.random_observations(original, 4, seed=t) for t in range(steps)]
    seen = [original.normalizer.apply({"obs": row["obs"]})["obs"] for row in rows]
    sequence = {
        "obs": torch.from_numpy(np.stack(seen, 1)),
        EPISODE_STARTS: torch.zeros(4, steps, dtype=torch.bool),
        **{key: torch.zeros(4, size) for key, size in agent.hidden_state_sizes.items()},
    }
    output = agent.outputs(original.params, sequence, "actor").policy
    expected = agent.dist.params(output, None, 1.0)
    state = {"memory": np.zeros((4, 8), np.float32)} if name == "remembering" else {}
    assert ("next_memory" in written.outputs) == bool(state)
    for t in range(steps):
        action, second, *rest = run_onnx(written.path, {"obs": rows[t]["obs"], **state})
        state = {"memory": rest[0]} if rest else {}
        key = "logits" if name == "remembering" else "log_std"
        np.testing.assert_allclose(second, expected[key][:, t], atol=1e-4)
        if key == "log_std":
            mean = expected["mean"][:, t].numpy()
            np.testing.assert_allclose(action, mean.clip(REACH.low, REACH.high), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name not in REMEMBERING])
def test_the_file_acts_as_keel_does(name: str, tmp_path: Path) -> None:
    original = policy(name)
    written = export_onnx(original, tmp_path / "policy.onnx")
    assert written.difference < 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["policy.onnx"]

    obs = observations(original, 33)
    action, second = run_onnx(written.path, obs)
    seen = original.normalizer.apply(obs)
    agent, space = original.agent, original.action_space
    tree = {key: torch.from_numpy(x) for key, x in seen.items()}
    output = agent.outputs(original.params, tree, "actor").policy
    params = agent.dist.params(output, tree.get("action_mask"), 1.0)
    expected = agent.dist.to_env(agent.dist.mode(output.numpy(), seen.get("action_mask")))
    if isinstance(space, spaces.Box):
        assert written.outputs == ("action", "log_std")
        np.testing.assert_allclose(action, expected.clip(space.low, space.high), atol=1e-5)
        np.testing.assert_allclose(second, params["log_std"], atol=1e-6)
        assert ((action >= space.low) & (action <= space.high)).all()
        assert name == "squashed" or (action != expected).any(), "nothing was clipped: no test"
    else:
        assert written.outputs == ("action", "logits")
        np.testing.assert_allclose(second, params["logits"], atol=1e-4)
        np.testing.assert_array_equal(action, expected)
        assert len(np.unique(action, axis=0)) > 1
        assert len(np.unique(second, axis=0)) == 33


@pytest.mark.parametrize(
    ("key", "memory"),
    [("action", "none"), ("a.b", "none"), ("memory", "actor"), ("next_memory", "actor")],
)
def test_parts_of_an_observation_may_be_called_like_parts_of_the_file(
    key: str, memory: Any, tmp_path: Path
) -> None:
    observation = spaces.Dict({key: BOX, "x": spaces.Discrete(2)})
    network = Network(hidden=(8,), recurrent=memory, recurrent_size=4)
    agent = build_agent(observation, spaces.Discrete(3), network, seed=0)
    normalizer = ObsNormalizer.for_space(observation)
    interface = Interface(observation, spaces.Discrete(3), (), masked=False)
    original = Policy(agent, agent.initial, normalizer, Config(), 7, tmp_path, interface)
    written = export_onnx(original, tmp_path / "policy.onnx")
    name = key if key == "a.b" else f"obs/{key}"
    assert written.inputs == (name, "x", *(["memory"] if memory == "actor" else []))


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    onnx = importlib.import_module("onnx")
    written = export_onnx(policy("choices, masked"), tmp_path / "policy.onnx")
    assert written.inputs == ("kind", "place", "action_mask")
    model = onnx.load(written.path)
    props = {entry.key: entry.value for entry in model.metadata_props}
    assert props["env"] == "CartPole-v1"
    assert props["step"] == "7"
    assert [i.name for i in model.graph.input] == ["kind", "place", "action_mask"]
    assert [o.name for o in model.graph.output] == ["action", "logits"]
    assert {i.type.tensor_type.shape.dim[0].dim_param for i in model.graph.input} == {"batch"}


def test_a_file_that_differs_is_an_error_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(path: Path, obs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        action, logits = run_onnx(path, obs)
        return action, logits + np.float32(0.01)

    monkeypatch.setattr(export, "run_onnx", wrong)
    with pytest.raises(ExportError, match=r"differs from the policy by 0\.01"):
        export_onnx(policy("discrete"), tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


def test_another_discrete_action_counts_by_its_probability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(path: Path, obs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        action, logits = run_onnx(path, obs)
        return (action + 1) % 3, logits

    monkeypatch.setattr(export, "run_onnx", wrong)
    with pytest.raises(ExportError, match="differs"):
        export_onnx(policy("discrete"), tmp_path / "policy.onnx")


def test_a_missing_extra_is_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_runtime(name: str) -> object:
        raise ImportError(name)

    exported = policy("discrete")
    monkeypatch.setattr(export.importlib, "import_module", no_runtime)
    with pytest.raises(MissingExtraError, match=r'pip install "keel-rl\[onnx\]"'):
        export_onnx(exported, tmp_path / "policy.onnx")


def test_a_missing_folder_is_an_error_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder .* does not exist"):
        export_onnx(policy("discrete"), tmp_path / "nowhere" / "policy.onnx")
