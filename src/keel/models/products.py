"""Matrix products for compiled loops: by the MKL inside torch where it lets itself be called, else
by the BLAS of scipy, which numba calls.

Of 32 rows, as many as a thread writes of a batch, MKL does 92 billion operations a second where
OpenBLAS does 71 (2.6 GHz, AVX-512), and it adds to what is there: the gradient of a weight needs no
second array. Everything is float32 and contiguous.
"""

# Every function is compiled: numba's decorator has no types, and signatures would say nothing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch

from keel.models import compiling


def _library() -> Path | None:
    """torch's library, if it has MKL's products in it and tells their names."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    known = all(hasattr(library, name) for name in ("sgemm_", "mkl_set_num_threads_local"))
    return path if known else None


LIBRARY = _library()
SOURCES = (
    Path(__file__),
    Path(compiling.__file__),
    Path(__file__).with_name("products_mkl.py" if LIBRARY else "products_plain.py"),
)
"""Loops that were compiled with one of them must not be taken for the other's."""

if LIBRARY is not None:
    from llvmlite import binding  # type: ignore[import-untyped]

    binding.load_library_permanently(str(LIBRARY))
    from keel.models.products_mkl import multiply
else:
    from keel.models.products_plain import multiply

vectorised = compiling.keeping(SOURCES, fastmath={"reassoc", "contract"})


@vectorised
def times_transposed(x, weight, out):
    """`out` = x·wᵀ."""
    multiply(x, False, weight, True, np.float32(0.0), out)


@vectorised
def add_product(x, y, total):
    """`total` += x·y."""
    multiply(x, False, y, False, np.float32(1.0), total)


@vectorised
def add_transposed_product(x, y, total):
    """`total` += xᵀ·y."""
    multiply(x, True, y, False, np.float32(1.0), total)


@vectorised
def add_product_of_transposed(x, y, total):
    """`total` += xᵀ·yᵀ."""
    multiply(x, True, y, True, np.float32(1.0), total)
