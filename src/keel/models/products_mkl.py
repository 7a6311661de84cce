"""`keel.models.products` by MKL's `sgemm_`, which the caller has loaded."""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from pathlib import Path

import numpy as np
from numba import types

from keel.models import compiling

SOURCES = (Path(__file__), Path(compiling.__file__))
vectorised = compiling.keeping(SOURCES)
sgemm = types.ExternalFunction("sgemm_", types.void(*[types.intp] * 13))
"""By name, and not by address, so that what is compiled can be kept on disk. It takes addresses."""

YES, NO = ord("T"), ord("N")


@vectorised
def multiply(x, turn_x, y, turn_y, keep, out):
    """`out` = x·y + keep·`out`, of x or y the transposes if they are to be turned.

    In Fortran's order of columns all three are their transposes: outᵀ = yᵀ·xᵀ. What is given by
    its address has to be used once more afterwards, or numba may free it before the call.
    """
    inner = x.shape[0] if turn_x else x.shape[1]
    turns = np.empty(2, np.int8)
    turns[0], turns[1] = YES if turn_y else NO, YES if turn_x else NO
    sizes = np.empty(6, np.int32)
    sizes[0], sizes[1], sizes[2] = out.shape[1], out.shape[0], inner
    sizes[3], sizes[4], sizes[5] = y.shape[1], x.shape[1], out.shape[1]
    factors = np.empty(2, np.float32)
    factors[0], factors[1] = np.float32(1.0), keep
    t, s, f = turns.ctypes.data, sizes.ctypes.data, factors.ctypes.data
    sgemm(  # type: ignore[call-overload]
        t, t + 1, s, s + 4, s + 8, f, y.ctypes.data, s + 12, x.ctypes.data, s + 16, f + 4,
        out.ctypes.data, s + 20,
    )  # fmt: skip
    return turns[0] + sizes[0] + factors[0]
