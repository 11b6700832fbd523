"""A picture of a hockey game, with NumPy alone.

Every shape is a signed distance in pixels, negative inside. So its edge can be smooth.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.worlds.hockey.physics import (
    CORNERS,
    GOAL_HALF_WIDTH,
    HALF_LENGTH,
    HALF_WIDTH,
    PUCK_RADIUS,
)

PIXELS_PER_METRE = 48
WIDTH, HEIGHT = 480, 384
ICE, LINE, CENTRE_LINE = (247, 250, 252), (178, 205, 226), (224, 150, 150)
WALL, NET, PUCK = (52, 61, 76), (250, 214, 150), (24, 26, 30)
COLOURS = (222, 83, 52), (52, 120, 190)

Image = NDArray[np.uint8]
Distance = NDArray[np.floating]


def draw(state: tuple[float, ...]) -> Image:
    """RGB [384, 480, 3] of a state of ``hockey_physics``; player 0 is on the left."""
    image: Image = _rink().copy()
    x, y, angle = state[:3]
    _racket(image, x, y, angle, COLOURS[0])
    x, y, angle = state[6:9]
    _racket(image, -x, -y, angle + math.pi, COLOURS[1])
    x, y = state[12:14]
    region, right, up = _region(x, y, PUCK_RADIUS)
    _paint(image[region], np.hypot(right, up) - PUCK_RADIUS, PUCK)
    for keep, colour in zip(state[17:], COLOURS, strict=True):
        if keep > 0:  # the puck of a player that keeps it has a dot of the player's colour
            _paint(image[region], np.hypot(right, up) - PUCK_RADIUS / 2, colour)
    return image


@cache
def _rink() -> Image:
    image = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
    image[:] = WALL
    x, y = _grid(slice(0, HEIGHT), slice(0, WIDTH))
    goal = np.maximum(np.abs(x) - 4.45, np.abs(y) - GOAL_HALF_WIDTH)
    _paint(image, goal, NET)
    ice = np.maximum(np.abs(x) - HALF_LENGTH, np.abs(y) - HALF_WIDTH)
    _paint(image, ice, ICE)
    ring = np.abs(np.hypot(x, y) - 1.2) - 0.03
    _paint(image, ring, LINE)
    for side in (-1, 1):
        crease = np.abs(np.hypot(x - side * HALF_LENGTH, y) - GOAL_HALF_WIDTH) - 0.03
        _paint(image, np.maximum(crease, ice), LINE)
        line = np.maximum(np.abs(x - side * HALF_LENGTH) - 0.03, np.abs(y) - GOAL_HALF_WIDTH)
        _paint(image, line, CENTRE_LINE)
    _paint(image, np.maximum(np.abs(x) - 0.03, ice), CENTRE_LINE)
    return image


def _racket(image: Image, x: float, y: float, angle: float, colour: tuple[int, ...]) -> None:
    region, right, up = _region(x, y, 0.5)
    c, s = math.cos(angle), math.sin(angle)
    along, across = c * right + s * up, np.abs(c * up - s * right)
    outside = np.full_like(along, -math.inf)
    for (x_0, y_0), (x_1, y_1) in pairwise(CORNERS):
        length = math.hypot(x_1 - x_0, y_1 - y_0)
        depth = (along - x_0) * (y_1 - y_0) - (across - y_0) * (x_1 - x_0)
        outside = np.maximum(outside, depth / length)
    _paint(image[region], outside, tuple(part // 2 for part in colour))
    _paint(image[region], outside + 0.04, colour)


def _region(x: float, y: float, radius: float) -> tuple[tuple[slice, slice], Distance, Distance]:
    """The pixels around a point, and how far right of it and above it they are."""
    row, column = HEIGHT / 2 - y * PIXELS_PER_METRE, WIDTH / 2 + x * PIXELS_PER_METRE
    reach = radius * PIXELS_PER_METRE + 2
    rows = slice(max(0, int(row - reach)), max(0, int(row + reach) + 1))
    columns = slice(max(0, int(column - reach)), max(0, int(column + reach) + 1))
    right, up = _grid(rows, columns)
    return (rows, columns), right - x, up - y


def _grid(rows: slice, columns: slice) -> tuple[Distance, Distance]:
    row = np.arange(HEIGHT, dtype=np.float32)[rows, None]
    column = np.arange(WIDTH, dtype=np.float32)[None, columns]
    x = (column + 0.5 - WIDTH / 2) / PIXELS_PER_METRE
    return x, (HEIGHT / 2 - row - 0.5) / PIXELS_PER_METRE


def _paint(image: Image, distance: Distance, colour: tuple[int, ...]) -> None:
    """Paint where the distance in metres is negative, with a smooth edge of one pixel."""
    cover = np.clip(0.5 - distance * PIXELS_PER_METRE, 0.0, 1.0)[..., None]
    image[:] = image + cover * (np.array(colour) - image)
