r"""# Plotting attention weights

This module draws attention weights as heatmaps: a row for each query token, a column
for each key token, and a brighter cell for a larger weight.

All heatmaps of a figure share one color scale, from 0 to the largest weight, which the
color bar shows. If each head had its own scale, the brightest cell of a head with
nearly uniform weights would look like that of a head that attends to one token only.
The color map, *cividis*, is legible for color-blind readers, and its brightness
increases monotonically, so that it can be printed in gray.

Matplotlib is imported when a figure is drawn: the module can be imported without it.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017: the appendix, *Attention Visualizations*, for maps of heads; section 3.2.1 and its
footnote 4 for why scores are divided by $\sqrt{d_k}$.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

# Up to this many tokens, a cell is large enough to show its weight.
MAX_LABELED = 10

# Two hues that color-blind readers can distinguish, legible on white and on near black.
PLAIN, SCALED = "#d55e00", "#2f86d6"


def display_attention(
    queries: Sequence[str],
    keys: Sequence[str],
    attention: Tensor,
    *,
    titles: Sequence[str] | None = None,
    columns: int = 2,
) -> "Figure":
    r"""Draw heatmaps of attention weights, one for each head.

    `queries` and `keys` are the tokens, as words. `attention` is `[q_len, k_len]` for
    one heatmap, or `[q_len, k_len, heads]` for one heatmap per head, as in
    `mha.attn[:, :, 0]`. To compare other weights of the same tokens, such as before and
    after training, stack them along the last axis and pass `titles`. `columns` is the
    number of heatmaps side by side. With few tokens, each cell shows its weight.

    Returns the figure. A notebook displays the value of the last line of a cell; to see
    the figure only once, assign it to a name there.

    Raises `TypeError` for what is not a real tensor or a list of words, `ValueError`
    for a shape that does not fit the words, for negative weights or NaN, and
    `ImportError` without matplotlib. Source: Vaswani et al. 2017, figures 3 to 5.

    >>> words = ["a", "cat", "sat", "down"]
    >>> scores = torch.arange(24.0).reshape(3, 4, 2)
    >>> figure = display_attention(
    ...     words[1:], words, scores.softmax(dim=1))
    >>> [ax.get_title() for ax in figure.axes]
    ['head 0', 'head 1', '']
    >>> print(figure.axes[-1].get_ylabel())
    weight, from 0 to 0.86
    (one scale for all heads)
    """
    check_words("queries", queries)
    check_words("keys", keys)
    q_len, k_len = len(queries), len(keys)
    check_attention(attention, q_len, k_len)
    # On the CPU, detached, in the widest dtype.
    maps = attention.detach().to("cpu", torch.float64)
    maps = maps.reshape(q_len, k_len, -1)  # [q_len, k_len, heads]
    heads = maps.shape[-1]
    what = "heads" if titles is None else "maps"
    if titles is None:
        titles = [f"head {n}" for n in range(heads)] if attention.dim() == 3 else [""]
    check_grid(titles, heads, columns)

    # One scale for all maps. (If all weights are 0, any upper end will do.)
    top = maps.max().item()
    figure, axes = build_grid(queries, keys, len(titles), columns)
    for ax, title, weights in zip(axes, titles, maps.unbind(-1), strict=True):
        mesh = draw_map(ax, weights, top or 1)
        ax.set_title(title, parse_math=False)
    scale = f"\n(one scale for all {what})" if len(titles) > 1 else ""
    bar: Any = figure.colorbar(
        mesh, ax=axes, label=f"weight, from 0 to {top:.2g}{scale}"
    )
    # By default the color bar of an SVG is a bitmap, which blurs and has a data URL.
    bar.solids.set(rasterized=False, edgecolor="face")
    bar.outline.set_visible(False)
    return figure


def build_grid(
    queries: Sequence[str], keys: Sequence[str], count: int, columns: int
) -> tuple["Figure", list["Axes"]]:
    """A figure with `count` empty heatmaps, `columns` side by side, and tick labels."""
    # Cells shrink where tokens are many, but never below the height of a small label.
    cell = min(0.4, max(0.13, 3 / max(len(queries), len(keys))))  # inches
    size = min(9, 72 * cell * 0.8)  # points
    columns = min(columns, count)
    rows = -(-count // columns)
    width = columns * len(keys) * cell + 1.8
    height = max(2.2, rows * (len(queries) * cell + 0.3) + 0.9)
    figure, grid = import_pyplot().subplots(
        rows, columns, figsize=(width, height), layout="compressed", squeeze=False
    )

    axes: list[Axes] = list(grid.flat)
    for ax in axes[count:]:
        ax.remove()
    for n, ax in enumerate(axes[:count]):
        # Only the leftmost heatmaps label their rows, and the lowest their columns. A
        # token may contain dollar signs, which must not be parsed as a formula.
        is_leftmost = n % columns == 0
        is_lowest = n + columns >= count
        style: dict[str, Any] = {"parse_math": False, "size": size}
        row_labels = queries if is_leftmost else [""] * len(queries)
        ax.set_yticks([i + 0.5 for i in range(len(queries))], row_labels, **style)
        few = len(keys) <= MAX_LABELED
        style |= {"rotation": 45 if few else 90, "rotation_mode": "anchor"}
        style |= {"ha": "right", "va": "top" if few else "center"}
        column_labels = keys if is_lowest else [""] * len(keys)
        ax.set_xticks([j + 0.5 for j in range(len(keys))], column_labels, **style)
        ax.set_ylabel("query" if is_leftmost else "")
        ax.set_xlabel("key" if is_lowest else "")
        ax.tick_params(length=0)
    return figure, axes[:count]


def draw_map(ax: "Axes", weights: Tensor, top: float) -> "QuadMesh":
    """Draw weights `[q_len, k_len]` as cells, the first query at the top."""
    # 64 steps of color look smooth; each is a shape in the SVG of the color bar.
    cmap = import_pyplot().get_cmap("cividis", 64)
    mesh = ax.pcolormesh(weights.numpy(), vmin=0, vmax=top, cmap=cmap)
    ax.set_aspect("equal")
    ax.invert_yaxis()
    ax.spines[:].set_visible(False)
    if max(weights.shape) > MAX_LABELED:
        return mesh
    style: dict[str, Any] = {"size": 7, "ha": "center", "va": "center"}
    for i, row in enumerate(weights.tolist()):
        for j, weight in enumerate(row):
            # The text color depends on the cell behind it, not on the page's theme.
            color = "white" if weight < 0.55 * top else "black"
            ax.text(j + 0.5, i + 0.5, f"{weight:.2f}", color=color, **style)
    return mesh


def display_scaling(scores: Mapping[int, Tensor]) -> "Figure":
    r"""Plot what dividing scores by $\sqrt{d_k}$ does to weights and gradients.

    `scores` holds, for each head width `d_k`, the dot products of many queries with the
    same number of keys each, `[samples, k_len]`. Each width is a column of the figure.
    From top to bottom it shows the distribution of the scores; the weights of a row,
    largest first, as the mean over all rows; and the distribution of the norm of the
    softmax's Jacobian. Each is drawn for the scores, and for the scores divided by
    $\sqrt{d_k}$.

    Returns the figure. Raises `TypeError` or `ValueError` for scores that are not real
    tensors of two axes or not finite, or for none; `ImportError` without matplotlib.
    Source: Vaswani et al. 2017, section 3.2.1.

    >>> scores = {}
    >>> for d_k in (2, 64):
    ...     query, key = torch.randn(2, 100, 6, d_k)
    ...     scores[d_k] = (query[:, :1] * key).sum(-1)
    >>> figure = display_scaling(scores)
    >>> [ax.get_title() for ax in figure.axes[:2]]
    ['$d_k$ = 2', '$d_k$ = 64']
    """
    check_scores(scores)
    # With one range for all widths, the distributions can be compared.
    limit = max(plain.double().abs().max().item() for plain in scores.values())
    figure: Figure
    figure, axes = import_pyplot().subplots(
        3,
        len(scores),
        figsize=(2.3 * len(scores), 5.6),
        layout="constrained",
        sharey="row",
        squeeze=False,
    )
    for column, (d_k, plain) in zip(axes.T, scores.items(), strict=True):
        plain = plain.detach().to("cpu", torch.float64)
        for x, color, label in (
            (plain, PLAIN, "scores as they are"),
            (plain / d_k**0.5, SCALED, "divided by √$d_k$"),
        ):
            draw_scaling(column, x, limit, {"color": color, "label": label})
        column[0].set(title=f"$d_k$ = {d_k}", xlabel="score", yticks=[])
        column[1].set(xlabel="key, by weight", ylim=(0, 1))
        column[1].xaxis.get_major_locator().set_params(integer=True)
        column[2].set(xlabel="norm of the Jacobian", yticks=[])
    for ax, name in zip(axes[:, 0], ("share", "mean weight", "share"), strict=True):
        ax.set_ylabel(name)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def draw_scaling(
    axes: Sequence["Axes"], scores: Tensor, limit: float, style: dict[str, Any]
) -> None:
    """Draw scores, sorted weights and Jacobians of `[samples, k_len]`, one an axis."""
    samples, k_len = scores.shape
    # Outlines, so that neither distribution hides the other.
    outline: dict[str, Any] = style | {"histtype": "step", "linewidth": 1.5}
    outline["weights"] = torch.full_like(scores, 1 / scores.numel()).flatten().numpy()
    axes[0].hist(scores.flatten().numpy(), 141, range=(-limit, limit), **outline)

    weights = scores.softmax(dim=-1)
    mean = weights.sort(descending=True).values.mean(dim=0).tolist()
    axes[1].plot(range(1, k_len + 1), mean, "o-", markersize=4, **style)

    norms = jacobian_norms(weights)  # [samples]
    outline["weights"] = torch.full_like(norms, 1 / samples).numpy()
    axes[2].hist(norms.numpy(), 26, range=(0, 0.52), **outline)


def jacobian_norms(weights: Tensor) -> Tensor:
    r"""The norm of the softmax's Jacobian at each row of `weights`, `[samples, k_len]`.

    This is the Frobenius norm of $\operatorname{diag}(p) - p\,p^\top$. It is largest
    if two keys have half of the weight each, and 0 if one key has all of it: then no
    gradient flows from the weights to the scores, and so none to queries and keys.

    >>> rows = torch.tensor([[0.5, 0.5, 0.0], [1, 0, 0]])
    >>> jacobian_norms(rows)
    tensor([0.5000, 0.0000])
    """
    outer = weights[..., :, None] * weights[..., None, :]  # [samples, k_len, k_len]
    jacobian = weights.diag_embed() - outer  # [samples, k_len, k_len]
    norms: Tensor = jacobian.norm(dim=(-2, -1))  # [samples]
    return norms


def import_pyplot() -> Any:
    """Matplotlib's `pyplot`, or an error that says how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        way_out = "install it with `pip install matplotlib`"
        raise ImportError(f"plots need matplotlib; {way_out}") from error
    return plt


def check_words(name: str, words: Sequence[str]) -> None:
    """Refuse labels that are not a list of words."""
    if isinstance(words, str):
        raise TypeError(f"`{name}` is one string; give its words, as `{name}.split()`")
    if not isinstance(words, list | tuple):  # a set, for example, has no order
        raise TypeError(f"`{name}` is a {type(words).__name__}; use `list({name})`")
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"`{name}` must hold strings; use `[str(x) for x in {name}]`")
    if not words:
        raise ValueError(f"`{name}` is empty; there is nothing to draw")


def check_values(name: str, x: Tensor) -> None:
    """Refuse what is not a dense tensor of real, finite numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but is a {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested or x.is_complex() or x.is_meta:
        seen = f"is {x.dtype}, {x.layout}, on {x.device}"
        raise TypeError(f"`{name}` must be dense, real and hold values, but {seen}")
    if not x.double().isfinite().all():
        raise ValueError(f"`{name}` holds NaN or infinity; look for a fully masked row")


def check_attention(attention: Tensor, q_len: int, k_len: int) -> None:
    """Refuse weights that do not fit these words; name the permutation."""
    check_values("attention", attention)
    shape = list(attention.shape)
    fits = f"[q_len, k_len] or [q_len, k_len, heads] = [{q_len}, {k_len}, ...]"
    if len(shape) == 4:
        raise ValueError(
            f"`attention` has shape {shape}, not {fits}; choose a batch item, "
            f"`attention[:, :, 0]` of [q_len, k_len, batch_size, heads] or "
            f"`attention[0].permute(1, 2, 0)` of [batch_size, heads, q_len, k_len]"
        )
    is_heads_first = len(shape) == 3 and shape[1:] == [q_len, k_len]
    # If all sizes are equal, the sums decide: weights sum to 1 over the keys.
    if is_heads_first and shape[0] == q_len == k_len:
        is_heads_first = sum_to_one(attention, 2) and not sum_to_one(attention, 1)
    if is_heads_first:
        raise ValueError(
            f"`attention` has shape {shape}, and looks like [heads, q_len, k_len], not "
            f"{fits}; use `attention.permute(1, 2, 0)`"
        )
    if len(shape) not in (2, 3) or shape[:2] != [q_len, k_len] or 0 in shape:
        raise ValueError(
            f"`attention` has shape {shape}, not {fits}; rows are queries (q_len "
            f"words), columns are keys (k_len words)"
        )
    low = attention.double().min().item()
    if low < 0:
        raise ValueError(
            f"`attention` holds {low:.3g}, but no weight is below 0; if these are "
            f"scores, use `attention.softmax(dim=1)`"
        )


def sum_to_one(weights: Tensor, dim: int) -> bool:
    """Whether all rows along `dim` sum to 1, except for fully masked ones."""
    sums = weights.detach().double().sum(dim)
    return bool((((sums - 1).abs() < 0.02) | (sums == 0)).all())


def check_grid(titles: Sequence[str], count: int, columns: int) -> None:
    """Refuse a wrong number of titles, or of columns."""
    check_words("titles", titles)
    if len(titles) != count:
        raise ValueError(f"`titles` are {len(titles)}, but there are {count} maps")
    if type(columns) is not int or columns < 1:
        raise ValueError(f"`columns` (={columns!r}) must be an int from 1 up")


def check_scores(scores: Mapping[int, Tensor]) -> None:
    """Refuse scores that cannot be compared across widths."""
    if not isinstance(scores, Mapping) or not scores:
        raise ValueError("`scores` must map each `d_k` to its scores, and hold some")
    for d_k, x in scores.items():
        name = f"scores[{d_k!r}]"
        if type(d_k) is not int or d_k < 1:
            raise ValueError(f"`{name}`: a width `d_k` is an int from 1 up")
        check_values(name, x)
        if x.dim() != 2 or not x.numel():
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, not [samples, k_len]"
            )
