"""Token-level RL for language models: tasks with verifiers, rewards, tools, and the loop over them.

Names are loaded when they are first used: transformers takes seconds, which others need not pay.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.apps.language.tasks import Example, Task
    from keel.training.persist import Progress

__all__ = ["Example", "Task", "train_language"]


def __getattr__(name: str) -> Any:
    if name in ("Example", "Task"):
        from keel.apps.language import tasks

        return getattr(tasks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train_language(
    settings: Mapping[str, Any], runs: Path | str = "runs", name: str | None = None
) -> Generator[Progress, None, Any]:
    """Train a language model; yields after every update what `keel train language` shows.

    `settings` are those of the task's preset with changes on top, as in a YAML file.
    """
    from keel.apps.language.config import from_dict
    from keel.apps.language.presets import preset_for
    from keel.training.runner import start

    base = preset_for(settings.get("task", "lookup"), settings.get("algo"))
    return start(from_dict(settings, base), Path(runs), name)
