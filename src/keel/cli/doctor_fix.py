"""`keel doctor --fix`: the settings of a run with the fix, and the command that trains it again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.errors import InputError
from keel.printing import printable
from keel.tracking.files import write_file

if TYPE_CHECKING:
    from keel.doctor.examine import Diagnosis
    from keel.doctor.finding import Finding
    from keel.doctor.patches import Patch

DEFAULT = Path("fixed.yaml")
HEADER = "# written by keel doctor --fix"


def write_fix(diagnosis: Diagnosis, file: Path | None, quiet: bool) -> None:
    """Write what a run is to be trained with, and print how.

    Args:
        diagnosis: Of one run.
        file: Where to write it; by default `fixed.yaml` for runs of Keel, nowhere for others.
        quiet: Print nothing.
    """
    from keel.doctor.patches import patch, snippet

    finding = _first_with_changes(diagnosis)
    log = diagnosis.log
    patches = patch(finding.fix, log.framework, log.settings)
    if log.framework == "keel":
        said = _write_config(diagnosis, finding, patches, file)
    else:
        said = snippet(patches, log.framework, log.settings)
        if file is not None:
            write_file(file, "".join(f"{line}\n" for line in said).encode(errors="replace"))
            said.append(f"written: {file}")
    if not quiet:
        print(printable("\n".join(["", f"fix of {finding.rule}: {finding.fix.text}", *said])))  # noqa: T201


def _first_with_changes(diagnosis: Diagnosis) -> Finding:
    """Return the first finding that a setting cures; only one at a time shows what cured it."""
    for finding in diagnosis.findings:
        if finding.fix.changes:
            return finding
    if not diagnosis.findings:
        raise InputError(f"--fix: nothing to fix: {diagnosis.verdict}, {diagnosis.sentence}")
    first = diagnosis.findings[0]
    raise InputError(f"--fix: no setting cures {first.rule}: {first.fix.text}")


def _write_config(
    diagnosis: Diagnosis, finding: Finding, patches: tuple[Patch, ...], file: Path | None
) -> list[str]:
    """Write a whole configuration, and return the lines that say what to do with it."""
    config, env = _patched_config(diagnosis, patches)
    target = DEFAULT if file is None else file
    if file is None and target.exists() and not target.read_text("utf-8").startswith(HEADER):
        raise InputError(f"{target}: exists, and is not from here; name a file: --fix FILE.yaml")
    from keel.tracking.record import dump_yaml

    changes = "".join(f"# {line}\n" for one in patches for line in one.lines())
    text = f"{HEADER}: {finding.rule}\n{changes}{dump_yaml(config)}"
    write_file(target, text.encode(errors="replace"))
    lines = [line for one in patches for line in one.lines()]
    return [*lines, f"written: {target}", f"keel train {env} --config {shlex.quote(str(target))}"]


def _patched_config(diagnosis: Diagnosis, patches: tuple[Patch, ...]) -> tuple[dict[str, Any], str]:
    """Return the settings of a run with its patches, as its kind of run reads and checks them."""
    from keel.training.patched import patched_config

    path = diagnosis.log.path
    if path is None:
        raise InputError("--fix: the run's settings are not known; name the folder of the run")
    config = patched_config(path if path.is_dir() else path.parent, patches)
    return config, shlex.quote(str(config["env"]))
