"""Sizes that are equal by chance: which names of the code a comment may confuse."""

from textwrap import indent

import pytest

from sidenotes.grammar import claims


def rivals(source: str) -> str:
    """The rivals of the last claim of a source, each pair once."""
    pairs = claims(source)[-1].rivals
    return " ".join(sorted({"-".join(sorted(pair)) for pair in pairs}))


def in_function(body: str) -> str:
    return f"def f(x, k, v, p):\n{indent(body, '    ')}\n"


@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        # All ways to take a size from a shape.
        ("b, n = x.shape\nreturn x  # [b]", "b-n"),
        ("b, n = x.size()\nreturn x  # [b]", "b-n"),
        ("b, n = x.shape[0], x.size(1)\nreturn x  # [b]", "b-n"),
        ("b, n = len(x), x.size(dim=1)\nreturn x  # [b]", "b-n"),
        ("b = c = len(x)\nn = x[0].shape[0]\nreturn x  # [b]", "b-n c-n"),
        ("b, n = f(x.exp()).shape[:2]\nreturn x  # [b]", ""),
        ("b, n = x.exp()[0].shape[:2]\nreturn x  # [b]", "b-n"),
        ("b, n = len(f.x), x.stride(1)\nreturn x  # [b]", ""),
        # One axis may have two names.
        ("b, n = x.shape\nm = x.size(1)\nreturn x  # [b]", "b-m b-n"),
        ("b, *_, n = x.shape\nm = x.size(-1)\nreturn x  # [b]", ""),
        ("*_, n, d = x.shape\nm = x.size(-2)\nreturn x  # [d]", "d-m d-n"),
        ("b, n = x.shape\nm, _ = x.shape[1:]\nreturn x  # [b]", "b-m b-n"),
        ("b, n = x.shape\nd = x.shape[p]\nreturn x  # [b]", "b-n"),
        # A name that changes has no meaning of its own.
        ("b, n = x.shape\nn += 1\nreturn x  # [b]", ""),
        ("b, p = x.shape\nreturn x  # [b]", ""),
        # Only tensors that the value is made of.
        ("n, m = len(x), len(k)\nreturn v  # [n]", ""),
        ("n, m = len(x), len(k)\nreturn x + k  # [n]", "m-n"),
        ("n, m = len(x), len(k)\nreturn v.view(m)  # [n]", "m-n"),
        ("n, m = len(x), len(k)\nv, y = k, v\nreturn y  # [n]", ""),
        ("n, m = len(x), len(k)\nv, y = k, v\nreturn v  # [n]", "m-n"),
        ("n, m = len(x), len(k)\ny, z = v, k  # y: [n, n]", ""),
        ("n, m = len(x), len(k)\ny, z = v, k  # z: [n, n]", "m-n"),
        ("n, m = len(x), len(k)\nfor y in k:\n    z = y  # [n]", "m-n"),
        ("n, m = len(x), len(k)\nfor y in k:  # [n]\n    z = y", "m-n"),
        ("n, m = len(x), len(k)\nv += k\nreturn v  # [n]", "m-n"),
        ("n, m = len(x), len(k)\nv: int = k\nreturn v  # [n]", "m-n"),
        ("n, m = len(x), len(k)\ny = v\ny += 1  # [n]", ""),
        ("n, m = len(x), len(k)\ny = k\ny += 1  # [n]", "m-n"),
        ("n, m = len(x), len(k)\ny = v  # [n]\ny = k", ""),
        ("n, m = len(x), len(k)\ny = v.view(n)\nreturn y  # [n]", "m-n"),
        ("n, b = x.shape\nm, d = k.shape\ny = v[n]\nreturn y  # [n]", "b-n d-n m-n"),
        ("n, m = len(x), len(self.k)\nreturn self.v  # [n]", ""),
        ("n, m = len(x), len(self.k)\nreturn self.k  # [n]", "m-n"),
        # The sizes of a tensor that is made of another one are those of the other.
        ("n = len(x)\ny = x @ k\nm = len(y)\nreturn x  # [n]", ""),
        ("n = len(x)\ny = x @ k\nm = len(y)\nreturn y  # [n]", ""),
        ("n = len(x)\nm = len(k)\nk = x @ k\nreturn k  # [n]", "m-n"),
        # What the code requires to be equal.
        ("b, c = len(x), len(k)\nassert b == c\nreturn k  # [b]", ""),
        ("b, c = len(x), len(k)\nassert b != c\nreturn k  # [b]", "b-c"),
        ("b, c = len(x), len(k)\nif c != b: raise p\nreturn k  # [b]", ""),
        ("b, c = len(x), len(k)\nif c == b: raise p\nreturn k  # [b]", "b-c"),
        ("b, c = len(x), len(k)\nif p or c != b:\n    raise p\nreturn k  # [b]", ""),
        ("b, c = len(x), len(k)\nif c != b: p = 1\nreturn k  # [b]", "b-c"),
    ],
)
def test_sizes_of_the_tensors_of_a_value_are_rivals(body: str, pairs: str) -> None:
    assert rivals(in_function(body)) == pairs


@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ("self.n = n\nself.m: int = m", "m-n"),
        ("self.n, self.m = n, m", "m-n"),
        ("self.n = self.m = n", ""),
        ("self.n = 3\nself.m = 3", "m-n"),
        ("self.n = config.n\nself.m = config['m']", "m-n"),
        ("self.n = config.n\nself.m = config.n", ""),
        ("self.n = n\nself.m = self.n", ""),
        ("self.n = n\nself.m = m // 2", ""),
        ("self.n = n\nm = m or n\nself.m = m", ""),
        ("self.n = n\nself.m = m\nself.m = 3", ""),
        ("self.n = n\nother.m = m", ""),
    ],
)
def test_attributes_from_different_parameters_are_rivals(body: str, pairs: str) -> None:
    method = f"def __init__(self, config, n, m):\n{indent(body, '    ')}\n"
    method += "def f(self, x):\n    return x  # [n]"
    assert rivals(f"class A:\n{indent(method, '    ')}") == pairs


def test_names_in_the_code_of_a_value_are_known() -> None:
    body = "y = x.view(p, self.config.heads)\nz = y + k\nv = v + 1\nreturn z  # [3]"
    (claim,) = claims(in_function(body))
    assert claim.used >= {"x", "k", "p", "heads"}
    assert "v" not in claim.used
