"""Colours by numbers: contrast after WCAG 2, distance in Oklab, and how a person without M cones sees them."""

from __future__ import annotations

from collections.abc import Sequence

from textual.color import Color

Linear = tuple[float, float, float]


def contrast(one: Color, other: Color) -> float:
    """The contrast ratio of WCAG 2, 1..21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def as_deuteranope(colour: Color) -> Color:
    """As it looks without M cones: the matrix of Machado, Oliveira and Fernandes (2009) for severity 1."""
    matrix = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
    return Color(*(_encoded(value) for value in _times(matrix, _linear(colour))))


def distance(one: Color, other: Color) -> float:
    """The Euclidean distance in Oklab (Ottosson, 2020): about 0.02 can be told apart side by side."""
    return sum((a - b) ** 2 for a, b in zip(_oklab(one), _oklab(other), strict=True)) ** 0.5


def _oklab(colour: Color) -> Linear:
    to_lms = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566))
    cones = _times((*to_lms, (0.0883024619, 0.2817188376, 0.6299787005)), _linear(colour))
    to_lab = ((0.2104542553, 0.7936177850, -0.0040720468), (1.9779984951, -2.4285922050, 0.4505937099))
    return _times((*to_lab, (0.0259040371, 0.7827717662, -0.8086757660)), [value ** (1 / 3) for value in cones])


def _luminance(colour: Color) -> float:
    red, green, blue = _linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(colour: Color) -> Linear:
    def one(channel: int) -> float:
        value = channel / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    return one(colour.r), one(colour.g), one(colour.b)


def _encoded(value: float) -> int:
    value = min(1.0, max(0.0, value))
    return round(255 * (12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055))


def _times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> Linear:
    one, two, three = (sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
    return one, two, three
