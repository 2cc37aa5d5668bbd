"""Shapes of a layer's weights, checked once when the layer is built."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ShapeError


def check_shapes(layer: str, weights: object, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare weights with what a config asks for. Raises: ShapeError that names the first one that differs."""
    for name, shape in expected.items():
        value = getattr(weights, name)
        found = None if value is None else tuple(value.shape)
        if found != shape:
            there = "nothing" if found is None else list(found)
            raise ShapeError(f"{layer} layer, weight {name}: expected {list(shape)}, found {there}")
