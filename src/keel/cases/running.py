"""From a sick run to a cured one: train, diagnose from the log alone, fix, train again, show."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.cases.case import FORMS, Case
from keel.cases.catalogue import case_named
from keel.config import to_dict
from keel.doctor.api import diagnose
from keel.doctor.examine import Diagnosis
from keel.doctor.finding import Finding
from keel.doctor.patches import Patch, patch
from keel.doctor.reading import needed_names, read_logs
from keel.doctor.run_log import RunLog
from keel.errors import InputError, KeelError, RunError, check_choice
from keel.tracking.directory import hold_folder, read_record
from keel.tracking.files import write_file
from keel.tracking.reader import last_step
from keel.tracking.record import RECORD, dump_yaml, read_config
from keel.tracking.resume import allowed, config_changes, nested
from keel.training.api import resume, train
from keel.training.kinds import MAY_CHANGE, kind_of
from keel.training.patched import patched_config
from keel.training.persist import Progress

if TYPE_CHECKING:
    from keel.training.kinds import RunKind

SICK, CURED = "sick", "cured"
PLANTED = "faults."
"""Settings of deliberate bugs, which no log of another trainer would tell: the doctor sees none."""
Tell = Callable[[str], None]
Advance = Callable[[str, float], None]
"""Called with the part that goes on and the share of it that is done."""


@dataclass(frozen=True)
class Arm:
    """One of the two runs."""

    name: str
    path: Path
    diagnosis: Diagnosis
    reused: bool
    """whether it was there already"""


@dataclass(frozen=True)
class Round:
    """One visit to the doctor."""

    arm: Arm
    """the run that was diagnosed"""
    finding: Finding
    """the first of its diagnosis"""
    patches: tuple[Patch, ...]
    """the settings that its fix changes"""


@dataclass(frozen=True)
class Outcome:
    """What a case came to."""

    case: Case
    form: str
    seed: int
    rounds: tuple[Round, ...]
    cured: Arm
    """the last run"""
    stopped: str
    """what the fix by settings alone stopped with; empty where that was not tried"""
    html: Path
    png: Path

    @property
    def sick(self) -> Arm:
        """The first run."""
        return self.rounds[0].arm

    @property
    def finding(self) -> Finding:
        """The first finding of the first run."""
        return self.rounds[0].finding

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The settings that were changed, in all rounds."""
        return tuple(one for visit in self.rounds for one in visit.patches)


def run_case(
    name: str | Case,
    *,
    runs: str | Path = "runs",
    form: str = "usual",
    seed: int = 0,
    overwrite: bool = False,
    tell: Tell = lambda _: None,
    advance: Advance = lambda *_: None,
) -> Outcome:
    """Train a sick run, diagnose it from its log, apply the fix, train again, and write the page.

    Runs that are finished are not trained again, begun ones go on.

    Args:
        name: Of the case, one of `keel.cases.CASES`; or a case of your own.
        runs: Folder of all runs.
        form: One of `FORMS`.
        seed: Of both runs.
        overwrite: Train again what is there.
        tell: Called with each line of what happens.
        advance: Called while runs go on.

    Examples:
        >>> from keel.cases import CASES
        >>> CASES["kl-explosion"].settings["region.gate"]
        False
    """
    case = case_named(name) if isinstance(name, str) else name
    check_choice("form", form, FORMS)
    folder = folder_of(case, Path(runs), form)
    with hold_folder(folder):
        if overwrite:
            _remove_runs(case, folder, seed)
        given = {**case.settings, **case.forms[form], "seed": seed}
        if case.prepare is not None:
            tell("first, what both runs begin with")
            given |= case.prepare(folder, given, seed)
        sick = _train(SICK, folder, sick_config(case, given), tell, advance)
        rounds, cured, stopped = _cure(case, arms(case, form), sick, tell, advance)
        tell(f"doctor: {cured.diagnosis.verdict}: {cured.diagnosis.sentence}")
        page = folder / "case.html"
        outcome = Outcome(case, form, seed, rounds, cured, stopped, page, page.with_suffix(".png"))
        _show(outcome)
    return outcome


def _cure(
    case: Case, names: list[str], sick: Arm, tell: Tell, advance: Advance
) -> tuple[tuple[Round, ...], Arm, str]:
    """Apply the fix of the first finding and train again, as often as the case asks for.

    Returns:
        The visits to the doctor, the last run, and what settings alone stopped with.
    """
    folder = sick.path.parents[1]
    rounds: list[Round] = []
    arm, stopped = sick, ""
    for name in names:
        if rounds and not arm.diagnosis.findings:
            break
        finding, patches = first_fix(arm.diagnosis)
        if rounds and not patches:
            break
        tell(f"doctor: {arm.diagnosis.verdict}: {finding.cause}")
        tell(f"fix: {finding.fix.text}")
        for line in [line for one in patches for line in one.lines()]:
            tell(f"  {line}")
        if case.stops and not rounds:
            stopped = _stopped(folder, patched_config(arm.path, patches))
            tell(f"that alone: {stopped}")
        if case.repaired and not rounds:
            tell(f"mended by hand: {case.repaired}")
        config = patched_config(arm.path, patches, None if rounds else case.repair)
        rounds.append(Round(arm, finding, patches))
        arm = _train(name, folder, config, tell, advance)
    return tuple(rounds), arm, stopped


def arms(case: Case, form: str) -> list[str]:
    """Return the names of the runs after the sick one, at most.

    Args:
        case: The case.
        form: One of `FORMS`.
    """
    rounds = 1 if form == "short" else case.rounds
    return [CURED, *(f"{CURED}-{number}" for number in range(2, rounds + 1))]


def folder_of(case: Case, runs: Path, form: str) -> Path:
    """Return the folder of a case: forms do not share one.

    Args:
        case: The case.
        runs: Folder of all runs.
        form: One of `FORMS`.
    """
    return runs / f"case-{case.name}{'' if form == 'usual' else f'-{form}'}"


def sick_config(case: Case, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole configuration of the sick run, checked.

    Args:
        case: The case.
        given: Its settings by dotted names.
    """
    settings = nested(given)
    kind: RunKind = kind_of(settings["env"])
    config = kind.read(settings, kind.base(settings, case.preset or None))
    kind.check(config)
    return to_dict(config)


def read_alone(run: Path) -> RunLog:
    """Return the log of a run as the doctor may read it here: without what was planted.

    Args:
        run: Folder of the run.
    """
    (log,) = read_logs(run, names=needed_names())
    settings = {k: v for k, v in log.settings.items() if not k.startswith(PLANTED)}
    return replace(log, settings=settings)


def first_fix(diagnosis: Diagnosis) -> tuple[Finding, tuple[Patch, ...]]:
    """Return the first finding of a run, and the settings that its fix changes.

    Args:
        diagnosis: Of the sick run.
    """
    if not diagnosis.findings:
        raise RunError(
            f"the doctor finds nothing in this run ({diagnosis.verdict}: {diagnosis.sentence}); "
            "try a longer form, or another --seed"
        )
    finding = diagnosis.findings[0]
    return finding, patch(finding.fix, "keel", diagnosis.log.settings)


def _train(name: str, folder: Path, config: Mapping[str, Any], tell: Tell, advance: Advance) -> Arm:
    """Train a run, or the rest of it, or take what is there; and diagnose it."""
    path = folder / name / f"seed-{config['seed']}"
    total = config["total_steps"]

    def on_iteration(newest: Progress) -> None:
        advance(f"{name} run", min(1.0, newest.steps / total))

    reused = (path / RECORD).is_file()
    if reused:
        _check_same(path, config)
    if reused and is_finished(path, total):
        tell(f"{name} run: there already, {path}")
    elif reused:
        tell(f"{name} run: goes on, {path}")
        resume(path, on_iteration=on_iteration, progress=False)
    else:
        tell(f"{name} run: {config['env']}, {total:,} steps")
        file = folder / f"{name}.yaml"
        write_file(file, dump_yaml(config).encode(errors="replace"))
        train(config=file, runs=folder, name=name, on_iteration=on_iteration, progress=False)
    advance(f"{name} run", 1.0)
    found = diagnose(read_alone(path))
    assert isinstance(found, Diagnosis)
    return Arm(name, path, found, reused)


def _stopped(folder: Path, config: Mapping[str, Any]) -> str:
    """Train with settings alone, and return the error that stops it before its second update."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file = Path(place) / "config.yaml"
        write_file(file, dump_yaml(config).encode(errors="replace"))
        try:
            train(
                config=file,
                runs=place,
                name=SICK,
                on_iteration=lambda _: False,
                progress=False,
            )
        except KeelError as error:
            return error.brief
    return "it trains on"


def is_finished(path: Path, total: int) -> bool:
    """Return whether a run has nothing left to do.

    Args:
        path: Its folder.
        total: Its steps.
    """
    return read_record(path).get("status") == "finished" and last_step(path) >= total


def _check_same(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a run that was trained with other settings."""
    wanted = kind_of(config["env"])
    stored = to_dict(wanted.read(read_config(path)))
    now = to_dict(wanted.anchored(wanted.read(dict(config))))
    changes = [c for c in config_changes(stored, now) if not allowed(c.field, MAY_CHANGE)]
    if changes:
        said = "; ".join(map(str, changes[:3]))
        raise InputError(f"{path}: was trained otherwise ({said}); --overwrite trains it again")


def _remove_runs(case: Case, folder: Path, seed: int) -> None:
    """Remove the runs of a seed, and what both began with."""
    for name in (SICK, *arms(case, "full"), "imitation"):
        shutil.rmtree(folder / name / f"seed-{seed}", ignore_errors=True)
    shutil.rmtree(folder / "demos", ignore_errors=True)


def _show(outcome: Outcome) -> None:
    """Write the page and the picture."""
    from keel.cases.page import write_page
    from keel.cases.picture import draw

    draw(outcome, outcome.png)
    write_page(outcome, outcome.html)
