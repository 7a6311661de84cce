"""Products that compiled loops call, by either library, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from keel.models import products, products_plain

WAYS = {"plain": products_plain.multiply}
if products.LIBRARY is not None:
    from keel.models import products_mkl

    WAYS["mkl"] = products_mkl.multiply


@pytest.mark.parametrize("keep", [0.0, 1.0])
@pytest.mark.parametrize("turns", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("way", WAYS)
def test_products_are_those_of_numpy(way: str, turns: tuple[bool, bool], keep: float) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 7)).astype(np.float32), rng.normal(size=(7, 3)).astype(np.float32)
    before = rng.normal(size=(5, 3)).astype(np.float32)
    given_x = np.ascontiguousarray(x.T) if turns[0] else x
    given_y = np.ascontiguousarray(y.T) if turns[1] else y
    out = before.copy()
    WAYS[way](given_x, turns[0], given_y, turns[1], np.float32(keep), out)
    np.testing.assert_allclose(out, x @ y + keep * before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_kept_may_be_anything(way: str) -> None:
    out = np.full((2, 2), np.nan, np.float32)
    eye = np.eye(2, dtype=np.float32)
    WAYS[way](eye, False, eye, True, np.float32(0.0), out)
    np.testing.assert_array_equal(out, eye)


def test_the_names_of_products_say_what_they_do() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(5, 6)).astype(np.float32)
    out = np.zeros((4, 5), np.float32)
    products.times_transposed(x, y, out)
    np.testing.assert_allclose(out, x @ y.T, rtol=1e-5, atol=1e-5)
    turned_x, turned_y = np.ascontiguousarray(x.T), np.ascontiguousarray(y.T)
    for add, a, b in (
        (products.add_product, x, turned_y),
        (products.add_transposed_product, turned_x, turned_y),
        (products.add_product_of_transposed, turned_x, y),
    ):
        total = np.ones((4, 5), np.float32)
        add(a, b, total)
        np.testing.assert_allclose(total, 1.0 + x @ y.T, rtol=1e-5, atol=1e-5)


def test_without_torchs_library_scipy_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(products.torch, "__file__", str(tmp_path / "__init__.py"))
    assert products._library() is None
