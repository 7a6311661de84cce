"""Diagnosing runs from Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.doctor.dialects import DIALECTS, SAME
from keel.doctor.examine import Diagnosis, examine
from keel.doctor.known_envs import with_facts
from keel.doctor.reading import needed_names, read_logs
from keel.doctor.rule import FAMILIES, RULES, SETTING, Rule
from keel.doctor.run_log import RunLog
from keel.errors import InputError, check_choice, similar

FACTS = ("facts.actions", "facts.horizon", "facts.seeds", "total_steps", "rollout_steps", "env")
"""Settings that a log of another framework may lack, and rules may want."""


def diagnose(
    *runs: Any,
    layout: str | None = None,
    framework: str | None = None,
    mapping: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    ignore: Collection[str] = (),
) -> Diagnosis | list[Diagnosis]:
    """Say what is wrong with a run, why, and what to do: from its log alone.

    Args:
        *runs: What `keel.train` returns, folders of runs, or logs of Keel, Stable-Baselines3,
            CleanRL, TRL, verl, OpenRLHF, RLlib or rsl_rl; "-" is the standard input.
        layout: How the logs are laid out; by default it is recognized.
        framework: Who wrote them (`sb3`, `cleanrl`, `trl`, …); by default it is recognized.
        mapping: Columns of the logs by Keel's names of metrics.
        settings: Facts that the logs do not say, by Keel's names: `{"advantage.gamma": 0.9}`.
        ignore: Rules that shall not speak.

    Returns:
        The diagnosis, which `print` shows; a list of them where there are several runs.

    Examples:
        >>> import tempfile
        >>> import keel
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     small = dict(runs=runs, total_steps=256, num=2, rollout_steps=64, minibatch=64)
        ...     run = keel.train("CartPole-v1", **small)
        ...     diagnosis = keel.diagnose(run)
        >>> diagnosis.verdict in ("healthy", "watch", "sick", "cannot tell")
        True
        >>> str(diagnosis).startswith(f"{diagnosis.verdict}: ")
        True
    """
    facts = known_settings(settings or {})
    check_rules(ignore)
    diagnoses = [
        examine(replace(log, settings=with_facts({**log.settings, **facts}, log.framework)), ignore)
        for run in runs
        for log in _logs(run, layout, framework, mapping)
    ]
    if not diagnoses:
        raise InputError("diagnose what? A run or a log: keel doctor runs/NAME")
    return diagnoses[0] if len(diagnoses) == 1 else diagnoses


def all_rules() -> list[Rule]:
    """Return every rule in the order of thought."""
    import keel.doctor.rules  # noqa: F401  (fills the registry)

    return sorted(RULES.values(), key=lambda entry: FAMILIES.index(entry.family))


def check_rules(names: Collection[str]) -> None:
    """Refuse names of rules that do not exist, with the nearest one."""
    rules = [entry.id for entry in all_rules()] if names else []
    for name in names:
        check_choice("ignore", name, rules)


def known_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their full names, or raise an `InputError` for an unknown one.

    Args:
        given: By Keel's dotted names, or by a last name that only one has.

    Examples:
        >>> known_settings({"gamma": 0.9, "region.target_kl": 0.01})
        {'advantage.gamma': 0.9, 'region.target_kl': 0.01}
    """
    known = _setting_names()
    return {_full_name(name.replace("-", "_"), known): value for name, value in given.items()}


def _full_name(name: str, known: Collection[str]) -> str:
    if name in known:
        return name
    ends = [full for full in known if full.rpartition(".")[2] == name]
    if name in SAME and SAME[name] in known:
        return SAME[name]
    if len(ends) == 1:
        return ends[0]
    if len(ends) > 1:
        raise InputError(f"setting {name}: which one? {', '.join(sorted(ends))}")
    matches = similar(name, known)
    hint = f"; did you mean {matches[0]!r}?" if matches else ""
    raise InputError(f"setting {name}: neither a setting of Keel's nor a fact{hint}")


def _setting_names() -> set[str]:
    from keel.config import Config
    from keel.config.origins import leaves

    named = {name for dialect in DIALECTS.values() for name in dialect.names}
    needed = {
        need.removeprefix(SETTING)
        for entry in all_rules()
        for needs in entry.needs
        for need in needs.split("|")
        if need.startswith(SETTING)
    }
    return {name for name, _ in leaves(Config())} | named | needed | set(FACTS)


def _logs(
    run: Any, layout: str | None, framework: str | None, mapping: Mapping[str, str] | None
) -> list[RunLog]:
    """Return the logs of one argument."""
    if isinstance(run, RunLog):
        return [run]
    path = run if isinstance(run, str | Path) else run.path
    names = needed_names()
    return read_logs(path, layout=layout, framework=framework, mapping=mapping, names=names)
