"""Settings of a run with the changes of a fix, as its kind of run reads and checks them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.config import to_dict
from keel.config.reading import rename_settings
from keel.tracking.record import read_config
from keel.tracking.resume import flat, nested
from keel.training.kinds import kind_of

if TYPE_CHECKING:
    from keel.doctor.patches import Patch


def patched_config(
    run: Path, patches: Iterable[Patch], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the whole configuration of a run with patches, checked, as plain data.

    Args:
        run: Folder of the run.
        patches: Of a fix, in Keel's own words.
        more: Settings by dotted names that go on top.
    """
    from keel.doctor.patches import patched

    data = read_config(run)
    stored = to_dict(kind_of(data.get("env")).read(data))
    kind = kind_of(stored["env"])
    settings = dict(flat(rename_settings(stored)))
    config = kind.read(nested({**patched(settings, patches), **(more or {})}))
    kind.check(config)
    return to_dict(config)
