"""`keel.models.products` by numba's own call of scipy's BLAS."""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from pathlib import Path

import numpy as np

from keel.models import compiling

SOURCES = (Path(__file__), Path(compiling.__file__))
vectorised = compiling.keeping(SOURCES)


@vectorised
def multiply(x, turn_x, y, turn_y, keep, out):
    """`out` = x·y + keep·`out`, of x or y the transposes if they are to be turned."""
    if turn_x:
        found = np.dot(x.T, y.T) if turn_y else np.dot(x.T, y)
    else:
        found = np.dot(x, y.T) if turn_y else np.dot(x, y)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = found[i, j] + (keep * out[i, j] if keep else np.float32(0.0))
