"""What rules read is what is read for them."""

from __future__ import annotations

import ast
from pathlib import Path

import keel.doctor.rules
from keel.doctor import outcome
from keel.doctor.reading import needed_names
from keel.tracking.metrics import REGISTRY


def test_every_metric_that_a_rule_names_is_read() -> None:
    folder = Path(keel.doctor.rules.__file__).parent
    named = {
        part
        for path in (*folder.glob("*.py"), Path(outcome.__file__))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for part in node.value.split("|")
        if part in REGISTRY
    }
    assert len(named) > 80
    assert named - set(needed_names()) == set()
