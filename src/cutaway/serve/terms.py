"""How a number came about, in pieces that a page can show: the products of a sum, and steps of arithmetic in LaTeX."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cutaway.serve.protocol import Term
from cutaway.spec import NormSpec


class Made:
    """How a number came about: the products of a sum, largest first, or steps of arithmetic.

    `rows` are the two rows of factors in their own order, where the sum is a dot product of two rows.
    """

    def __init__(
        self, left: str = "", right: str = "", products: list[Term] | None = None, steps: list[str] | None = None
    ) -> None:
        self.left, self.right = left, right
        self.products, self.steps = products or [], steps or []
        self.rows: tuple[np.ndarray, np.ndarray] | None = None


def dotted(
    left: str, right: str, one: Any, other: Any, names: Sequence[str] | None = None, steps: list[str] | None = None
) -> Made:
    """The dot product of two rows of numbers, told term by term."""
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    product = one * other
    order = np.argsort(-np.abs(product), kind="stable")
    terms = [
        Term(names[i] if names else str(i), float(one[i]), float(other[i]), float(product[i])) for i in order.tolist()
    ]
    made = Made(left, right, terms, steps)
    made.rows = (one, other)
    return made


def norm_steps(spec: NormSpec, x: np.ndarray, c: int, gains: object, found: float) -> list[str]:
    """How element `c` of a row `x` was brought to its size, gained and shifted."""
    gain = getattr(gains, "gain", None)
    bias = getattr(gains, "bias", None)
    g = "" if gain is None else rf" \cdot {factor(float(np.asarray(gain)[c]))}"
    b = "" if bias is None else rf" + {factor(float(np.asarray(bias)[c]))}"
    if spec.kind == "layer":
        mean, size = float(x.mean()), float(np.sqrt(x.var() + spec.eps))
        top = rf"{number(float(x[c]))} - {factor(mean)}"
        named = rf"\mu = {number(mean)},\ \sqrt{{\sigma^2 + \epsilon}} = {number(size)}"
    else:
        size = float(np.sqrt(np.square(x).mean() + spec.eps))
        top = number(float(x[c]))
        named = rf"\mathrm{{rms}} = \sqrt{{\tfrac1{{{len(x)}}} \textstyle\sum_j x_j^2 + \epsilon}} = {number(size)}"
    return [named, rf"\frac{{{top}}}{{{number(size)}}}{g}{b} = {number(found)}"]


def normed(spec: NormSpec, x: np.ndarray, gains: object) -> np.ndarray:
    """A whole row brought to its size, gained and shifted, in float64."""
    middle = x - x.mean() if spec.kind == "layer" else x
    out = middle / np.sqrt(np.square(middle).mean() + spec.eps)
    gain, bias = getattr(gains, "gain", None), getattr(gains, "bias", None)
    out = out if gain is None else out * np.asarray(gain, dtype=np.float64)
    return out if bias is None else out + np.asarray(bias, dtype=np.float64)


def through(linear: Any, row: np.ndarray) -> np.ndarray:
    """One row through a whole matrix and its bias, in float64."""
    weight, bias = linear.weight, linear.bias
    out = weight.take(range(weight.shape[0]), np.float64) @ row.astype(np.float64)
    return out if bias is None else out + np.asarray(bias, dtype=np.float64)


def biased(spec_bias: Any, output: int, found: float) -> list[str]:
    """The step that adds a bias to a sum; none where there is no bias."""
    if spec_bias is None:
        return []
    bias = float(np.asarray(spec_bias)[output])
    return [rf"\ldots + b = {number(found - bias)} + {factor(bias)} = {number(found)}"]


def number(value: float) -> str:
    """A number in LaTeX with four significant digits."""
    if value == float("-inf"):
        return r"-\infty"
    text = f"{value:.4g}"
    if "e" in text:
        mantissa, power = text.split("e")
        return rf"{mantissa}\cdot 10^{{{int(power)}}}"
    return text


def factor(value: float) -> str:
    """A number that stands after a sign, in brackets where it is negative."""
    return number(value) if value >= 0 else f"({number(value)})"
