"""Flags by the names of other trainers and of earlier scripts: hidden aliases of settings.

Most are another name of one setting (`ALIASES`, `LANGUAGE_ALIASES`). The others need more than a
name: a value that reads otherwise (`--normalize_advantage true`), a setting that is one of
`envs.options` (`--alpha`), or an answer that depends on what is trained (`--reward_scale`). None of
them is in `--help`. Underscores and hyphens are the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keel.cli.arguments import split_flags, translate
from keel.config import Config
from keel.config.values import OPTIONS, options_text
from keel.data import read_beside
from keel.errors import InputError

if TYPE_CHECKING:
    from keel.cli.settings import Resolved

_ALIASES = read_beside(__file__, "legacy_flags.yaml", dict[str, dict[str, str]])
ALIASES = _ALIASES["train"]
"""Other names of settings of `keel train ENV`."""
LANGUAGE_ALIASES = _ALIASES["language"]
"""Other names of settings of `keel train language`."""

PREFIX = "--p-p-o-global-scheduler-modular-config-"
"""Prefix of settings of the scheduler in Vidur's PPO router."""
SWITCHES = {
    "--adaptive-bc-coef": (("--demos.control", "adaptive"), ("--demos.control", "fixed")),
    "--enable-dynamic-temperature": (("--explore.pulses",), ("--explore.no-pulses",)),
    "--enable-decoupled-ac": (("--network.kind", "decoupled"), ("--network.kind", "auto")),
}
"""Flags without a value, or with true or false: what they stand for when on, and when off."""
NORMALIZE, GROUP_NORM = "--normalize-advantage", "--group-norm"
SCHEDULER, REPLICAS = "--global-scheduler-config-type", "--cluster-config-num-replicas"
ACTOR_RATE, CRITIC_RATE, REWARD_SCALE = "--actor-lr", "--critic-lr", "--reward-scale"
LATENCY_SCALE = "--latency-penalty-scale"
REWARD_PARAMETERS = (
    "--throughput-target", "--absolute-weight", "--delta-weight", "--latency-threshold",
    LATENCY_SCALE, "--load-balance-penalty",
)  # fmt: skip
"""Parameters of the reward `throughput`, which are options of the environment `serving`."""
THROUGHPUT = ("throughput", "note-004")
"""Names of that reward, now and in version 0.1."""
AMBIGUOUS = ("--alpha", "--kappa", "--sigma")
"""Parameters of that reward whose names are too general: unknown flags without it."""
IN_CONTEXT = (ACTOR_RATE, CRITIC_RATE, REWARD_SCALE, REPLICAS, *REWARD_PARAMETERS, *AMBIGUOUS)
"""Flags whose meaning depends on the other settings."""


def translate_train(args: Sequence[str]) -> list[str]:
    """Return the words of `keel train ENV` with the settings' own names.

    What depends on other settings is left to `settle`.

    Args:
        args: Words of the command line.
    """
    words = [_without_prefix(word) for word in split_flags(args)]
    words = _name_preset(words)
    words = _name_normalization(words)
    for flag, (on, off) in SWITCHES.items():
        switched, words = take(words, flag, default="true")
        if switched is not None:
            words += on if _truth(flag, switched) else off
    return translate(words, ALIASES)


def translate_language(args: Sequence[str]) -> list[str]:
    """Return the words of `keel train language` with the settings' own names.

    Args:
        args: Words of the command line.
    """
    return translate(args, LANGUAGE_ALIASES)


def settle(words: Sequence[str], resolve: Callable[[list[str]], Resolved]) -> list[str]:
    """Return translated words without the flags whose meaning depends on the other settings.

    Args:
        words: Of `keel train ENV`, from `translate_train`.
        resolve: Reads words into options; called with the rest of them.
    """
    rest, given = list(words), {}
    for flag in IN_CONTEXT:
        value, rest = take(rest, flag)
        if value is not None:
            given[flag] = value
    if not given:
        return list(words)
    asked = ("-h", "--help", "--help-all")
    config: Config = resolve([word for word in rest if word not in asked]).options.config
    rest += _learning_rates(given, rest, config)
    changes, unknown = _environment_options(given, config)
    if changes:
        options = config.envs.options | changes
        rest += ["--envs.options", options_text(options, OPTIONS)]
    return rest + unknown


def take(
    words: Sequence[str], flag: str, default: str | None = None
) -> tuple[str | None, list[str]]:
    """Return the value of a flag, or None where it is not given, and the words without it.

    Args:
        words: Of a command line; of several values the last counts.
        flag: With hyphens.
        default: The value of the flag alone; None: it needs one.
    """
    value, rest, at = None, [], 0
    while at < len(words):
        if _spelled(words[at]) != flag:
            rest.append(words[at])
            at += 1
            continue
        alone = at + 1 == len(words) or words[at + 1].startswith("--")
        if alone and default is None:
            raise InputError(f"{spell(flag)}: expected a value")
        value = default if alone else words[at + 1]
        at += 1 if alone else 2
    return value, rest


def spell(flag: str) -> str:
    """Return a flag with underscores, as earlier scripts write it."""
    return f"--{flag[2:].replace('-', '_')}"


def _spelled(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word


def _without_prefix(word: str) -> str:
    return f"--{word[len(PREFIX) :]}" if _spelled(word).startswith(PREFIX) else word


def _truth(flag: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InputError(f"{spell(flag)}: expected true or false, got {value!r}")
    return value.lower() == "true"


def _number(flag: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{spell(flag)}: expected a number, got {value!r}")
    return number


def _name_preset(words: list[str]) -> list[str]:
    """Replace the kind of scheduler by the preset of its router, unless one is named."""
    kind, words = take(words, SCHEDULER)
    if kind is None:
        return words
    if kind != "ppo_modular":
        raise InputError(
            f"{spell(SCHEDULER)}: only ppo_modular is trained, got {kind!r}; heuristics are judged "
            "by keel serving judge"
        )
    return words if "--preset" in words else [*words, "--preset", "router-rebalanced"]


def _name_normalization(words: list[str]) -> list[str]:
    """Replace SB3's `--normalize_advantage true` and the flag `--group_norm` by a method.

    The scripts that had the flag normalize over the whole batch with `--group_norm=true` and within
    groups with `--group_norm=false`: their comments and tags agree, the name of the flag does not.
    """
    method, words = take(words, NORMALIZE, default="true")
    grouped, words = take(words, GROUP_NORM, default="true")
    if method is not None:
        method = {"true": "batch", "false": "none"}.get(method.lower(), method)
    if grouped is not None:
        if method not in (None, "batch"):
            raise InputError(
                f"{spell(GROUP_NORM)}: {spell(NORMALIZE)} asks for {method!r}; say one of them, "
                "or --advantage.normalize none|batch|group|robust"
            )
        method = "global" if _truth(GROUP_NORM, grouped) else "group"
        reach = "over the whole batch" if method == "global" else "within groups"
        _warn(
            f"{spell(GROUP_NORM)} {grouped} normalizes advantages {reach} "
            f"(--advantage.normalize {method})"
        )
    return words if method is None else [*words, "--advantage.normalize", method]


def _learning_rates(given: Mapping[str, str], rest: list[str], config: Config) -> list[str]:
    """Return the words for `--actor_lr` and `--critic_lr`: TRPO's learning rate is the critic's."""
    actor, critic = given.get(ACTOR_RATE), given.get(CRITIC_RATE)
    if config.algo == "trpo":
        if actor is not None:
            raise InputError(
                f"{spell(ACTOR_RATE)}: the step of TRPO's policy has no learning rate, --max_kl "
                "bounds it; --critic_lr is the critic's"
            )
        return [] if critic is None else ["--region.learning-rate", critic]
    other, twice = config.region.learning_rate, "--region.learning-rate" in rest
    if actor is not None and twice and other != _number(ACTOR_RATE, actor):
        raise InputError(
            f"{spell(ACTOR_RATE)}: {actor}, but --region.learning-rate is set to {other:g} as "
            "well; say one of them"
        )
    words = [] if actor is None else ["--region.learning-rate", actor]
    return words if critic is None else [*words, "--region.critic-learning-rate", critic]


def _environment_options(
    given: Mapping[str, str], config: Config
) -> tuple[dict[str, Any], list[str]]:
    """Return changes of `envs.options`, and flags that only the reward `throughput` knows."""
    changes: dict[str, Any] = {}
    unknown: list[str] = []
    options = config.envs.options
    by_throughput = config.env == "serving" and options.get("reward") in THROUGHPUT
    for flag, value in given.items():
        if flag == REWARD_SCALE:
            changes["scale"] = _reward_scale(value, config)
        elif flag == REPLICAS:
            changes["replicas"] = _replicas(value, config)
        elif flag in AMBIGUOUS and not by_throughput:
            unknown += [flag, value]
        elif flag in (*REWARD_PARAMETERS, *AMBIGUOUS):
            changes[flag[2:].replace("-", "_")] = _parameter(flag, value, by_throughput)
    mode = options.get("mode", "hybrid")
    if LATENCY_SCALE in given and mode == "hybrid":
        _warn(
            f"{spell(LATENCY_SCALE)} scales env/latency_threshold_penalty, which the throughput "
            'reward logs and does not subtract; --envs.options "…,mode=instant" or mode=delta does'
        )
    return changes, unknown


def _reward_scale(value: str, config: Config) -> float:
    if config.env != "land":
        raise InputError(
            f"{spell(REWARD_SCALE)}: only land divides its rewards by a number; on {config.env} "
            "use --envs.normalize-reward, which divides by the deviation of the return"
        )
    return _number(REWARD_SCALE, value)


def _replicas(value: str, config: Config) -> int:
    if config.env != "serving":
        raise InputError(f"{spell(REPLICAS)}: belongs to serving, this is {config.env}")
    if not value.isdecimal():
        raise InputError(f"{spell(REPLICAS)}: expected a whole number, got {value!r}")
    return int(value)


def _parameter(flag: str, value: str, by_throughput: bool) -> float:
    if not by_throughput:
        raise InputError(
            f"{spell(flag)}: a parameter of the throughput reward, which is not in use; begin with "
            "keel train serving --preset router-rebalanced"
        )
    return _number(flag, value)


def _warn(line: str) -> None:
    print(f"keel: {line}", file=sys.stderr)  # noqa: T201
