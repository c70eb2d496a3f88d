"""Plots: the data that the figures show, and errors."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from torch import Tensor

from headnotes.plots import (
    MAX_LABELED,
    PLAIN,
    SCALED,
    display_attention,
    display_scaling,
    jacobian_norms,
)

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
QUERIES = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
]  # labels need not be unique
KEYS = ["le", "chat", "dort", "sur", "un", "grand", "lit"]
HEADS = 3


@pytest.fixture(autouse=True)
def canvas() -> Iterator[None]:
    """No window, default settings, and no open figure afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        plt.switch_backend("agg")
        plt.close("all")
        yield
        plt.close("all")


def weights(*shape: int, **like: Any) -> Tensor:
    """Rows that differ, and sum to 1 over axis 1."""
    return (3 * torch.randn(shape, **like)).softmax(dim=1)


def maps_of(figure: Figure) -> list[Axes]:
    """The axes of heatmaps, without the color bar."""
    return figure.axes[:-1]


def mesh_of(ax: Axes) -> Any:
    (mesh,) = (c for c in ax.collections if isinstance(c, QuadMesh))
    return mesh


def cells_of(ax: Axes) -> Tensor:
    return torch.tensor(mesh_of(ax).get_array().tolist(), dtype=torch.float64)


def words_of(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def render(figure: Figure, kind: str = "png") -> bytes:
    file = BytesIO()
    figure.savefig(file, format=kind)
    return file.getvalue()


# Heatmaps of attention weights


def test_each_cell_is_the_weight_of_its_query_and_key(device: torch.device) -> None:
    attention = weights(5, 7, HEADS, device=device)
    axes = maps_of(display_attention(QUERIES, KEYS, attention))
    assert len(axes) == HEADS
    for head, ax in enumerate(axes):
        assert torch.equal(cells_of(ax), attention[:, :, head].double().cpu())
        assert ax.get_title() == f"head {head}"
        assert ax.get_aspect() == 1
        # The first query is at the top, the first key on the left.
        assert ax.get_ylim() == (5, 0)
        assert ax.get_xlim() == (0, 7)


def test_one_head_is_one_map_without_a_title() -> None:
    attention = weights(5, 7)
    figure = display_attention(QUERIES, KEYS, attention)
    (ax,) = maps_of(figure)
    assert torch.equal(cells_of(ax), attention.double())
    assert ax.get_title() == ""
    assert words_of(ax.yaxis) == QUERIES
    assert words_of(ax.xaxis) == KEYS
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("query", "key")
    top = attention.max().item()
    assert figure.axes[-1].get_ylabel() == f"weight, from 0 to {top:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_one_scale_from_0_to_the_largest_weight_serves_all_heads_and_says_so(
    heads: int,
) -> None:
    attention = weights(5, 7, heads)
    attention[:, :, 0] = 1 / 7  # a head with uniform weights must be pale
    figure = display_attention(QUERIES, KEYS, attention)
    top = attention.max().item()
    for ax in maps_of(figure):
        assert mesh_of(ax).get_clim() == (0, top)
        assert mesh_of(ax).get_cmap().name == "cividis"
    bar = figure.axes[-1]
    assert bar.get_ylim() == (0, top)
    note = "\n(one scale for all heads)" if heads > 1 else ""
    assert bar.get_ylabel() == f"weight, from 0 to {top:.2g}{note}"


def test_titles_name_maps_that_are_not_heads() -> None:
    titles = ["before", "after $5 of training", "much later"]
    figure = display_attention(QUERIES, KEYS, weights(5, 7, 3), titles=titles)
    assert [ax.get_title() for ax in maps_of(figure)] == titles
    assert "one scale for all maps" in figure.axes[-1].get_ylabel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "columns", "left", "lowest"),
    [
        (1, 2, {0}, {0}),
        (3, 1, {0, 1, 2}, {2}),
        (3, 2, {0, 2}, {1, 2}),
        (3, 7, {0}, {0, 1, 2}),
        (8, 3, {0, 3, 6}, {5, 6, 7}),
    ],
)
def test_any_grid_has_words_on_its_left_and_lowest_maps(
    heads: int, columns: int, left: set[int], lowest: set[int]
) -> None:
    figure = display_attention(QUERIES, KEYS, weights(5, 7, heads), columns=columns)
    axes = maps_of(figure)
    assert len(axes) == heads
    for n, ax in enumerate(axes):
        assert words_of(ax.yaxis) == (QUERIES if n in left else [""] * 5)
        assert words_of(ax.xaxis) == (KEYS if n in lowest else [""] * 7)
        assert ax.get_ylabel() == ("query" if n in left else "")
        assert ax.get_xlabel() == ("key" if n in lowest else "")
        spec = ax.get_subplotspec()
        assert spec is not None
        wide = min(columns, heads)
        assert spec.get_gridspec().ncols == wide
        assert (spec.rowspan.start, spec.colspan.start) == divmod(n, wide)


@pytest.mark.parametrize("sharpness", [0.3, 3])
def test_few_cells_show_their_weights_in_a_contrasting_color(
    sharpness: float,
) -> None:
    attention = (sharpness * torch.randn(5, 7, HEADS)).softmax(dim=1)
    figure = display_attention(QUERIES, KEYS, attention)
    for head, ax in enumerate(maps_of(figure)):
        assert len(ax.texts) == 5 * 7
        for text in ax.texts:
            x, y = text.get_position()
            weight = attention[int(y), int(x), head].item()
            assert text.get_text() == f"{weight:.2f}"
            cell = mesh_of(ax).to_rgba(weight)
            assert contrast(text.get_color(), cell) > 3.5


def contrast(one: Any, two: Any) -> float:
    """WCAG's ratio of luminances."""
    luminances = []
    for color in (one, two):
        rgb = matplotlib.colors.to_rgb(color)
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb
        ]
        r, g, b = linear
        luminances.append(0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05)
    return float(max(luminances) / min(luminances))


def test_many_cells_show_colors_only() -> None:
    for n, texts in ((MAX_LABELED, MAX_LABELED * 2), (MAX_LABELED + 1, 0)):
        words = [str(i) for i in range(n)]
        (ax,) = maps_of(display_attention(words, ["a", "b"], weights(n, 2)))
        assert len(ax.texts) == texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_len", "k_len", "heads"), [(1, 1, 1), (1, 2, 2), (5, 7, 3), (29, 31, 2)]
)
def test_every_label_is_inside_of_the_figure(
    q_len: int, k_len: int, heads: int
) -> None:
    words = [f"word{i}" for i in range(31)]
    attention = weights(q_len, k_len, heads)
    figure = display_attention(words[:q_len], words[:k_len], attention)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    page = figure.bbox
    for ax in figure.axes:
        box = ax.get_tightbbox(canvas.get_renderer())
        assert box is not None
        assert page.x0 <= box.x0 + 1
        assert page.y0 <= box.y0 + 1
        assert box.x1 - 1 <= page.x1
        assert box.y1 - 1 <= page.y1


@pytest.mark.slow
def test_figures_are_saved_as_svg_and_png() -> None:
    figure = display_attention(QUERIES, KEYS, weights(5, 7, HEADS))
    assert render(figure, "png").startswith(b"\x89PNG")
    svg = render(figure, "svg").decode()
    assert svg.startswith("<?xml")
    assert "<image" not in svg  # no bitmap that blurs, and no URL


def test_a_token_with_dollar_signs_is_not_parsed_as_a_formula() -> None:
    words = ["$", "x_1", "$\\bad{$"]
    figure = display_attention(words, words, weights(3, 3), titles=["$\\bad{$"])
    render(figure)
    assert words_of(maps_of(figure)[0].yaxis) == words


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_every_real_dtype_is_drawn_as_it_is(
    device: torch.device, dtype: torch.dtype
) -> None:
    attention = (2 * weights(5, 7, device=device)).to(dtype)
    (ax,) = maps_of(display_attention(QUERIES, KEYS, attention))
    assert torch.equal(cells_of(ax), attention.double().cpu())


def test_the_tensor_is_not_modified_and_may_change_later() -> None:
    leaf = torch.randn(5, 7, 2, dtype=torch.float64, requires_grad=True)
    attention = leaf.softmax(dim=1)
    before = attention.detach().clone()
    figure = display_attention(QUERIES, KEYS, attention)
    assert attention.requires_grad
    assert torch.equal(attention, before)
    attention.detach().zero_()
    assert torch.equal(cells_of(figure.axes[0]), before[:, :, 0])


@pytest.mark.slow
def test_weights_that_are_all_zero_are_drawn_dark() -> None:
    figure = display_attention(QUERIES, KEYS, torch.zeros(5, 7, 2))
    assert mesh_of(figure.axes[0]).get_clim() == (0, 1)
    assert "from 0 to 0\n" in figure.axes[-1].get_ylabel()
    render(figure)


def test_weights_above_1_as_after_dropout_are_drawn() -> None:
    (ax,) = maps_of(display_attention(QUERIES, KEYS, 2 * torch.eye(5, 7)))
    assert mesh_of(ax).get_clim() == (0, 2)


@pytest.mark.slow
def test_a_heads_first_tensor_is_refused_by_its_sums() -> None:
    words = QUERIES
    right = weights(5, 5, 5)  # [q_len, k_len, heads]
    right[3] = 0  # a fully masked row does not sum to 1
    display_attention(words, words, right)
    with pytest.raises(ValueError, match="looks like"):
        display_attention(words, words, right.permute(2, 0, 1))
    # After dropout the sums do not decide, and a uniform tensor fits either way.
    display_attention(words, words, 2 * right * (torch.rand(5, 5, 5) < 0.5))
    display_attention(words, words, torch.full((5, 5, 5), 0.2))


# The scaling demonstration


def some_scores(samples: int = 101, k_len: int = 7) -> dict[int, Tensor]:
    scores = {}
    for d_k in (2, 64, 512):
        query, key = torch.randn(samples, 1, d_k), torch.randn(samples, k_len, d_k)
        scores[d_k] = (query * key).sum(dim=-1)
    return scores


@pytest.mark.slow
def test_scaling_shows_scores_weights_and_jacobians_of_each_width() -> None:
    scores = some_scores()
    figure = display_scaling(scores)
    grid = [figure.axes[n : n + 3] for n in (0, 3, 6)]
    assert [ax.get_title() for ax in grid[0]] == [f"$d_k$ = {d}" for d in scores]
    for column, (d_k, plain) in enumerate(scores.items()):
        plain = plain.double()
        for n, (x, color) in enumerate([(plain, PLAIN), (plain / d_k**0.5, SCALED)]):
            line: Any = grid[1][column].lines[n]
            assert line.get_color() == color
            expected = x.softmax(1).sort(dim=1, descending=True).values.mean(0)
            assert list(line.get_xdata()) == list(range(1, 8))
            torch.testing.assert_close(
                torch.tensor(line.get_ydata(), dtype=torch.float64), expected
            )
            # All scores have one range, so that their spreads can be compared.
            assert grid[0][column].get_xlim() == grid[0][0].get_xlim()
            for ax, values in ((grid[0][column], x), (grid[2][column], norms(x))):
                outline: Any = next(p for p in ax.patches if hex_of(p) == color)
                assert_histogram(outline.get_xy(), values.flatten())


def hex_of(patch: Any) -> str:
    return matplotlib.colors.to_hex(patch.get_edgecolor())


def norms(scores: Tensor) -> Tensor:
    """The norm of the Jacobian, by differentiating each row."""
    jacobians = torch.func.vmap(torch.func.jacrev(lambda s: s.softmax(0)))(scores)
    return torch.stack([jacobian.norm() for jacobian in jacobians])


def assert_histogram(path: Any, values: Tensor) -> None:
    """The steps of `path` are the shares of `values` between its edges."""
    xs, ys = path[:, 0].tolist(), path[:, 1].tolist()
    shares = {}
    for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if y0 == y1 and x1 > x0:
            shares[x0, x1] = y0
    assert abs(sum(shares.values()) - 1) < 1e-9  # no value is outside
    for (x0, x1), share in shares.items():
        inside = ((values >= x0 - 1e-9) & (values <= x1 + 1e-9)).double().mean().item()
        assert abs(share - inside) < 2 / len(values)


@pytest.mark.slow
def test_scaling_has_one_legend_for_its_two_colors() -> None:
    figure = display_scaling(some_scores())
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["scores as they are", "divided by √$d_k$"]
    for kind in ("png", "svg"):
        assert render(figure, kind)


def test_scaling_takes_any_dtype_and_does_not_modify_scores(
    device: torch.device,
) -> None:
    scores = {
        2: torch.randn(5, 3, device=device, dtype=torch.bfloat16),
        7: torch.zeros(11, 3, device=device, requires_grad=True),
    }
    before = scores[2].clone()
    figure = display_scaling(scores)
    assert len(figure.axes) == 6
    assert torch.equal(scores[2], before)


def test_the_jacobian_is_that_of_autograd(device: torch.device) -> None:
    scores = 3 * torch.randn(2, 5, 7, device=device, dtype=torch.float64)
    sizes = jacobian_norms(scores.softmax(dim=-1))
    assert sizes.shape == (2, 5)
    torch.testing.assert_close(sizes.flatten(), norms(scores.flatten(0, 1)))


@pytest.mark.parametrize("k_len", [2, 3, 7])
def test_the_jacobian_is_largest_for_two_equal_weights(k_len: int) -> None:
    random = (5 * torch.randn(2003, k_len)).softmax(dim=1)
    even = torch.zeros(k_len)
    even[:2] = 0.5
    assert jacobian_norms(even).item() == 0.5
    assert jacobian_norms(random).max() <= 0.5 + 1e-6


# Without matplotlib or a display, and errors


def test_without_matplotlib_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    message = "plots need matplotlib; install it with `pip install matplotlib`"
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        display_attention(QUERIES, KEYS, weights(5, 7))
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        display_scaling(some_scores())


@pytest.mark.slow
def test_without_a_display_figures_are_drawn_and_importing_draws_nothing() -> None:
    program = """
import io, sys, torch
from headnotes.plots import display_attention
assert "matplotlib" not in sys.modules
display_attention(["a"], ["b"], torch.ones(1, 1)).savefig(io.BytesIO())
"""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND", "MATPLOTLIBRC")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def draw(attention: Any, queries: Any = QUERIES, keys: Any = KEYS, **how: Any) -> None:
    display_attention(queries, keys, attention, **how)


FITS = "[q_len, k_len] or [q_len, k_len, heads] = [5, 7, ...]"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: draw([[1.0]]),
            TypeError,
            "`attention` must be a tensor, but is a list",
        ),
        (
            lambda: draw(torch.ones(5, 7).to_sparse()),
            TypeError,
            "`attention` must be dense, real and hold values, but is torch.float32, "
            "torch.sparse_coo, on cpu",
        ),
        (
            lambda: draw(torch.ones(5, 7, dtype=torch.complex64)),
            TypeError,
            "`attention` must be dense, real and hold values, but is torch.complex64, "
            "torch.strided, on cpu",
        ),
        (
            lambda: draw(torch.ones(5, 7, device="meta")),
            TypeError,
            "`attention` must be dense, real and hold values, but is torch.float32, "
            "torch.strided, on meta",
        ),
        (
            lambda: draw(torch.full((5, 7), torch.nan)),
            ValueError,
            "`attention` holds NaN or infinity; look for a fully masked row",
        ),
        (
            lambda: draw(torch.full((5, 7), torch.inf)),
            ValueError,
            "`attention` holds NaN or infinity; look for a fully masked row",
        ),
        (
            lambda: draw(torch.full((5, 7), -0.25)),
            ValueError,
            "`attention` holds -0.25, but no weight is below 0; if these are scores, "
            "use `attention.softmax(dim=1)`",
        ),
        (
            lambda: draw(weights(3, 5, 7)),
            ValueError,
            f"`attention` has shape [3, 5, 7], and looks like [heads, q_len, k_len], "
            f"not {FITS}; use `attention.permute(1, 2, 0)`",
        ),
        (
            lambda: draw(weights(5, 7, 2, 3)),
            ValueError,
            f"`attention` has shape [5, 7, 2, 3], not {FITS}; choose a batch item, "
            f"`attention[:, :, 0]` of [q_len, k_len, batch_size, heads] or "
            f"`attention[0].permute(1, 2, 0)` of [batch_size, heads, q_len, k_len]",
        ),
        (
            lambda: draw(weights(7, 5)),
            ValueError,
            f"`attention` has shape [7, 5], not {FITS}; rows are queries (q_len "
            f"words), columns are keys (k_len words)",
        ),
        (
            lambda: draw(torch.ones(5, 7, 0)),
            ValueError,
            f"`attention` has shape [5, 7, 0], not {FITS}; rows are queries (q_len "
            f"words), columns are keys (k_len words)",
        ),
        (
            lambda: draw(weights(5, 7), queries="quoth"),
            TypeError,
            "`queries` is one string; give its words, as `queries.split()`",
        ),
        (
            lambda: draw(weights(5, 7), keys=list(range(7))),
            TypeError,
            "`keys` must hold strings; use `[str(x) for x in keys]`",
        ),
        (
            lambda: draw(weights(5, 7), keys=set("abcdefg")),
            TypeError,
            "`keys` is a set; use `list(keys)`",
        ),
        (
            lambda: draw(torch.ones(5, 0), keys=[]),
            ValueError,
            "`keys` is empty; there is nothing to draw",
        ),
        (
            lambda: draw(weights(5, 7, 3), titles=["one", "two"]),
            ValueError,
            "`titles` are 2, but there are 3 maps",
        ),
        (
            lambda: draw(weights(5, 7), titles="one"),
            TypeError,
            "`titles` is one string; give its words, as `titles.split()`",
        ),
        (
            lambda: draw(weights(5, 7), columns=0),
            ValueError,
            "`columns` (=0) must be an int from 1 up",
        ),
        (
            lambda: display_scaling({}),
            ValueError,
            "`scores` must map each `d_k` to its scores, and hold some",
        ),
        (
            lambda: display_scaling(torch.ones(2, 3)),  # type: ignore[arg-type]
            ValueError,
            "`scores` must map each `d_k` to its scores, and hold some",
        ),
        (
            lambda: display_scaling({0: torch.ones(2, 3)}),
            ValueError,
            "`scores[0]`: a width `d_k` is an int from 1 up",
        ),
        (
            lambda: display_scaling({2: torch.ones(3)}),
            ValueError,
            "`scores[2]` has shape [3], not [samples, k_len]",
        ),
        (
            lambda: display_scaling({2: torch.ones(2, 3), 5: torch.ones(2, 0)}),
            ValueError,
            "`scores[5]` has shape [2, 0], not [samples, k_len]",
        ),
        (
            lambda: display_scaling({2: torch.full((2, 3), -torch.inf)}),
            ValueError,
            "`scores[2]` holds NaN or infinity; look for a fully masked row",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_leaves_no_figure(
    call: Callable[[], None], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()
    assert not plt.get_fignums()
