from __future__ import annotations

import warnings

import numpy as np
import pytest
from parallel_toys import (
    Attribute,
    Countdown,
    Counting,
    Forgetful,
    Growing,
    Mixed,
    Stated,
    Stateless,
    Vanishing,
)

from keel.envs import (
    BadStepError,
    EnvError,
    EnvRaisedError,
    EnvWarning,
    UnsupportedSpaceError,
    make_envs,
)
from keel.envs.guard import Guarded
from keel.envs.multi import ParallelEnvs
from keel.errors import InputError


def play(envs: ParallelEnvs | Guarded, steps: int, action: int = 1) -> list:
    found = []
    for t in range(steps):
        found.append(envs.step(np.full((envs.num_envs, 2), (action + t) % 2)))
    return found


def test_shapes_have_an_axis_of_agents() -> None:
    envs = Guarded(ParallelEnvs(Countdown, 3))
    obs = envs.reset(0)
    assert envs.agents == ("long", "short")
    assert obs["obs"].shape == (3, 2, 3)
    assert obs["agent"].tolist() == [[0, 1]] * 3
    assert obs["action_mask"].shape == (3, 2, 3)
    assert obs["state"].shape == (3, 2, 6)
    step = play(envs, 1)[0]
    for x in (step.reward, step.terminated, step.truncated, step.ignored):
        assert x.shape == (3, 2)


def test_shorter_vectors_are_padded_and_missing_choices_masked() -> None:
    envs = ParallelEnvs(Countdown, 1)
    envs.reset(0)
    obs = envs.step(np.array([[2, 1]])).obs
    assert obs["obs"][0].tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    assert obs["action_mask"][0].tolist() == [[True, True, False], [True, True, False]]


def test_agents_may_observe_a_single_number() -> None:
    steps = play(_begun(Counting), 3)
    assert [step.obs["obs"][0].tolist() for step in steps] == [[1, 1], [2, 2], [3, 0]]


def test_an_agent_that_dies_ends_once_and_is_ignored_until_the_next_episode() -> None:
    steps = play(_begun(Countdown), 6)
    ignored = [s.ignored[0].tolist() for s in steps]
    ended = [s.terminated[0].tolist() for s in steps]
    assert ended == [
        [False, False],
        [False, True],
        [False, False],
        [False, False],
        [True, False],
        [False, False],
    ]
    assert ignored[:5] == [[False, False]] * 2 + [[False, True]] * 3
    assert ignored[5] == [True, True]  # the step in which both begin anew
    assert steps[5].obs["obs"][0].tolist() == np.zeros((2, 3)).tolist()
    assert not any(s.truncated.any() for s in steps)


def test_the_row_after_a_truncation_holds_the_final_observation() -> None:
    steps = play(_begun(Countdown, cut=True), 3)
    assert steps[1].truncated[0].tolist() == [False, True]
    assert steps[1].obs["obs"][0, 1].tolist() == [2.0, 2.0, 0.0]
    assert steps[2].ignored[0].tolist() == [False, True]


def test_agents_that_vanish_with_their_episode_are_cut_off() -> None:
    step = play(_begun(Vanishing), 1)[0]
    assert step.truncated[0].tolist() == [True, True]
    assert step.episode_index.tolist() == [0]


def test_an_episode_is_all_agents_together() -> None:
    steps = play(_begun(Countdown), 5)
    last = steps[-1]
    # actions 1, 0, 1, 0, 1: long gets 2 + 2 + 4 + 4 + 6, short 2 + 2
    assert last.episode_index.tolist() == [0]
    assert last.agent_return is not None
    assert last.agent_return.tolist() == [[18.0, 4.0]]
    assert last.episode_return.tolist() == [22.0]
    assert last.episode_length.tolist() == [5]


def test_the_state_is_the_environments_own_or_all_observations() -> None:
    assert _begun(Stated).observation_space["state"].shape == (2,)
    obs = _begun(Stated).reset(0)
    assert obs["state"][0].tolist() == [[0.0, 7.0]] * 2
    obs = play(_begun(Countdown), 1)[0].obs
    assert obs["state"][0, 0].tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]


def test_every_copy_has_a_seed_of_its_own_and_begins_by_itself() -> None:
    made: list[Countdown] = []

    def make() -> Countdown:
        made.append(Countdown())
        return made[-1]

    envs = ParallelEnvs(make, 2)
    envs.reset(3)
    play(envs, 12)
    assert [env.begun for env in made] == [4, 3]  # the first was asked once more, for its state


def test_what_is_kept_is_not_written_over() -> None:
    envs = _begun(Countdown)
    first = play(envs, 1)[0]
    before = first.obs["obs"].copy()
    play(envs, 1)
    assert np.array_equal(first.obs["obs"], before)


def test_an_environment_that_raises_says_which_and_when() -> None:
    envs = _begun(Countdown, fail_at=2)
    with pytest.raises(EnvRaisedError, match=r"environment 0 raised RuntimeError.*step 2"):
        play(envs, 3)


def test_a_state_that_fails_once_an_agent_is_gone_is_the_last_one_until_the_end() -> None:
    envs = _begun(Forgetful)
    with pytest.warns(EnvWarning, match="raised AttributeError after an agent was gone") as caught:
        steps = play(envs, 13)
    assert len(caught) == 1
    states = [step.obs["state"][0, 0, 0] for step in steps]
    assert states == [1, 1, 1, 1, 1, 0] * 2 + [1], "the dead leave with step 2; a reset is step 0"


class TogetherForgetful(Forgetful):
    lives = {"long": 2, "short": 2}  # noqa: RUF012


def test_a_state_that_fails_at_the_end_alone_needs_no_warning() -> None:
    envs = _begun(TogetherForgetful)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = play(envs, 6)
    assert [step.obs["state"][0, 0, 0] for step in steps] == [1, 1, 0, 1, 1, 0]


def test_a_state_that_fails_while_all_are_there_stops_the_run() -> None:
    with pytest.raises(EnvRaisedError, match=r"environment 0 raised ValueError: no state today"):
        play(_begun(Stateless), 1)
    with pytest.raises(BadStepError, match=r"environment 0: state\(\): expected shape \[2\], got"):
        play(_begun(Growing), 1)


def test_a_state_that_is_none_is_told_and_observations_stand_for_it() -> None:
    with pytest.warns(EnvWarning, match=r"state\(\) raised TypeError: .* side by side"):
        envs = ParallelEnvs(Attribute, 1)
    assert envs.reset(0)["state"].shape == (1, 2, 6)


def test_an_aec_environment_that_is_parallelizable_is_its_parallel_form() -> None:
    kwargs = {"env_kwargs": {"max_cycles": 5}, "seed": 0}
    one, two = (
        make_envs(f"mpe2.simple_spread_v3:{name}", 2, **kwargs)  # type: ignore[arg-type]
        for name in ("env", "parallel_env")
    )
    a, b = one.reset(3), two.reset(3)
    for t in range(12):
        assert all(np.array_equal(a[key], b[key]) for key in a)
        s, u = (envs.step(np.full((2, 3), t % 5)) for envs in (one, two))
        assert np.array_equal(s.reward, u.reward)
        assert np.array_equal(s.truncated, u.truncated)
        a, b = s.obs, u.obs


def test_in_a_game_of_turns_who_waits_has_one_choice_and_who_loses_is_told() -> None:
    with pytest.warns(EnvWarning, match="agents take turns"):
        envs = make_envs("parallel_toys:Nim", 1, seed=0)
    obs = envs.reset(0)
    assert obs["action_mask"][0].tolist() == [[True, True], [True, False]], "first moves"
    step = envs.step(np.array([[1, 0]]))
    assert step.obs["observation"][0].tolist() == [[3.0], [3.0]], "both see every move"
    assert step.obs["action_mask"][0].tolist() == [[True, False], [True, True]]
    step = envs.step(np.array([[0, 1]]))
    assert step.obs["action_mask"][0].tolist() == [[True, False], [True, False]], "one is left"
    step = envs.step(np.array([[0, 0]]))
    assert step.reward[0].tolist() == [1.0, -1.0]
    assert step.terminated[0].tolist() == [True, True]
    assert envs.step(np.array([[0, 0]])).ignored.all()


def test_spaces_that_cannot_be_one_are_refused() -> None:
    with pytest.raises(UnsupportedSpaceError, match="different spaces"):
        ParallelEnvs(Mixed, 1)


def test_the_guard_sees_every_agent() -> None:
    envs = Guarded(ParallelEnvs(Countdown, 1))
    envs.reset(0)
    with pytest.raises(BadStepError, match="expected 0 to 2"):
        envs.step(np.array([[0, 7]]))


def test_environments_go_by_module_and_function() -> None:
    envs = make_envs("parallel_toys:Countdown", 2, seed=0, env_kwargs={"cut": True})
    assert envs.backend == "pettingzoo"
    assert envs.agents == ("long", "short")
    with pytest.raises(EnvError, match="no attribute 'Nothing'"):
        make_envs("parallel_toys:Nothing", 1, seed=0)
    with pytest.raises(InputError, match="unexpected keyword"):
        make_envs("parallel_toys:Countdown", 1, seed=0, env_kwargs={"colour": 1})


def _begun(make: type[Countdown], **options: object) -> ParallelEnvs:
    envs = ParallelEnvs(lambda: make(**options), 1)  # type: ignore[arg-type]
    envs.reset(0)
    return envs
