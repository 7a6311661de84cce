"""How spaces become arrays: observations, actions and masks."""

from __future__ import annotations

from typing import Any

import env_toys
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from keel.envs import BadStepError, Envs, EnvWarning, UnsupportedSpaceError, VectorEnvs, make_envs
from keel.envs.spaces import action_layout, observation_layout

env_toys.register_toys()


def test_every_kind_of_observation_has_its_layout() -> None:
    envs = make_envs("keel/Everything-v0", 3, backend="sync", seed=0)
    obs = envs.reset(0)
    shown = {key: (array.dtype.name, array.shape[1:]) for key, array in obs.items()}
    assert shown == {
        "vector": ("float32", (3,)),
        "matrix": ("float32", (4,)),
        "number": ("float32", (1,)),
        "pixels": ("uint8", (2, 4, 4)),
        "gray": ("uint8", (1, 4, 4)),
        "bytes": ("float32", (6,)),
        "choice": ("int64", ()),
        "choices": ("int64", (2,)),
        "bits": ("float32", (3,)),
    }
    for row in range(3):
        one = {key: array[row] for key, array in obs.items()}
        one["choice"] = np.int64(one["choice"])
        assert envs.observation_space.contains(one)


def test_values_survive_the_layout_and_counting_starts_at_zero() -> None:
    envs = make_envs("keel/Everything-v0", 2, backend="sync", seed=0, guard=False)
    obs = envs.reset(0)
    lanes: Any = envs._lanes  # type: ignore[attr-defined]
    for row, env in enumerate(lanes.envs):
        last = env.unwrapped.last
        assert np.array_equal(obs["matrix"][row], last["matrix"].reshape(-1))
        assert np.array_equal(obs["gray"][row, 0], last["gray"])
        assert obs["choice"][row] == last["choice"] - 1
        assert np.array_equal(obs["vector"][row], last["vector"].astype(np.float32))
        assert np.array_equal(obs["bits"][row], last["bits"])


def test_a_dict_is_the_same_through_gymnasiums_vector() -> None:
    venv = SyncVectorEnv(
        [lambda: gymnasium.make("keel/Everything-v0")] * 2,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    one: Envs = VectorEnvs(venv)
    two = make_envs("keel/Everything-v0", 2, backend="sync", seed=0, autoreset="same_step")
    a, b = one.reset(3), two.reset(3)
    for _ in range(2 * env_toys.TIME_LIMIT):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[key], b[key]) for key in a)
        s, t = (envs.step(np.array([0, 2])) for envs in (one, two))
        assert s.reward.tolist() == t.reward.tolist() == [-1.0, 1.0]  # a start of −1 was added
        assert (s.final_obs is None) == (t.final_obs is None)
        if s.final_obs is not None and t.final_obs is not None:
            assert s.final_obs[0].tolist() == t.final_obs[0].tolist() == [0, 1]
            assert all(np.array_equal(s.final_obs[1][k], t.final_obs[1][k]) for k in a)
        a, b = s.obs, t.obs


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.Discrete(3), [2, 0], [[2], [0]]),
        (spaces.Discrete(3, start=5), [2, 0], [[7], [5]]),
        (spaces.MultiDiscrete([2, 3]), [[1, 2], [0, 1]], [[1, 2], [0, 1]]),
        (spaces.MultiDiscrete([2, 3], start=[1, 10]), [[1, 2], [0, 1]], [[2, 12], [1, 11]]),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), [[1, 2, 3, 4]] * 2, [[1, 2, 3, 4]] * 2),
        (spaces.MultiBinary(3), [[1, 0, 1], [0, 0, 1]], [[1, 0, 1], [0, 0, 1]]),
        (spaces.Box(-1, 2, (2,)), [[-5.0, 5.0], [0.5, 1.5]], [[-1, 2], [0.5, 1.5]]),
        (spaces.Box(-1, 1, (2, 2)), [[-5, 5, 0, 0.5]] * 2, [[-1, 1, 0, 0.5]] * 2),
        (spaces.Box(-1, 1, (), np.float64), [[-5.0], [0.25]], [[-1], [0.25]]),
    ],
)
def test_actions_arrive_as_the_environment_wants_them(
    space: Any, action: Any, expected: Any
) -> None:
    kwargs = {"action_space": space}
    envs = make_envs("keel/Echo-v0", 2, backend="sync", seed=0, env_kwargs=kwargs)
    envs.reset(0)
    dtype = np.float32 if isinstance(space, spaces.Box) else np.int64
    given = np.array(action, dtype=dtype)
    assert envs.step(given).obs["obs"].tolist() == expected
    assert given.tolist() == np.array(action, dtype=dtype).tolist(), "the caller's array is theirs"


@pytest.mark.parametrize(
    "name", ["keel/Masked-v0", "keel/MaskedInObservation-v0", "keel/MaskedByMethod-v0"]
)
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_masks_come_as_bool_and_a_finished_row_allows_all(name: str, autoreset: Any) -> None:
    envs = make_envs(name, 4, backend="sync", seed=0, autoreset=autoreset)
    key = "observation" if "InObservation" in name else "obs"
    obs = envs.reset(1)
    finished = 0
    for _ in range(50):
        mask, place = obs["action_mask"], obs[key][:, 0]
        assert mask.dtype == bool
        assert mask.shape == (4, 2)
        over = np.abs(place) >= 4
        assert (mask[:, 0] == ((place != 0) | over)).all()
        assert mask[:, 1].all()
        step = envs.step(np.where(mask[:, 0], 0, 1))
        finished += step.episode_index.size
        if step.final_obs is not None:
            assert step.final_obs[1]["action_mask"].any(1).all()
        obs = step.obs
    assert finished > 5


def test_masks_through_gymnasiums_vector_are_the_same() -> None:
    for mode, autoreset in (("NextStep", "next_step"), ("SameStep", "same_step")):
        make = [lambda: gymnasium.make("keel/Masked-v0")] * 3
        one: Envs = VectorEnvs(SyncVectorEnv(make, autoreset_mode=mode))
        two = make_envs("keel/Masked-v0", 3, backend="sync", seed=0, autoreset=autoreset)  # type: ignore[arg-type]
        a, b = one.reset(2), two.reset(2)
        for _ in range(30):
            assert np.array_equal(a["action_mask"], b["action_mask"])
            action = np.where(a["action_mask"][:, 0], 0, 1)
            s, t = one.step(action), two.step(action)
            if s.final_obs is not None and t.final_obs is not None:
                masks = (x.final_obs[1]["action_mask"] for x in (s, t))  # type: ignore[index]
                assert np.array_equal(*masks)
            a, b = s.obs, t.obs


def test_masks_of_the_method_reach_worker_processes_and_pass_through_wrappers() -> None:
    """Louder has no `action_masks`; what it wraps has."""
    kwargs: dict[str, Any] = {"seed": 0, "wrappers": [env_toys.Louder]}
    one = make_envs("keel/MaskedByMethod-v0", 3, backend="async", threads=1, **kwargs)
    two = make_envs("keel/Masked-v0", 3, backend="sync", seed=0)
    a, b = one.reset(2), two.reset(2)
    for _ in range(20):
        assert np.array_equal(a["action_mask"], b["action_mask"])
        action = np.where(a["action_mask"][:, 0], 0, 1)
        a, b = one.step(action).obs, two.step(action).obs
    one.close()


class UncountedByMethod(env_toys.Echo):
    def action_masks(self) -> np.ndarray:
        return np.ones(2, bool)


def test_masks_that_cannot_be_kept_are_told() -> None:
    if "keel/UncountedByMethod-v0" not in gymnasium.registry:
        gymnasium.register("keel/UncountedByMethod-v0", UncountedByMethod)  # type: ignore[arg-type]
    kwargs = {"action_space": spaces.MultiBinary(1)}
    with pytest.warns(EnvWarning, match=r"action_masks\(\) does not count: .*MultiBinary"):
        make_envs("keel/UncountedByMethod-v0", 1, backend="sync", seed=0, env_kwargs=kwargs)
    make = [lambda: gymnasium.make("keel/MaskedByMethod-v0")]
    with pytest.warns(EnvWarning, match=r"action_masks\(\) of a vector .*envs\.backend sync"):
        VectorEnvs(SyncVectorEnv(make))


def test_the_mask_is_no_part_of_the_observation_space() -> None:
    space = make_envs("keel/MaskedInObservation-v0", 1, backend="sync", seed=0).observation_space
    assert isinstance(space, spaces.Dict)
    assert list(space) == ["observation"]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((7, 7, 3), np.uint8, ("uint8", (3, 7, 7))),
        ((30, 50, 3), np.uint8, ("uint8", (3, 30, 50))),
        ((3, 30, 50), np.float32, ("float32", (3, 30, 50))),
        ((30, 50, 1), np.float64, ("float32", (1, 30, 50))),
        ((8, 8, 111), np.int8, ("float32", (111, 8, 8))),
        ((20, 84, 84), np.uint8, ("uint8", (20, 84, 84))),
        ((9, 9, 9), np.float32, ("float32", (9, 9, 9))),
        ((4, 16, 12, 3), np.uint8, ("uint8", (12, 16, 12))),
        ((4, 3, 16, 12), np.float32, ("float32", (12, 16, 12))),
        ((3, 3, 2), np.int8, ("float32", (18,))),
        ((6, 7, 2), np.float32, ("float32", (84,))),
        ((6, 7, 2), np.uint8, ("uint8", (2, 6, 7))),
        ((4, 5, 5, 2), np.uint8, ("float32", (200,))),
    ],
)
def test_images_of_any_size_have_their_channels_first(
    shape: tuple[int, ...], dtype: Any, expected: tuple[str, tuple[int, ...]]
) -> None:
    space = spaces.Box(0, 1, shape, dtype)
    layout = observation_layout(space)
    (field,) = layout.fields
    assert (field.dtype.name, field.shape) == expected
    raw = np.random.default_rng(0).integers(0, 2, (2, *shape)).astype(dtype)
    image = layout.read(raw, (2,))["obs"]
    stored = {"obs": np.zeros((2, *field.shape), field.dtype)}
    layout.store(stored, 1, raw[1])
    assert np.array_equal(stored["obs"][1], image[1])
    assert image.sum() == raw.sum()
    if field.channels_last and len(shape) == 3:
        assert np.array_equal(image[1, 2 % shape[2]], raw[1, :, :, 2 % shape[2]])
    if shape == (4, 16, 12, 3):  # frame 2, colour 1
        assert np.array_equal(image[1, 2 * 3 + 1], raw[1, 2, :, :, 1])


NESTED = spaces.Dict(
    {
        "inner": spaces.Dict(
            {"x": spaces.Discrete(2), "deep": spaces.Dict({"y": spaces.Box(0, 1)})}
        ),
        "pair": spaces.Tuple(
            (spaces.Discrete(3, start=1), spaces.Box(0, 255, (7, 7, 3), np.uint8))
        ),
    }
)


def test_nested_parts_are_called_by_the_way_to_them() -> None:
    layout = observation_layout(NESTED)
    assert [field.key for field in layout.fields] == ["inner/deep/y", "inner/x", "pair/0", "pair/1"]
    NESTED.seed(0)
    raw = NESTED.sample()
    obs = layout.read(raw, ())
    assert obs["inner/deep/y"] == raw["inner"]["deep"]["y"]
    assert obs["pair/0"] == raw["pair"][0] - 1
    assert np.array_equal(obs["pair/1"], np.moveaxis(raw["pair"][1], -1, 0))
    assert isinstance(layout.space, spaces.Dict)
    assert layout.space.contains(
        {**obs, "inner/x": raw["inner"]["x"], "pair/0": raw["pair"][0] - 1}
    )
    top = observation_layout(spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))))
    assert top.read((1, 2), ()) == {"0": 1, "1": 2}


@pytest.mark.parametrize(
    "raw", [{"inner": 3}, {"pair": (1,)}, {"inner": {"deep": {}}, "pair": (1, 2)}, (1, 2), None]
)
def test_an_observation_that_lacks_a_nested_part_is_refused(raw: Any) -> None:
    with pytest.raises(BadStepError, match=r"observation: expected parts \['inner/deep/y', "):
        observation_layout(NESTED).read(raw, ())


def test_unsupported_spaces_are_named() -> None:
    nested = spaces.Dict({"inner": spaces.Dict({"mission": spaces.Text(9)})})
    with pytest.raises(
        UnsupportedSpaceError, match=r"'inner/mission': Text.* is not supported; .*FilterObserv"
    ) as caught:
        observation_layout(nested)
    assert "\n" not in str(caught.value)
    same = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})})
    with pytest.raises(UnsupportedSpaceError, match="two parts are called 'a/b'"):
        observation_layout(same)
    with pytest.raises(UnsupportedSpaceError, match="action space: Text"):
        action_layout(spaces.Text(5))
    with pytest.raises(UnsupportedSpaceError, match="action space: Box"):
        action_layout(spaces.Box(0, 5, (2,), np.int64))


class Remembers(env_toys.Echo):
    """Shows the action before the last one, which it kept without copying."""

    kept: Any = np.zeros(1)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before, self.kept = self.kept, action
        return np.asarray(before, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("part", ["starts", "actor", "critic"])
def test_names_that_keel_has_for_itself_are_refused(part: str) -> None:
    nested = spaces.Dict({"memory": spaces.Dict({part: spaces.Discrete(2)})})
    message = f"^observation 'memory/{part}': Keel has a key of that name for itself; rename it$"
    with pytest.raises(UnsupportedSpaceError, match=message):
        observation_layout(nested)
    assert observation_layout(spaces.Dict({part: spaces.Discrete(2)})).has(part)


@pytest.mark.parametrize("space", [spaces.Discrete(2), spaces.MultiDiscrete([2, 2])])
def test_a_mask_of_another_kind_is_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpaceError, match=r"'action_mask': is read as the mask.*rename"):
        observation_layout(spaces.Dict({"action_mask": space, "x": spaces.Discrete(2)}))


def test_an_environment_may_keep_the_action_it_was_given() -> None:
    if "keel/Remembers-v0" not in gymnasium.registry:
        gymnasium.register("keel/Remembers-v0", Remembers)  # type: ignore[arg-type]
    kwargs = {"action_space": spaces.Box(-1, 1, (1,))}
    envs = make_envs("keel/Remembers-v0", 1, backend="sync", seed=0, env_kwargs=kwargs)
    envs.reset(0)
    action = np.array([[0.5]], dtype=np.float32)
    envs.step(action)
    action[:] = 0.75
    assert envs.step(action).obs["obs"].tolist() == [[0.5]]


def test_a_dict_without_its_keys_and_an_action_of_another_shape_are_refused() -> None:
    layout = observation_layout(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}))
    with pytest.raises(BadStepError, match=r"expected parts \['a', 'b'\], got \['a'\]"):
        layout.read({"a": np.zeros(2, int)}, (2,))
    with pytest.raises(BadStepError, match=r"expected parts \['a', 'b'\], got ndarray"):
        layout.read(np.zeros(2), (2,))
    with pytest.raises(BadStepError, match=r"action: expected shape \[N, 3\], got \[2, 4\]"):
        action_layout(spaces.Box(-1, 1, (3,))).encode(np.zeros((2, 4), np.float32))
