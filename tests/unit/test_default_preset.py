"""The defaults of environments without a preset, held to the table that was published of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.compare.verdict import Problems, decide, effect_of
from keel.config import to_dict
from keel.presets import preset, preset_for
from keel.tracking.resume import flat

DATA = Path(__file__).resolve().parents[2] / "docs" / "data" / "defaults.json"
FEWEST_ENVIRONMENTS, FEWEST_SEEDS = 8, 10


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    """What `python -m benchmarks.defaults table` wrote."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def test_the_default_preset_is_the_one_that_was_measured(published: dict[str, Any]) -> None:
    now = dict(flat(to_dict(preset("default"))))
    assert {name: now[name] for name in published["settings"]} == published["settings"]


def test_the_published_environments_take_the_default_preset(published: dict[str, Any]) -> None:
    assert len(published["cells"]) >= FEWEST_ENVIRONMENTS
    assert {preset_for(env)[0] for env in published["cells"]} == {"default"}


def test_the_published_verdicts_follow_from_the_published_scores(
    published: dict[str, Any],
) -> None:
    for env, cell in published["cells"].items():
        scores = [
            torch.tensor(cell[side]["scores"], dtype=torch.float64) for side in ("sb3", "keel")
        ]
        assert [len(x) for x in scores] == [FEWEST_SEEDS] * 2, env
        effect = effect_of([scores[0]], [scores[1]])
        assert decide(effect, Problems(), Problems()).decision == cell["verdict"], env


def test_the_defaults_are_never_rolled_back_against_sb3(published: dict[str, Any]) -> None:
    cells = published["cells"].values()
    verdicts = [cell["verdict"] for cell in cells]
    assert "roll back" not in verdicts
    assert verdicts.count("keep") >= 3
    higher = sum(cell["keel"]["mean"] > cell["sb3"]["mean"] for cell in cells)
    assert higher >= 0.75 * len(verdicts)
