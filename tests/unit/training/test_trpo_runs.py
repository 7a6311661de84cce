"""TRPO through the whole loop: all kinds of policies, resuming, presets and the note's flags."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.cli.environments import parse
from keel.cli.legacy_flags import ALIASES
from keel.cli.legacy_flags import translate_train as translate
from keel.config import Config, check, from_dict, to_dict
from keel.errors import InputError
from keel.presets import preset
from keel.training.builder import build_controllers, initial_hparams, scheduled
from keel.training.runner import resume, start
from keel.training.session import train

TINY: dict[str, Any] = {
    "algo": "trpo",
    "total_steps": 256,
    "rollout_steps": 16,
    "envs": {"num": 4},
    "network": {"hidden": [8]},
    "region": {"max_kl": 0.01, "minibatch": 32, "epochs": 2},
    "natural": {"cg_iters": 5},
    "evaluation": {"episodes": 2},
}


def tiny(env: str = "CartPole-v1", **changes: Any) -> Config:
    base = from_dict({**TINY, "env": env})
    return from_dict(changes, base)


POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("CartPole-v1", {}),
    "gaussian": ("Pendulum-v1", {"envs": {"normalize_obs": True, "normalize_reward": True}}),
    "squashed": ("Pendulum-v1", {"network": {"squash": True}}),
    "state std": ("Pendulum-v1", {"network": {"state_std": True}}),
    "gelu": ("CartPole-v1", {"network": {"activation": "gelu"}}),
    "decoupled": ("CartPole-v1", {"network": {"kind": "decoupled", "features": 8}}),
    "actor remembers": ("CartPole-v1", {"network": {"memory": "actor", "memory_size": 6}}),
    "both remember": ("Pendulum-v1", {"network": {"memory": "both", "memory_size": 6}}),
    "entropy floor": ("CartPole-v1", {"explore": {"entropy_floor": 0.6, "entropy_coef": 0.01}}),
    "hot": ("CartPole-v1", {"explore": {"pulses": True, "pulse_interval": 1}}),
    "value clip": ("CartPole-v1", {"region": {"value_clip": 0.2}}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_update_of_every_policy_is_inside_the_bound(name: str) -> None:
    env, changes = POLICIES[name]
    iterations = list(train(tiny(env, **changes)))
    assert len(iterations) == 4
    for iteration in iterations:
        metrics = iteration.metrics
        assert metrics["train/kl_exact"] <= metrics["train/max_kl"]
        assert iteration.report.verdict != "walked_back"  # the search knows every KL that counts
        if metrics["train/line_search_success"]:
            assert metrics["train/kl_step"] == metrics["train/kl_exact"] > 0.0
        else:
            assert math.isnan(metrics["train/kl_step"])
    assert any(i.metrics["train/line_search_success"] for i in iterations)


@pytest.mark.parametrize("share", [True, False])
def test_pixels_with_one_eye_for_both_and_with_one_each(share: bool) -> None:
    pytest.importorskip("ale_py")
    network = {"cnn": "small", "features": 16, "share": share}
    config = tiny("Breakout", total_steps=64, network=network, natural={"fisher_fraction": 0.5})
    (iteration,) = train(config)
    agent, params = iteration.session.agent, iteration.state.opt_state.params
    moved = (params != agent.initial)[0]
    assert moved[: agent.critic_from].any()
    assert moved[agent.critic_from :].any()
    assert bool(agent.layout.columns("trunk").any()) is share
    assert iteration.metrics["train/kl_exact"] <= 0.01


def test_a_shared_trunk_is_moved_by_the_policy_alone() -> None:
    """More passes for the critic change the critic's head and nothing else."""
    changes = {"network": {"kind": "decoupled", "features": 8}, "total_steps": 64}
    (short,) = train(tiny(**changes))
    (long,) = train(tiny(**changes, region={"epochs": 9}))
    start = short.session.agent.critic_from
    one, other = (i.state.opt_state.params[0] for i in (short, long))
    assert torch.equal(one[:start], other[:start])
    assert not torch.equal(one[start:], other[start:])


@pytest.mark.parametrize("name", ["discrete", "gaussian", "both remember"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    env, changes = POLICIES[name]
    config = tiny(env, **changes, stabilizer={"ls_fail_threshold": 2, "recovery": 1})
    whole = list(start(config, tmp_path, "whole"))[-1]
    half = start(config, tmp_path, "half")
    next(half)
    next(half)
    half.close()
    done = list(resume(tmp_path / "half" / "seed-0"))[-1]
    assert torch.equal(
        whole.iteration.state.opt_state.params, done.iteration.state.opt_state.params
    )
    assert whole.iteration.state.hparams == done.iteration.state.hparams
    assert whole.iteration.state.controllers == done.iteration.state.controllers


def test_cartpole_is_learned() -> None:
    config = from_dict(
        {
            "env": "CartPole-v1",
            "algo": "trpo",
            "total_steps": 60_000,
            "rollout_steps": 64,
            "envs": {"num": 16},
            "advantage": {"gamma": 0.98, "lam": 0.9},
            "region": {"max_kl": 0.03, "minibatch": 128, "epochs": 10, "learning_rate": 1e-3},
            "natural": {"cg_iters": 10},
        }
    )
    last = list(train(config))[-1]
    assert last.metrics["rollout/return_mean"] > 150.0
    assert last.state.kl_exact_max <= 0.03


# --- the two versions of Breakout by TRPO ---------------------------------------------------------

COLUMNS = {
    "gamma": (0.99, 0.99),
    "gae_lambda": (0.95, 0.98),
    "max_kl": (0.01, 0.02),
    "damping": (0.1, 0.05),
    "cg_iters": (10, 15),
    "backtrack_iters": (10, 15),
    "backtrack_coeff": (0.8, 0.6),
    "critic_lr": (1e-3, 5e-4),
    "critic_train_iters": (5, 10),
    "entropy_coef": (0.01, 0.05),
    "entropy_decay": (1.0, 0.9995),
    "min_entropy_coef": (0.0, 0.01),
    "batch_size": (64, 128),
    "n_envs": (1, 8),
}
FLAGS = {
    "ls_fail_threshold": 20,
    "max_kl_decay": 0.8,
    "min_max_kl": 0.005,
    "damping_growth": 1.2,
    "max_damping": 0.2,
}


def field(config: Config, flag: str) -> Any:
    """The value behind a legacy flag, by way of its alias."""
    name = "learning-rate" if flag == "critic_lr" else flag.replace("_", "-")
    place = ALIASES[f"--{name}"].removeprefix("--").replace("-", "_")
    value: Any = config
    for part in place.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("version", [0, 1])
def test_the_presets_are_the_columns_of_the_table(version: int) -> None:
    config = preset(f"note-002-v{version + 1}")
    check(config)
    assert {name: field(config, name) for name in COLUMNS} == {
        name: values[version] for name, values in COLUMNS.items()
    }
    assert config.batch == (2048, 32768)[version]
    assert config.envs.normalize_reward is bool(version)
    if version:
        assert {name: field(config, name) for name in FLAGS} == FLAGS
        assert len(build_controllers(config)) == 2
    else:
        assert not build_controllers(config)


@pytest.mark.parametrize("flag", [*COLUMNS, *FLAGS, "rollout_steps", "total_steps"])
def test_the_notes_flags_reach_their_fields(flag: str) -> None:
    value = {"backtrack_coeff": "0.5", "max_kl_decay": "0.5", "damping_growth": "2"}.get(flag, "1")
    options = parse(
        translate(["Breakout", "--preset", "breakout-trpo-stabilized", f"--{flag}", value])
    )
    config = options.config
    found = getattr(config, flag) if hasattr(config, flag) else field(config, flag)
    assert found == float(value)


def test_the_command_of_the_notes_guide_works() -> None:
    """Section 8.2, with our name for the script."""
    words = "Breakout --preset breakout-trpo-stabilized --n_envs 8 --total_steps 10000000"
    options = parse(translate([*words.split(), "--entropy_coef", "0.05", "--max_kl", "0.02"]))
    assert options.config == preset("breakout-trpo-stabilized")


BAD = {
    "natural.backtrack_coeff: expected a number between 0 and 1": {
        "natural": {"backtrack_coeff": 1.0}
    },
    "natural.fisher_fraction: expected a number from 0 to 1": {"natural": {"fisher_fraction": 2.0}},
    "natural.cg_iters: expected a number above 0": {"natural": {"cg_iters": 0}},
    "natural.max_kl_end: expected a number above 0": {"natural": {"max_kl_end": 0.0}},
    "stabilizer.max_kl_decay: expected a factor up to 1": {"stabilizer": {"max_kl_decay": 1.5}},
    "stabilizer.damping_growth: expected a factor of at least 1": {
        "stabilizer": {"damping_growth": 0.5}
    },
    "region.kl_coef: belongs to --algo ppo": {"region": {"kl_coef": 0.1}},
    "region.symmetric: belongs to --algo ppo": {"region": {"symmetric": True}},
    "region.target_kl: belongs to --algo ppo": {"region": {"target_kl": 0.01}},
    "advantage.recompute: belongs to --algo ppo": {"advantage": {"recompute": True}},
    "natural.max_kl_end: expected at most region.max_kl": {"natural": {"max_kl_end": 0.5}},
    "natural.damping: belongs to --algo trpo": {"algo": "ppo", "natural": {"damping": 0.3}},
    "stabilizer.recovery: belongs to --algo trpo": {"algo": "ppo", "stabilizer": {"recovery": 3}},
    "atari.sticky: expected a number from 0 to 1": {"atari": {"sticky": 1.5}},
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_is_named(message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_dict({"algo": "trpo", **BAD[message]})


def test_the_bound_may_be_planned_and_tightened_below_the_plan() -> None:
    config = tiny(region={"max_kl": 0.03}, natural={"max_kl_end": 0.01}, total_steps=1000)
    hparams = initial_hparams(config)
    bounds = [scheduled(hparams, steps, (), config).max_kl for steps in (0, 500, 1000)]
    assert bounds == pytest.approx([0.03, 0.02, 0.01])
    *_, last = train(replace(config, total_steps=256))
    assert last.metrics["train/max_kl"] == pytest.approx(0.03 - 0.02 * 192 / 256)
    assert last.state.hparams.max_kl == 0.03  # a longer run plans anew from here
    tightened = replace(hparams, max_kl=0.015)
    assert scheduled(tightened, 500, (), config).max_kl == 0.015
    assert np.isclose(scheduled(tightened, 1000, (), config).max_kl, 0.01)


def test_the_bound_may_be_held_before_it_goes_down_by_equal_factors() -> None:
    """From 0.02 to 0.0002 over the second half: 0.002 after three quarters."""
    natural = {"max_kl_end": 0.0002, "max_kl_hold": 0.5, "max_kl_schedule": "geometric"}
    config = tiny(region={"max_kl": 0.02}, natural=natural, total_steps=1000)
    hparams = initial_hparams(config)
    bounds = [scheduled(hparams, steps, (), config).max_kl for steps in (0, 500, 750, 1000)]
    assert bounds == pytest.approx([0.02, 0.02, 0.002, 0.0002])
    linear = replace(config, natural=replace(config.natural, max_kl_schedule="linear"))
    assert scheduled(hparams, 750, (), linear).max_kl == pytest.approx(0.0101)


def test_a_trpo_config_survives_its_own_file() -> None:
    for name in ("breakout-trpo-one-env", "breakout-trpo-stabilized", "breakout-trpo"):
        assert from_dict(to_dict(preset(name))) == preset(name)


def test_the_algorithm_chooses_the_preset_wherever_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("algo: trpo\nseed: 7\n")
    expected = preset("hopper-trpo")
    for words in (["--algo", "trpo"], ["--algo=trpo"], ["--config", str(file)]):
        for order in (["Hopper-v5", *words], [*words, "Hopper-v5"]):
            config = parse(translate(order)).config
            assert replace(config, seed=0) == expected
    assert parse(translate(["Hopper-v5"])).config == preset("Hopper")
    other = parse(translate(["Acrobot-v1", "--algo", "trpo"])).config
    assert replace(other, env=preset("default-trpo").env) == preset("default-trpo")
