"""The state of Gymnasium environments as arrays and JSON, for a bit-exact continuation.

Known to be complete for Gymnasium's classic control (its CartPole vector environment included) and
MuJoCo environments under their standard wrappers; for anything else the answer is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from keel.envs.protocol import Saved
from keel.errors import InputError

Env = gymnasium.Env[Any, Any]

CLASSICS = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": ("steps_beyond_terminated",),
    "gymnasium.envs.classic_control.pendulum:PendulumEnv": (),
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": (),
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": (),
    "gymnasium.envs.classic_control.acrobot:AcrobotEnv": (),
}
"""What these environments keep beside `state`; anything else in them is constant or for drawing."""

CARTPOLES = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"

DERIVED = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos"),
    *("site_xmat", "subtree_com", "cinert", "cvel", "cfrc_ext", "qfrc_actuator", "qacc"),
    *("actuator_force", "sensordata", "ten_length", "ten_velocity"),
)
"""MuJoCo quantities that environments read *before* they step; after `mj_step` they lag one substep
behind the state, so they cannot be computed from it."""


def save_envs(envs: Sequence[Env]) -> Saved | None:
    """Return the state of all environments, or None if one of them cannot be saved."""
    arrays: dict[str, np.ndarray] = {}
    data: list[dict[str, Any]] = []
    for index, env in enumerate(envs):
        state = _save_env(env)
        if state is None:
            return None
        arrays |= {f"env{index}.{name}": array for name, array in state[0].items()}
        data.append(state[1])
    return arrays, {"envs": data}


def load_envs(
    envs: Sequence[Env], arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]
) -> None:
    """Restore what `save_envs` returned, in environments made in the same way."""
    saved = data["envs"]
    if len(saved) != len(envs):
        raise InputError(f"the state holds {len(saved)} environments, there are {len(envs)} here")
    for index, (env, state) in enumerate(zip(envs, saved, strict=True)):
        prefix = f"env{index}."
        env_arrays = {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
        _load_env(env, env_arrays, state)


def save_vector(venv: Any) -> Saved | None:
    """Return the state of Gymnasium's vectorised CartPole; None for any other environment."""
    if _name(venv) != CARTPOLES or venv.state is None:
        return None
    arrays = {"state": venv.state.copy(), "steps": venv.steps.copy()}
    arrays["prev_done"] = venv.prev_done.copy()
    random = _save_random(venv)
    bounds = [float(venv.low), float(venv.high)]
    return None if random is None else (arrays, {"kind": CARTPOLES, "rng": random, "low": bounds})


def load_vector(venv: Any, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
    """Restore what `save_vector` returned."""
    _expect_kind(venv, data)
    if arrays["state"].shape[1] != venv.num_envs:
        raise InputError(
            f"the state holds {arrays['state'].shape[1]} environments, "
            f"there are {venv.num_envs} here"
        )
    venv.state, venv.steps = arrays["state"].copy(), arrays["steps"].copy()
    venv.prev_done = arrays["prev_done"].copy()
    venv.low, venv.high = data["low"]
    _load_random(venv, data["rng"])


def _save_env(env: Env) -> Saved | None:
    wrappers = _save_wrappers(env)
    inner: Any = env.unwrapped
    random = _save_random(inner)
    if wrappers is None or random is None:
        return None
    data = {"kind": _name(inner), "wrappers": wrappers, "rng": random}
    if _name(inner) in CLASSICS:
        attributes = {name: getattr(inner, name) for name in CLASSICS[_name(inner)]}
        arrays = {"state": np.array(inner.state)}
        return arrays, data | {"kept": attributes, "tuple": isinstance(inner.state, tuple)}
    if type(inner).__module__.startswith("gymnasium.envs.mujoco."):
        return _save_mujoco(inner), data
    return None


def _load_env(env: Env, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
    inner: Any = env.unwrapped
    _expect_kind(inner, data)
    _load_wrappers(env, data["wrappers"])
    _load_random(inner, data["rng"])
    if "kept" not in data:
        _load_mujoco(inner, arrays)
        return
    inner.state = tuple(arrays["state"]) if data["tuple"] else arrays["state"].copy()
    for name, value in data["kept"].items():
        setattr(inner, name, value)


def _save_mujoco(inner: Any) -> dict[str, np.ndarray]:
    import mujoco  # type: ignore[import-untyped]

    kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(mujoco.mj_stateSize(inner.model, kind))
    mujoco.mj_getState(inner.model, inner.data, state, kind)
    return {"state": state} | {name: getattr(inner.data, name).copy() for name in DERIVED}


def _load_mujoco(inner: Any, arrays: Mapping[str, np.ndarray]) -> None:
    import mujoco

    kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_setState(inner.model, inner.data, arrays["state"], kind)
    mujoco.mj_forward(inner.model, inner.data)
    mujoco.mj_setState(inner.model, inner.data, arrays["state"], kind)  # forward moved warm starts
    for name in DERIVED:
        getattr(inner.data, name)[:] = arrays[name]


def _save_wrappers(env: Any) -> dict[str, Any] | None:
    saved: dict[str, Any] = {}
    while isinstance(env, gymnasium.Wrapper):
        if type(env) is TimeLimit:
            saved["elapsed"] = env._elapsed_steps
        elif type(env) is OrderEnforcing:
            saved["has_reset"] = env._has_reset
        elif type(env) is not PassiveEnvChecker:
            return None
        env = env.env
    return saved


def _load_wrappers(env: Any, saved: Mapping[str, Any]) -> None:
    while isinstance(env, gymnasium.Wrapper):
        if type(env) is TimeLimit:
            env._elapsed_steps = saved["elapsed"]
        elif type(env) is OrderEnforcing:
            env._has_reset = saved["has_reset"]
        env = env.env


def _save_random(env: Any) -> dict[str, Any] | None:
    state = env.np_random.bit_generator.state
    if state["bit_generator"] != "PCG64":
        return None
    # 128-bit integers as text: many readers of JSON round numbers to doubles
    integers = {name: str(value) for name, value in state["state"].items()}
    return integers | {name: int(state[name]) for name in ("has_uint32", "uinteger")}


def _load_random(env: Any, saved: Mapping[str, Any]) -> None:
    generator = np.random.PCG64()
    generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(saved["state"]), "inc": int(saved["inc"])},
        "has_uint32": saved["has_uint32"],
        "uinteger": saved["uinteger"],
    }
    env.np_random = np.random.Generator(generator)


def _name(env: Any) -> str:
    return f"{type(env).__module__}:{type(env).__name__}"


def _expect_kind(env: Any, data: Mapping[str, Any]) -> None:
    if data.get("kind") != _name(env):
        raise InputError(f"the state is of {data.get('kind')}, the environment is {_name(env)}")
