"""Attacks on pictures: each is drawn, and closed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headnotes import plots
from hostile.attention import call, listed, need
from hostile.dice import FLOATS, Dice
from hostile.outcome import Call
from hostile.registry import attack

NO_WORDS = (None, 3, "a cat", [], [1, 2], {"a"}, ("a", "b"), ["a", None], ["$x$", "\n"])


def close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    try:
        figure.canvas.draw()
    finally:
        plt.close("all")


def real(x: Any, low: float = -float("inf")) -> Tensor:
    need(isinstance(x, Tensor), "it is no tensor")
    need(x.layout == torch.strided and not x.is_nested, "it is not dense")
    need(not x.is_meta and not x.is_complex() and not x.is_quantized, "no numbers")
    y = x.detach().cpu().double()
    need(bool(y.isfinite().all()), "they are not finite")
    need(bool((y >= low).all()), "they are no weights")
    return y


def are_words(words: Any) -> int:
    need(isinstance(words, list | tuple) and bool(words), "they are no words")
    need(all(isinstance(word, str) for word in words), "they are no words")
    return len(words)


@attack("plots.display_attention")
def display_attention(dice: Dice) -> Call:
    q_len, k_len, heads = dice.roll(1, 3), dice.roll(1, 3), dice.roll(0, 3)
    if cube := dice.chance(3):  # where sizes do not tell which axis is which
        q_len, k_len, heads = 2, 2, 2
    shape = (q_len, k_len, heads) if heads else (q_len, k_len)
    weights = dice.floats(*shape).softmax(1).to(dice.pick(FLOATS))
    if cube and dice.chance(2):
        weights, dice.tame = weights.permute(2, 0, 1), False
    given: dict[str, Any] = {
        "queries": ["a", "$b$", "c"][:q_len],
        "keys": ["x", "<y>", "z_1"][:k_len],
        "attention": weights,
        "titles": [f"map {n}" for n in range(heads or 1)] if dice.chance(2) else None,
        "columns": dice.roll(1, 3),
    }

    def judge(figure: Any) -> None:
        queries, keys, attention, titles, columns = given.values()
        close(figure)
        shape = are_words(queries), are_words(keys)
        y = real(attention, 0.0)
        need(y.shape[:2] == shape and y.dim() in (2, 3) and 0 not in y.shape, "shape")
        count = y.shape[2] if y.dim() == 3 else 1
        need(titles is None or are_words(titles) == count, "titles")
        need(type(columns) is int and columns > 0, "columns")
        maps = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
        assert len(maps) == count
        for n, ax in enumerate(maps):
            drawn = torch.tensor(ax.collections[0].get_array().data)
            wanted = y if y.dim() == 2 else y[..., n]
            assert drawn.reshape(shape).equal(wanted), f"drew {drawn}"

    def words(_: Any) -> Any:
        return dice.pick(NO_WORDS)

    def scores(weights: Any) -> Any:
        return dice.pick((weights - 0.5, weights.log(), weights.unsqueeze(0), None))

    spoil: dict[str, Callable[[Any], Any]] = {"queries": words, "attention": scores}
    return call(dice, plots.display_attention, given, judge, titles=words, **spoil)


@attack("plots.display_scaling")
def display_scaling(dice: Dice) -> Call:
    scores: dict[Any, Any] = {
        d_k: dice.floats(dice.roll(1, 4), dice.roll(1, 3), dtype=dice.pick(FLOATS))
        for d_k in (2, 64)[: dice.roll(1, 2)]
    }
    if dice.chance(2):
        dice.tame = False
        d_k = dice.pick(list(scores))
        wrong = dice.pick((0, -1, True, "2", 2.0, None))
        scores[wrong if dice.chance(2) else d_k] = dice.spoil(scores[d_k])
    given: dict[str, Any] = {"scores": scores}

    def judge(figure: Any) -> None:
        close(figure)
        scores = given["scores"]
        need(isinstance(scores, dict) and bool(scores), "there are none")
        for d_k, x in scores.items():
            need(type(d_k) is int and d_k > 0, "it is no width")
            need(real(x).dim() == 2 and x.numel() > 0, "they are no scores")
        titles = [ax.get_title() for ax in figure.axes[: len(scores)]]
        assert titles == [f"$d_k$ = {d_k}" for d_k in scores]

    return call(dice, plots.display_scaling, given, judge)


@attack("plots.jacobian_norms")
def jacobian_norms(dice: Dice) -> Call:
    shape = [dice.roll(0, 3) for _ in range(dice.roll(1, 3))]
    weights = dice.disguise("weights", dice.floats(*shape).softmax(-1))
    given = {"weights": weights}

    def judge(result: Any) -> None:
        assert result.shape == weights.shape[:-1]
        rows = listed(weights.reshape(-1, weights.shape[-1])) if weights.numel() else []
        for row, norm in zip(rows, listed(result.flatten()), strict=bool(rows)):
            entries = [
                p * ((i == j) - q) for i, p in enumerate(row) for j, q in enumerate(row)
            ]
            wanted = sum(entry * entry for entry in entries) ** 0.5
            assert abs(norm - wanted) < 1e-5, f"{norm}, not {wanted}"

    return Call(plots.jacobian_norms, given, judge, dice.tame, dice.notes)
