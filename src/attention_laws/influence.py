r"""# Functions that find influence

A counterexample may ask which tokens have an influence on which outputs: by the
gradients of each output, or by one copy of an image for each pixel that is changed. Or
it may ask along which axes queries and keys influence each other in a norm.

Source: the laws of [images](images.md), of [masking](masking.md) and of
[heads](heads.md), which use them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws.recorders import WeightsRecorder
from attention_laws.tools import loss


class Norms(torch.overrides.TorchFunctionMode):
    """Notes the shape of each tensor that is normalized, and the axes of its norm.

    >>> with Norms() as norms:
    ...     x = torch.nn.functional.normalize(torch.ones(2, 3, 5), dim=1)
    >>> norms.found
    [((2, 3, 5), [1])]
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[tuple[int, ...], list[int]]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in ("normalize", "norm", "vector_norm") and args:
            x, rest = args[0], dict(zip(("p", "dim"), args[1:], strict=False))
            dims = {**rest, **(kwargs or {})}.get("dim", 1)
            axes = [dims] if isinstance(dims, int) else [*(dims or ())]
            if name == "normalize" or result.dim() == x.dim():  # to divide by
                self.found.append(((*x.shape,), [axis % x.dim() for axis in axes]))
        return result


def normalized_sizes(call: Callable[[], Any], width: int) -> list[int]:
    r"""The sizes of the axes along which queries or keys of heads are normalized.

    They are tensors that have one axis of the width of a head.

    >>> q = torch.ones(2, 3, 5, 7)
    >>> normalized_sizes(lambda: torch.nn.functional.normalize(q, dim=2), 7)
    [5]
    """
    with Norms() as norms:
        call()
    return [
        shape[axis]
        for shape, axes in norms.found
        if shape.count(width) == 1 and len(shape) > 2
        for axis in axes
    ]


def diagonal(number: int, rows: int = 0) -> tuple[Tensor, Tensor]:
    r"""The rows and columns of the pixels of a diagonal, of a square by default.

    >>> diagonal(6, rows=2)
    (tensor([0, 0, 1]), tensor([0, 1, 2]))
    """
    rows = rows or math.isqrt(number)
    columns = number // rows
    steps = torch.arange(max(rows, columns))
    return steps * rows // len(steps), steps * columns // len(steps)


def change_diagonal(x: Tensor, axis: int, rows: int = 0) -> Tensor:
    r"""Copies of an image: itself, then one for each pixel of a diagonal negated.

    `axis` is that of the pixels. It is a square unless `rows` are given.

    >>> change_diagonal(torch.ones(1, 4, 1), axis=1)[:, :, 0]
    tensor([[ 1.,  1.,  1.,  1.],
            [-1.,  1.,  1.,  1.],
            [ 1.,  1.,  1., -1.]])
    """
    number = x.shape[axis]
    row, column = diagonal(number, rows)
    places = row * (number // (rows or math.isqrt(number))) + column
    many = x.repeat(len(places) + 1, *[1] * (x.dim() - 1))
    for n, place in enumerate(places.tolist()):
        many[n + 1].select(axis - 1, place).neg_()
    return many


def farthest_influence(y: Tensor, axis: int, rows: int = 0) -> int:
    r"""How many rows or columns away from the changed pixels an output changes.

    `y` is the output for the images of `change_diagonal`, with as many `rows`.

    >>> x = change_diagonal(torch.ones(1, 9, 1), axis=1)
    >>> farthest_influence(x, axis=1), farthest_influence(x.roll(1, dims=1), axis=1)
    (0, 2)
    """
    return max(0, *map(max, filter(None, distances_of_influence(y, axis, rows))))


def distances_of_influence(
    y: Tensor, axis: int, rows: int = 0
) -> tuple[set[int], set[int]]:
    r"""How many rows, and columns, away from a changed pixel outputs change.

    `y` is the output for the images of `change_diagonal`.

    >>> x = change_diagonal(torch.ones(1, 9, 1), axis=1)
    >>> distances_of_influence(x + x.roll(1, dims=1), axis=1)
    ({0, 2}, {0, 1, 2})
    """
    change = (y[1:] - y[:1]).abs().movedim(axis, 1).flatten(2).amax(dim=2)
    center, pixel = (change > 1e-4 * change.max()).nonzero().cpu().unbind(1)
    row, column = diagonal(y.shape[axis], rows)
    width = y.shape[axis] // (rows or math.isqrt(y.shape[axis]))
    below, right = pixel // width - row[center], pixel % width - column[center]
    return {*below.abs().tolist()}, {*right.abs().tolist()}


def wraps_around(y: Tensor, axis: int) -> bool:
    r"""Whether changed pixels change others across a border, and none between.

    `y` is the output for the images of `change_diagonal`. Of the distances between rows
    or columns, a third of all, those around half an image, have no influence.

    >>> x = change_diagonal(torch.ones(1, 144, 1), axis=1)
    >>> wraps_around(x, axis=1), wraps_around(x + x.roll(1, dims=1), axis=1)
    (False, True)
    """
    size = math.isqrt(y.shape[axis])
    between = range(size // 3 + 1, size - size // 3)
    found = distances_of_influence(y, axis)
    return any(size - 1 in each and each.isdisjoint(between) for each in found)


def places_are_same(output: Tensor, x: Tensor, frames: int) -> bool:
    r"""Whether each token depends on the same places in all frames that it depends on.

    The tokens `[batch_size, frames * places, d_model]` are given frame by frame.

    >>> x = torch.ones(1, 6, 1, requires_grad=True)
    >>> y = x.unflatten(1, (2, 3)).sum(1, keepdim=True).expand(-1, 2, -1, -1)
    >>> z = x.unflatten(1, (3, 2)).sum(2, keepdim=True).expand(-1, -1, 2, -1)
    >>> places_are_same(y.flatten(1, 2), x, 2), places_are_same(z.flatten(1, 2), x, 2)
    (True, False)
    """
    for grad in token_gradients(output, x, axis=1):
        found = grad.any(0).any(-1).view(frames, -1)
        if not torch.equal(found, found.any(1, keepdim=True) & found.any(0)):
            return False
    return True


def own_gradients(output: Tensor, x: Tensor, axis: int) -> Tensor:
    r"""Whether the output for each token has a gradient of the same token of `x`.

    `axis` is that of the tokens; only the last of several batch items need be given.

    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> own_gradients(torch.stack([x[0], x[2], x[1]]), x, axis=0)
    tensor([ True, False, False])
    """
    gradients = enumerate(token_gradients(output, x, axis))
    return torch.stack([grad.select(axis, n).any() for n, grad in gradients])


def token_gradients(output: Tensor, x: Tensor, axis: int) -> Iterator[Tensor]:
    """The gradient of each token of the output, with respect to `x`."""
    for n in range(output.shape[axis]):
        of_token = loss(output.select(axis, n))
        (grad,) = torch.autograd.grad(of_token, x, retain_graph=True)
        yield grad


def displaced_tokens(output: Tensor, x: Tensor, axis: int) -> list[tuple[int, int]]:
    r"""Tokens of `x`, each with the token of the output that it changes most.

    These are the tokens that change the output of the same token no more than others,
    or clearly less than another one.
    There are none unless most are so, and unless each changes one output clearly more
    than others, and nearly each another one.

    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> displaced_tokens(torch.stack([x[0], x[2], x[1]]), x, axis=0)
    [(1, 2), (2, 1)]
    >>> displaced_tokens(torch.stack([x[0], x[0], x[0]]), x, axis=0)
    []
    """
    gradients = token_gradients(output, x, axis)
    rows = [grad.movedim(axis, 0).flatten(1).norm(dim=1) for grad in gradients]
    influence = torch.stack(rows)
    own = influence.diagonal()
    largest, places = influence.max(dim=0)
    others = (influence.sum(dim=0) - own) / max(1, len(own) - 1)
    is_moved = (own < 1.3 * others) | (largest > 1.5 * own)
    moved = is_moved.nonzero().flatten().tolist()
    is_clear = (largest >= 1.5 * others).double().mean() >= 0.5
    many = 0.6 * len(own)
    if len(moved) < many or len({*places.tolist()}) < many or not is_clear:
        return []
    return [(n, int(places[n])) for n in moved]


def depends_on(output: Tensor, inputs: list[Tensor]) -> bool:
    r"""Whether any of the inputs is in the graph of an output.

    >>> x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> depends_on(2 * x, [x, other]), depends_on(2 * x, [other])
    (True, False)
    """
    if not output.requires_grad:
        return False
    grads = torch.autograd.grad(
        output.sum(), inputs, retain_graph=True, allow_unused=True
    )
    return any(grad is not None for grad in grads)


def encodings_of_own(call: Callable[[], Any], layer: nn.Module) -> Tensor:
    r"""The rows of a layer's input on which scores of tokens with themselves depend.

    They are encodings of distances if the layer projects these. Where no scores are
    known to depend on its input, these are all rows.

    >>> layer, q = nn.Linear(2, 2), torch.ones(3, 2)
    >>> table = torch.arange(6.0).view(3, 2)
    >>> scores = lambda: (q @ layer(table).T).tril().softmax(-1)
    >>> encodings_of_own(scores, layer).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    leaves: list[Tensor] = []

    def replace_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves.append(inputs[0].detach().clone().requires_grad_())
        return leaves[-1], *inputs[1:]

    handle = layer.register_forward_pre_hook(replace_input)
    with WeightsRecorder() as recorder:
        call()
    handle.remove()
    own = sum(
        scores.diagonal(dim1=-2, dim2=-1).sum()
        for scores in recorder.scores
        if scores.dim() > 1 and scores.shape[-1] == scores.shape[-2]
    )
    rows = leaves[0].detach().flatten(0, -2)
    if not isinstance(own, Tensor) or not own.requires_grad:
        return rows
    grad = torch.autograd.grad(own, leaves[0], allow_unused=True)[0]
    return rows if grad is None else rows[grad.flatten(0, -2).abs().sum(-1) > 0]
