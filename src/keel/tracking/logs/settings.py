"""Settings that other libraries keep beside their logs, under Keel's dotted names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from keel.tracking.files import read_regular
from keel.tracking.logs.text import number
from keel.tracking.record import MAX_BRACKETS
from keel.tracking.resume import flat

_LARGEST = 1 << 20

CLEANRL = {
    "env_id": "env",
    "seed": "seed",
    "total_timesteps": "total_steps",
    "learning_rate": "region.learning_rate",
    "num_envs": "envs.num",
    "num_steps": "rollout_steps",
    "gamma": "advantage.gamma",
    "gae_lambda": "advantage.lam",
    "minibatch_size": "region.minibatch",
    "update_epochs": "region.epochs",
    "clip_coef": "region.clip",
    "ent_coef": "explore.entropy_coef",
    "vf_coef": "region.value_coef",
    "max_grad_norm": "region.max_grad_norm",
    "target_kl": "region.target_kl",
}
RLLIB = {
    "env": "env",
    "seed": "seed",
    "lr": "region.learning_rate",
    "gamma": "advantage.gamma",
    "lambda": "advantage.lam",
    "lambda_": "advantage.lam",
    "clip_param": "region.clip",
    "num_epochs": "region.epochs",
    "num_sgd_iter": "region.epochs",
    "minibatch_size": "region.minibatch",
    "sgd_minibatch_size": "region.minibatch",
    "entropy_coeff": "explore.entropy_coef",
    "vf_loss_coeff": "region.value_coef",
    "kl_target": "region.target_kl",
    "grad_clip": "region.max_grad_norm",
}
TRL = {
    "seed": "seed",
    "learning_rate": "region.learning_rate",
    "beta": "kl.coef",
    "num_iterations": "region.epochs",
    "epsilon": "region.clip",
    "epsilon_high": "region.clip_high",
    "temperature": "sample.temperature",
    "top_k": "sample.top_k",
    "top_p": "sample.top_p",
    "num_generations": "sample.group",
    "max_completion_length": "sample.max_new_tokens",
    "max_grad_norm": "region.max_grad_norm",
}
"""Names of TRL's and ms-swift's arguments; what both call alike means the same."""
RSL_RL = {
    "seed": "seed",
    "num_steps_per_env": "rollout_steps",
    "algorithm.learning_rate": "region.learning_rate",
    "algorithm.num_learning_epochs": "region.epochs",
    "algorithm.clip_param": "region.clip",
    "algorithm.gamma": "advantage.gamma",
    "algorithm.lam": "advantage.lam",
    "algorithm.desired_kl": "region.target_kl",
    "algorithm.entropy_coef": "explore.entropy_coef",
    "algorithm.value_loss_coef": "region.value_coef",
    "algorithm.max_grad_norm": "region.max_grad_norm",
}
AGENT = ("params", "agent.yaml")
"""File below the folder of a log in which IsaacLab keeps the settings of rsl_rl."""
ARGUMENTS = ("args.json", "training_args.json", "grpo_config.json")
"""Files beside a log, or one folder above, that hold arguments of TRL or ms-swift."""


def of_cleanrl(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in CleanRL's hyperparameters."""
    return _renamed(data, CLEANRL)


def of_rllib(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the `config` of RLlib's results."""
    return _renamed(data, RLLIB)


def of_arguments(log: Path) -> dict[str, Any]:
    """Return the settings in a file of arguments beside a log of TRL or ms-swift.

    Args:
        log: The log.
    """
    for folder in (log.parent, log.parent.parent):
        for name in ARGUMENTS:
            data = _read(folder / name)
            if data:
                return _renamed(data, TRL)
    return {}


def of_agent(log: Path) -> dict[str, Any]:
    """Return the settings of rsl_rl that IsaacLab keeps beside a log.

    Args:
        log: The log.
    """
    path = log.parent.joinpath(*AGENT)
    try:
        content = read_regular(path) if path.is_file() else b""
        if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
            return {}
        data = yaml.safe_load(content[:_LARGEST])
    except (OSError, ValueError, RecursionError, yaml.YAMLError):  # Python's own tags among them
        return {}
    return _renamed(dict(flat(data)), RSL_RL) if isinstance(data, dict) else {}


def of_markdown(table: str) -> dict[str, Any]:
    """Return the values of a Markdown table of two columns, `|param|value|`.

    Examples:
        >>> of_markdown("|param|value|\\n|-|-|\\n|gamma|0.99|\\n|env_id|CartPole-v1|")
        {'gamma': 0.99, 'env_id': 'CartPole-v1'}
    """
    values: dict[str, Any] = {}
    for line in table.splitlines()[2:]:
        name, bar, text = line.strip().strip("|").partition("|")
        if bar:
            values[name] = _plain(text)
    return values


def _plain(text: str) -> Any:
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    known = number(text)
    if known is None:
        return text
    return int(known) if text.lstrip("+-").isdecimal() else known


def _renamed(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    plain = {
        name: data[name] for name in names if isinstance(data.get(name), bool | int | float | str)
    }
    return {names[name]: value for name, value in plain.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return {}
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
