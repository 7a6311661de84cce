"""The city drawn and filmed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from keel.apps.land.baselines import greedy_roi
from keel.apps.land.recording import GameRecord, record_game
from keel.apps.land.rendering import city_pixels, draw_city, write_city, write_gif
from keel.apps.land.report import play
from keel.apps.land.rules import SMALL, make_rules
from keel.errors import InputError


@pytest.fixture(scope="module")
def record() -> GameRecord:
    return record_game(greedy_roi, SMALL, 7)


def test_a_record_ends_with_the_npv(record: GameRecord) -> None:
    assert [snapshot.month for snapshot in record.snapshots] == list(range(31))
    assert not record.snapshots[0].npv.any()
    npv = list(play(greedy_roi, SMALL, [7]).npv.values())
    assert record.snapshots[-1].npv == pytest.approx(npv)
    assert (record.snapshots[0].owner == -1).all()
    assert (record.snapshots[-1].owner != -1).sum() > 3


def test_the_city_is_written_as_a_picture(record: GameRecord, tmp_path: Path) -> None:
    write_city(record, tmp_path / "new" / "city.png")
    with Image.open(tmp_path / "new" / "city.png") as image:
        assert image.size[0] == 1408
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for colour in ((0xE8, 0x59, 0x0C), (0x1F, 0x6F, 0xEB), (0x2B, 0x8A, 0x3E)):
        assert (pixels == colour).all(-1).sum() > 500  # of every developer something stands there


def test_the_header_describes_the_snapshot(record: GameRecord) -> None:
    header = draw_city(record, 1).axes[0]
    assert "after 1 of 30 months, NPV so far" in header.texts[0].get_text()
    legend = header.get_legend()
    assert legend is not None
    assert legend.get_texts()[0].get_text().startswith("industry: ")
    assert "so far" not in draw_city(record).axes[0].texts[0].get_text()


def test_four_developers_have_room() -> None:
    figure = draw_city(record_game(greedy_roi, make_rules(agents=4, months=2), 3))
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 4


def test_the_months_are_an_animation(record: GameRecord, tmp_path: Path) -> None:
    short = replace(record, snapshots=record.snapshots[::10])
    write_gif(short, tmp_path / "city.gif")
    with Image.open(tmp_path / "city.gif") as film:
        assert film.n_frames == 4  # type: ignore[attr-defined]
        assert film.size == city_pixels(short, 0).shape[1::-1]
    assert (tmp_path / "city.gif").stat().st_size < 200_000


def test_files_have_the_right_ending(record: GameRecord, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"picture: 'city\.jpg' must end in \.png"):
        write_city(record, tmp_path / "city.jpg")
    with pytest.raises(InputError, match=r"film: 'city\.png' must end in \.gif"):
        write_gif(record, tmp_path / "city.png")
