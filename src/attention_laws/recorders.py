r"""# Recording what a call computes

Few implementations return their weights. Those that a softmax gives in a call, or that
PyTorch's kernel would, are recorded here, with the axis of the keys. Other modes see
other functions of PyTorch, or change what one gives: they tell whether dropout is
applied to the weights, for one, or hide keys from each softmax.

Source: PyTorch's [function
modes](https://docs.pytorch.org/docs/stable/torch.overrides.html), which see each call.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from attention_laws.tools import tensors_in

# Arguments of PyTorch's attention behind queries, keys and values.
SDPA_OPTIONS = ("attn_mask", "dropout_p", "is_causal")


class WeightsRecorder(torch.overrides.TorchFunctionMode):
    """Records the results of `softmax`, and the weights of PyTorch's attention.

    Beside them is the axis that was normalized, that of the keys. Those of PyTorch's
    attention are `fused`, too. What `softmax` was given is in `scores`.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, int]] = []
        self.fused: list[Tensor] = []
        self.scores: list[Tensor] = []

    @property
    def key_counts(self) -> set[int]:
        """How long the axes are that were normalized."""
        return {weights.shape[dim] for weights, dim in self.found}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.fused.append(sdpa_weights(*args, **kwargs))
            self.found.append((self.fused[-1], -1))
        elif getattr(function, "__name__", "") == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim is None:
                dim = 0 if result.dim() in (0, 1, 3) else 1  # as PyTorch chooses it
            self.found.append((result, dim))
            self.scores.append(args[0])
        return result


class CalledFunctions(torch.overrides.TorchFunctionMode):
    """Records the names of the functions of PyTorch that are called, and how often."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found[getattr(function, "__name__", "")] += 1
        return function(*args, **(kwargs or {}))


class Squares(torch.overrides.TorchFunctionMode):
    """Notes whether a square, or a sum or a mean of squares, overflows.

    >>> with Squares() as squares:
    ...     (torch.tensor([300.0], dtype=torch.float16) ** 2, squares.overflow)
    (tensor([inf], dtype=torch.float16), True)
    """

    overflow = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "").strip("_")
        if isinstance(result, Tensor) and name in ("pow", "square", "var", "std"):
            self.overflow |= bool(result.isinf().any() and args[0].isfinite().all())
        return result


class Ranges(torch.overrides.TorchFunctionMode):
    """Notes whether a range of numbers repeats one, which its dtype has rounded.

    >>> with Ranges() as ranges:
    ...     (torch.arange(255, 258, dtype=torch.bfloat16).tolist(), ranges.repeat)
    ([255.0, 256.0, 256.0], True)
    """

    repeat = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "arange":
            self.repeat |= bool((result.diff() == 0).any())
        return result


class ScoresOfZero(torch.overrides.TorchFunctionMode):
    """Makes all scores zero, of each `softmax` and of PyTorch's attention.

    >>> with ScoresOfZero() as mode:
    ...     torch.tensor([1.0, torch.inf]).softmax(0), mode.count
    (tensor([0.5000, 0.5000]), 1)
    """

    count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_fused = function is torch.nn.functional.scaled_dot_product_attention
        if is_fused or getattr(function, "__name__", "") == "softmax":
            self.count += 1
            given = 2 if is_fused else 1  # queries and keys, or scores
            args = (*map(torch.zeros_like, args[:given]), *args[given:])
        return function(*args, **(kwargs or {}))


class KeysHidden(torch.overrides.TorchFunctionMode):
    """Sets the scores of some of the keys to the least number, in each softmax."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden  # for each key

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, count = dict(kwargs or {}), len(self.hidden)
        if function is torch.nn.functional.scaled_dot_product_attention:
            if len(args) > 1 and args[1].shape[-2] == count:
                kwargs |= dict(zip(SDPA_OPTIONS, args[3:], strict=False))
                kwargs["attn_mask"] = self.bias(args[0], kwargs)
                args = args[:3]
        elif getattr(function, "__name__", "") == "softmax":
            scores = args[0]
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            if scores.dim() > 1 and scores.shape[dim] == count:
                scores = self.hide(scores.movedim(dim, -1)).movedim(-1, dim)
                args = (scores, *args[1:])
        return function(*args, **kwargs)

    def hide(self, scores: Tensor) -> Tensor:
        """The scores with the least number for hidden keys."""
        least = torch.finfo(scores.dtype).min
        return scores.masked_fill(self.hidden.to(scores.device), least)

    def bias(self, query: Tensor, options: dict[str, Any]) -> Tensor:
        """An additive mask for the hidden keys, and for those that `options` hide."""
        mask = options.get("attn_mask")
        if mask is None:
            mask = torch.ones(query.shape[-2], len(self.hidden), dtype=torch.bool)
            mask = mask.tril() if options.pop("is_causal", False) else mask
        if mask.dtype == torch.bool:
            zeros = torch.zeros(mask.shape).to(query)
            least = torch.finfo(query.dtype).min
            mask = zeros.masked_fill(~mask.to(query.device), least)
        return self.hide(mask.expand(*mask.shape[:-1], len(self.hidden)))


def without_keys(call: Callable[[], Any], keys: list[int], k_len: int) -> Any:
    r"""What a call returns if no softmax over `k_len` keys gives these keys a weight.

    >>> without_keys(lambda: torch.zeros(1, 4).softmax(-1), [1, 3], 4)
    tensor([[0.5000, 0.0000, 0.5000, 0.0000]])
    """
    with KeysHidden(torch.isin(torch.arange(k_len), torch.tensor(keys))):
        return call()


class FactorOfDropout(torch.overrides.TorchFunctionMode):
    """Multiplies what PyTorch's functions would drop, and keeps it all.

    Each number has a share of the factor of its own: one for all would not change what
    a norm makes of them. What the functions get is `dropped`: of PyTorch's attention,
    these are its weights.

    >>> with FactorOfDropout(2.0) as mode:
    ...     nn.functional.dropout(torch.ones(2), 0.5), len(mode.dropped)
    (tensor([1.4963, 1.7682]), 1)
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.dropped: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.nn.functional.dropout:
            options = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            if options.get("training", True) and options.get("p", 0.5):
                return self.scaled(options["input"])
        elif function is torch.nn.functional.scaled_dot_product_attention:
            kwargs |= dict(zip(SDPA_OPTIONS, args[3:], strict=False))
            args = args[:3]
            if kwargs.pop("dropout_p", 0.0):
                weights = self.scaled(sdpa_weights(*args, **kwargs))
                value = args[2] if len(args) > 2 else kwargs["value"]
                groups = weights.shape[-3] // value.shape[-3]
                return weights @ value.repeat_interleave(groups, dim=-3)
        return function(*args, **kwargs)

    def scaled(self, x: Tensor) -> Tensor:
        """What is dropped, times a number between 1 and the factor for each entry."""
        self.dropped.append(x)
        shares = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        return x * (1 + (self.factor - 1) * shares.to(x))


class MixedDtypes(torch.overrides.TorchFunctionMode):
    """Lets products of tensors of two floating-point dtypes be computed in float32.

    >>> with MixedDtypes():
    ...     (torch.ones(2, 3) @ torch.ones(3, dtype=torch.bfloat16)).dtype
    torch.float32
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            floating = torch.is_floating_point
            args, kwargs = tree_map_only(
                Tensor, lambda x: x.float() if floating(x) else x, (args, kwargs)
            )
            return function(*args, **kwargs)


class EntryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the entries of all tensors that are computed."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += sum(tensor.numel() for tensor in tensors_in(result))
        return result


# Functions that compute a softmax, or what it is made of.
SOFTMAX_PATTERN = re.compile(
    r"_?exp(2|m1)?_?|.*softmax.*|logsumexp|logaddexp|elu_?|.*(attention|transformer).*"
)


def scores_are_finite(call: Callable[[], Any]) -> bool:
    r"""Whether no softmax of a call is given infinity, as an overflow is.

    >>> scores = torch.tensor([2.0, -torch.inf])
    >>> scores_are_finite(lambda: scores.softmax(0))
    True
    >>> scores_are_finite(lambda: (-scores).softmax(0))
    False
    """
    with WeightsRecorder() as recorder:
        call()
    return not any(bool((scores == torch.inf).any()) for scores in recorder.scores)


def calls_softmax(call: Callable[[], Any]) -> bool:
    r"""Whether a call computes exponentials, as each softmax does.

    >>> scores = torch.ones(3)
    >>> calls_softmax(lambda: scores.exp() / scores.exp().sum())
    True
    >>> calls_softmax(lambda: scores.relu().expand(2, 3))
    False
    """
    with CalledFunctions() as functions:
        call()
    return any(map(SOFTMAX_PATTERN.fullmatch, functions.found))


def sdpa_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights of `torch.nn.functional.scaled_dot_product_attention`."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1)


def recorded_weights(
    call: Callable[[], Any],
    heads: int,
    q_len: int,
    k_len: int,
    queries_first: bool = False,
) -> Tensor | None:
    r"""The weights of a call with one batch item, `[heads, q_len, k_len]`.

    None unless exactly one softmax of the call has results of this shape, in any order
    of the axes, or several have it together, each for some of the queries, or have the
    same results, as layers for equal tokens. Where there are as many queries as heads,
    `queries_first` tells which axis is which.

    >>> scores = torch.zeros(1, 2, 3, 5)
    >>> recorded_weights(lambda: scores.softmax(-1), 2, 3, 5).shape
    torch.Size([2, 3, 5])
    >>> recorded_weights(lambda: scores.permute(2, 3, 0, 1).softmax(1), 2, 3, 5).shape
    torch.Size([2, 3, 5])
    >>> halves = lambda: [s.softmax(-1) for s in torch.zeros(1, 2, 4, 5).split(2, 2)]
    >>> recorded_weights(halves, 2, 4, 5).shape
    torch.Size([2, 4, 5])
    >>> recorded_weights(lambda: scores + 1, 2, 3, 5) is None
    True
    """
    with WeightsRecorder() as recorder:
        call()
    sizes = [weights.numel() for weights, _ in recorder.found]
    whole = heads * q_len * k_len
    if whole not in sizes and sum(sizes) == whole and min(sizes) > heads * k_len:
        parts = [
            weights_by_head(each, dim, heads, each.numel() // (heads * k_len), k_len)
            for each, dim in recorder.found
        ]
        known = [part for part in parts if part is not None]
        return torch.cat(known, dim=1) if len(known) == len(parts) else None
    every = [
        weights_by_head(weights, dim, heads, q_len, k_len, queries_first)
        for weights, dim in recorder.found
    ]
    return the_only([each for each in every if each is not None])


def first_weights(
    call: Callable[[], Any], model: nn.Module, q_len: int, k_len: int
) -> Tensor | None:
    r"""The weights of the first attention of a model that tells equal tokens apart.

    If none does, those of the first. None unless its tokens are equal: each linear
    layer that is called before it has the same input for all, to which no positions
    were added.

    >>> layer, x = nn.Linear(3, 3), torch.ones(1, 5, 3)
    >>> def attend(x): return (layer(x) @ layer(x).mT).softmax(-1)
    >>> first_weights(lambda: attend(x), layer, 5, 5).shape
    torch.Size([1, 5, 5])
    >>> tokens = torch.randn(1, 5, 3)
    >>> first_weights(lambda: attend(tokens), layer, 5, 5) is None
    True
    """
    recorder = WeightsRecorder()
    are_equal: list[bool] = []

    def note(_layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        for x in given[:1]:
            axes = [n for n, size in enumerate(x.shape[:-1]) if size == k_len]
            if axes and not recorder.found:
                first = x.narrow(axes[0], 0, 1)
                are_equal.append(torch.allclose(x, first, atol=1e-5))

    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    with recorder:
        call()
    for handle in handles:
        handle.remove()
    every = (
        weights_by_head(weights, dim, weights.numel() // (q_len * k_len), q_len, k_len)
        for weights, dim in recorder.found
    )
    found = [weights for weights in every if weights is not None]
    if not (found and are_equal and all(are_equal)):
        return None
    last = (weights[:, -1] for weights in found)
    seen = ((row, row.where(row > 0, torch.inf)) for row in last)
    apart = [bool(row.max() > 1.001 * visible.min()) for row, visible in seen]
    return found[apart.index(True) if any(apart) else 0]


def the_only(found: list[Tensor]) -> Tensor | None:
    """The tensor that a list has, once or several times, up to rounding."""
    is_one = bool(found) and all(
        each.shape == found[0].shape and torch.allclose(each, found[0], atol=1e-6)
        for each in found[1:]
    )
    return found[0] if is_one else None


def fused_weights(call: Callable[[], Any]) -> Tensor | None:
    r"""The weights of PyTorch's attention, if all that a call computes are the same.

    >>> from torch.nn.functional import scaled_dot_product_attention as attend
    >>> x = torch.zeros(1, 2, 4, 3)
    >>> fused_weights(lambda: attend(x, x, x)).shape
    torch.Size([1, 2, 4, 4])
    >>> fused_weights(lambda: x.softmax(-1)) is None
    True
    """
    with WeightsRecorder() as recorder:
        call()
    return the_only(recorder.fused)


def weights_of_patches(
    call: Callable[[], Any], rows: int, columns: int
) -> Tensor | None:
    r"""Logarithms of the first weights, relative to those of each patch to itself.

    They are `[heads, rows, columns, rows, columns]`. Other tokens, such as that of a
    class, are in front. None if the weights are not of all patches.

    >>> scores = torch.tensor([[[0.0, 1.0], [3.0, 5.0]]])  # of two patches
    >>> weights_of_patches(lambda: scores.softmax(-1), 1, 2).flatten()
    tensor([ 0.,  1., -2.,  0.])
    """
    with WeightsRecorder() as recorder:
        call()
    count = rows * columns
    for weights, dim in recorder.found[:1]:
        others = weights.shape[dim] - count
        if weights.shape[-2:] == weights.shape[-1:] * 2 and 0 <= others <= 8:
            logs = weights.flatten(0, -3)[:, others:, others:].log()
            relative: Tensor = logs - logs.diagonal(dim1=1, dim2=2)[..., None]
            sides = rows, columns
            return relative.view(-1, *sides, *sides)
    return None


class AppliedWeights(WeightsRecorder):
    """Records what is multiplied, too: weights that are applied are a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if re.search("mul|mm|einsum|scatter|gather", getattr(function, "__name__", "")):
            self.factors += tensors_in(args)
        return super().__torch_function__(function, types, args, kwargs)


def returns_other_weights(call: Callable[[], Any]) -> bool:
    r"""Whether a call returns results of a softmax that are not the weights it applies.

    Those are multiplied with nothing, while others of the same shape are. They may be
    returned for each layer, or as the mean over heads.

    >>> q, v = torch.randn(2, 1, 3, 5, 4)
    >>> def attend(c): return (q @ q.mT).softmax(-1) @ v, (c * q @ q.mT).softmax(-1)
    >>> [returns_other_weights(lambda: attend(scale)) for scale in (1, 2)]
    [False, True]
    """
    with AppliedWeights() as recorder:
        result = call()
    sizes = {each.numel() for each, _ in recorder.found}
    factors = [each for each in recorder.factors if each.numel() in sizes]
    factors += recorder.fused
    applied: list[Tensor] = []
    others: list[Tensor] = []
    for weights, _ in recorder.found:
        are_applied = any(have_equal_numbers(weights, each) for each in factors)
        (applied if are_applied else others).append(weights)
    shapes = {each.shape for each in applied}
    others = [each for each in others if each.shape in shapes]
    return any(
        are_among(each, others) and not are_among(each, applied)
        for returned in tensors_in(result)
        for each in (returned, *(returned.unbind() if returned.dim() > 4 else ()))
    )


def are_among(returned: Tensor, found: list[Tensor]) -> bool:
    """Whether a tensor has the numbers of one of those, or its mean over heads."""
    return any(
        have_equal_numbers(returned, each)
        for weights in found
        for each in (weights, *([weights.mean(1)] if weights.dim() == 4 else []))
    )


def have_equal_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same numbers, in any order of their axes."""
    if a.numel() != b.numel() or not (a.is_floating_point() and b.is_floating_point()):
        return False
    first, second = (x.flatten().sort().values for x in (a, b))
    return torch.allclose(first, second, atol=1e-6)


def weights_by_head(
    weights: Tensor,
    dim: int,
    heads: int,
    q_len: int,
    k_len: int,
    queries_first: bool = False,
) -> Tensor | None:
    """Weights as `[heads, q_len, k_len]`; None if they have another shape.

    `dim` is the axis of the keys. `queries_first` is as for `recorded_weights`.
    """
    if weights.shape[dim] != k_len or weights.numel() != heads * q_len * k_len:
        return None
    by_key = weights.movedim(dim, -1).squeeze()
    # Keys are the last axis, behind heads and queries, or are between the two.
    is_last = dim in (-1, weights.dim() - 1)
    may_be_first = by_key.dim() == 3 and [*by_key.shape[:2]] == [q_len, heads]
    if may_be_first and (queries_first or not (is_last and q_len == heads)):
        by_key = by_key.transpose(0, 1)
    expected = [n for n in (heads, q_len, k_len) if n > 1]
    if [n for n in by_key.shape if n > 1] != expected:
        return None
    # A row for each query, behind heads, is the product with keys of its own, such as
    # those of its neighbors: there may be as many as there are tokens.
    if weights.dim() > 4 and q_len > 1 and [*weights.shape[-3:-1]] == [q_len, 1]:
        return None
    return by_key.reshape(heads, q_len, k_len)


def count_zero_weights(call: Callable[[], Any]) -> int:
    r"""How many results of the softmax of a call are zero, as those of hidden keys are.

    >>> scores = torch.tensor([0.0, -torch.inf, 1.0])
    >>> count_zero_weights(lambda: scores.softmax(dim=-1))
    1
    """
    with WeightsRecorder() as recorder:
        call()
    return sum(int((weights == 0).sum()) for weights, _ in recorder.found)


def count_entries(call: Callable[[], Any]) -> int:
    r"""The number of entries of all tensors that a call computes.

    Fused kernels compute the scores without storing them, so they are replaced.

    >>> x = torch.ones(5, 1)
    >>> count_entries(lambda: (x * x.T).sum())  # 5 transposed, 25 products, one sum
    31
    """
    counter = EntryCounter()  # type: ignore[no-untyped-call]
    with counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.count


def weights_if_scaled(
    call: Callable[[], Any], factors: dict[nn.Module, float]
) -> Tensor:
    r"""All attention weights of a call in which the outputs of layers are multiplied.

    >>> layer = nn.Identity()
    >>> weights_if_scaled(lambda: layer(torch.arange(2.0)).softmax(0), {layer: 1e3})
    tensor([0., 1.])
    """
    handles = [
        layer.register_forward_hook(lambda _, __, y, factor=factor: factor * y)
        for layer, factor in factors.items()
    ]
    with WeightsRecorder() as recorder:
        call()
    for handle in handles:
        handle.remove()
    none = torch.empty(0)
    return torch.cat([none, *(weights.flatten() for weights, _ in recorder.found)])
