r"""# One set of weights, many modules

Implementations of attention differ in names and in layout, but hardly in what they
compute. So what one of them has learned can be put into another:

>>> ours = to(nn.MultiheadAttention(512, 8), "core")
>>> theirs = to(ours, "torch", batch_first=True)

In the middle stands a hub, `Weights`: `query`, `key`, `value` and `output`, each with a
weight and perhaps a bias. Each implementation is a spoke, and a spoke only says *where*
the rows of these four lie among its own parameters. Reading joins the rows, writing
copies them to their places. Nothing is ever added, multiplied or rounded, so the way
there and back ends on the same bits.

Biases are where implementations disagree. A missing one is written as zeros where the
target must have it. One that exists is kept, for even a zero may be about to learn; one
that is not zero is never dropped: you get an error instead.

**Weights carry no mask.** What is built as `"causal"`, `"causal_head"` or `"wrapper"`
looks only backwards, whatever it was made from; `"v1"` and `"v2"` look everywhere; the
others do as each call tells them. Nor do weights carry a layout: the core reads
sequence first, and so does `"torch"` until `batch_first` is set; the others read batch
first, and `"v1"` and `"v2"` know no batch.

Source: the systems themselves, each named on the page of its module; for fused
projections timm's `Attention` and GPT-NeoX.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headnotes import mha
from headnotes.implementations import batch_first, causal, stages, valid_lens


class Projection(NamedTuple):
    """One linear map: `weight` is `[d_out, d_in]`, `bias` is `[d_out]` or missing."""

    weight: Tensor
    bias: Tensor | None = None

    def bias_or_zeros(self) -> Tensor:
        """A missing bias adds nothing, and neither do zeros.

        >>> Projection(torch.eye(2)).bias_or_zeros()
        tensor([0., 0.])
        """
        d_out = len(self.weight)
        zeros = self.weight.new_zeros(d_out)  # [d_out]
        return zeros if self.bias is None else self.bias


class Weights(NamedTuple):
    r"""The hub: all that attention learns, whoever wrote its code.

    Head $h$ owns rows $h\,d_k$ to $(h+1)\,d_k - 1$ of `query`, `key` and `value`, and
    the same *columns* of `output`.
    """

    heads: int
    query: Projection
    key: Projection
    value: Projection
    output: Projection


class Fused(nn.Module):
    r"""Query, key and value in one product: a place to load a checkpoint into.

    Many models multiply once, by `[3 * d_model, d_model]`, and split what comes out.
    `order` says how the rows are counted, which no shape betrays: `"3 heads d_k"` has
    all queries first (torch, timm), `"heads 3 d_k"` all that is of head 0 (GPT-NeoX,
    BLOOM). Load `qkv` and `output`, then convert; this module computes nothing. Raises
    `ValueError` for another order, or where `heads` does not divide `d_model`. Source:
    timm, `Attention.qkv`; GPT-NeoX, `query_key_value`.

    >>> fused = Fused(10, heads=2, order="heads 3 d_k")
    >>> head_1 = read(fused).query.weight[5:]
    >>> head_1.equal(fused.qkv.weight[15:20])
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        order: str,
        qkv_bias: bool = True,
        output_bias: bool = True,
    ) -> None:
        super().__init__()
        mha.check_settings(heads, d_model, dropout_prob=0)
        if str(order) not in (one := "3 heads d_k", other := "heads 3 d_k"):
            raise ValueError(f"`order` (={order!r}) must be {one!r} or {other!r}")
        self.heads = heads
        self.order = order
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=qkv_bias)
        self.output = nn.Linear(d_model, d_model, bias=output_bias)


PARTS = ("query", "key", "value", "output")
STAGED = ("W_query", "W_key", "W_value")
FOLDED = ("W_q", "W_k", "W_v", "W_o")
HEADS = ("heads", "num_heads", "n_heads")

# For each part the blocks of rows that make it up, as views into a module. A spoke is
# asked for them twice, by the name of `what` is wanted: "weight", then "bias".
Blocks = list[list[Tensor | None]]


def by_name(*names: str) -> Callable[[Any, str], Blocks]:
    """One linear layer for each part. No transposition is needed."""
    return lambda module, what: [
        [getattr(module.get_submodule(name), what)] for name in names
    ]


def in_v1(module: Any, what: str) -> Blocks:
    """Bare matrices `[d_in, d_out]`, applied from the right; a transpose is a view."""
    return [[getattr(module, n).T if what == "weight" else None] for n in STAGED]


def in_wrapper(module: Any, what: str) -> Blocks:
    """A module for each head; the hub has the same rows, stacked."""
    return [[getattr(getattr(h, n), what) for h in module.heads] for n in STAGED]


def in_torch(module: Any, what: str) -> Blocks:
    """Three matrices in one, unless keys or values have a width of their own."""
    if module.bias_k is not None or module.add_zero_attn:
        extra = "`add_bias_kv` or `add_zero_attn`, a key that the others do not have"
        raise ValueError(f"`module` was built with {extra}; it cannot be converted")
    packed = getattr(module, f"in_proj_{what}")
    parts = [getattr(module, f"{name}_proj_{what}", None) for name in "qkv"]
    parts = parts if packed is None else list(packed.chunk(3))
    return [*([part] for part in parts), [getattr(module.out_proj, what)]]


def in_fused(module: Any, what: str) -> Blocks:
    """Blocks of `d_k` rows, one a head, counted as `order` says."""
    rows = getattr(module.qkv, what)  # [3 * heads * d_k, ...]
    axes, heads = module.order.split(), module.heads
    sizes = [{"3": 3, "heads": heads, "d_k": -1}[axis] for axis in axes]
    parts: Any = [[], [], []]
    if rows is not None:
        three = axes.index("3")
        parts = rows.unflatten(0, sizes).movedim(three, 0)  # [3, heads, d_k, ...]
    return [*map(list, parts), [getattr(module.output, what)]]


class Spoke(NamedTuple):
    """All that there is to know of an implementation."""

    kind: type[nn.Module]
    blocks: Callable[[Any, str], Blocks]
    # The bias of each part: governed by the flag of this name, or always there, or
    # never. With three entries, there is no output projection.
    biases: tuple[str | bool, ...]
    # Which widths must be one and the same: of inputs, and of the output.
    one_width: tuple[str, ...] = PARTS[:3]


def rows_of(spoke: Spoke, module: nn.Module, what: str) -> list[list[Tensor]]:
    """The blocks of each part, without biases that do not exist."""
    return [[b for b in part if b is not None] for part in spoke.blocks(module, what)]


FLAG = ("qkv_bias",) * 3
SPOKES = {
    "core": Spoke(
        mha.MultiHeadAttention,
        by_name("query.linear", "key.linear", "value.linear", "output"),
        ("bias", "bias", True, True),
        one_width=PARTS,
    ),
    "causal": Spoke(
        causal.MultiHeadAttention, by_name(*STAGED, "out_proj"), (*FLAG, True)
    ),
    "valid_lens": Spoke(
        valid_lens.MultiHeadAttention, by_name(*FOLDED), ("bias",) * 4, one_width=()
    ),
    "batch_first": Spoke(
        batch_first.MultiHeadAttention,
        by_name("Wq", "Wk", "Wv", "Wo"),
        (True,) * 4,
        one_width=PARTS,
    ),
    "v1": Spoke(stages.SelfAttention_v1, in_v1, (False,) * 3),
    "v2": Spoke(stages.SelfAttention_v2, by_name(*STAGED), FLAG),
    "causal_head": Spoke(stages.CausalAttention, by_name(*STAGED), FLAG),
    "wrapper": Spoke(stages.MultiHeadAttentionWrapper, in_wrapper, FLAG),
    "torch": Spoke(
        nn.MultiheadAttention, in_torch, ("bias",) * 4, one_width=("query", "output")
    ),
    "fused": Spoke(Fused, in_fused, (*FLAG, "output_bias"), one_width=PARTS),
}


@torch.no_grad()
def read(module: nn.Module) -> Weights:
    r"""The weights of `module`, copied; a missing output projection is the identity.

    Raises `TypeError` for a module that is no spoke, or a subclass of one, which may
    compute anything; `ValueError` for one without weights, or of mixed dtypes.

    >>> weights = read(
    ...     stages.MultiHeadAttentionWrapper(5, 3, 7, 0.0, 2)
    ... )
    >>> weights.query.weight.shape, weights.query.bias
    (torch.Size([6, 5]), None)
    >>> weights.output.weight.equal(torch.eye(6))
    True
    """
    module = getattr(module, "_orig_mod", module)  # beneath what `torch.compile` made
    spoke = next((s for s in SPOKES.values() if s.kind is type(module)), None)
    if spoke is None:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        way_out = f"load its weights into one of {', '.join(SPOKES)}"
        raise TypeError(f"`module` is a {kind}, which is unknown here; {way_out}")
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ValueError("`module` is lazy; first call it, or load a checkpoint")
    if len({(p.dtype, p.device) for p in module.parameters()}) > 1:
        raise ValueError("`module` mixes dtypes or devices; first use `module.to(...)`")
    weights, biases = rows_of(spoke, module, "weight"), rows_of(spoke, module, "bias")
    parts = [
        Projection(torch.cat(weight), torch.cat(bias) if bias else None)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    d_out = len(parts[0].weight)
    identity = parts[0].weight.new_ones(d_out).diag()  # [d_out, d_out]
    # They go by three names, one of them a list's. Who has no word for them is one.
    heads: Any = next((getattr(module, n) for n in HEADS if hasattr(module, n)), 1)
    heads = len(heads) if isinstance(heads, nn.ModuleList) else heads
    return Weights(heads, *(*parts, Projection(identity))[:4])


@torch.no_grad()
def to(module: nn.Module, target: str, **settings: Any) -> nn.Module:
    r"""A new module, of the kind that `target` names, with the weights of `module`.

    `target` is a name in `SPOKES`, above. `settings` are what its constructor can be
    told beside sizes: dropout, `context_length`, flags for biases, `batch_first`,
    `order`. Where you are silent, they are those of `module`, as are dtype, device and
    mode. No memory is shared, and no random number is used up. Raises `ValueError`
    where the target cannot hold the weights, `TypeError` for a setting that it lacks.

    >>> ours = causal.MultiHeadAttention(6, 6, 5, 0.0, 2)
    >>> theirs = to(ours, "torch", batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> y, _ = theirs(x, x, x, attn_mask=ours.mask)
    >>> torch.allclose(y, ours(x), atol=1e-6)
    True
    """
    if not isinstance(target, str) or target not in SPOKES:
        known = ", ".join(SPOKES)
        raise ValueError(f"`target` (={target!r}) is unknown; there are {known}")
    spoke, weights = SPOKES[target], read(module)
    arguments = arguments_of(target, weights, module, settings)
    check(target, weights, arguments)
    # Built in the usual way, so that buffers hold what they should. The random numbers
    # that this draws are overwritten, and the caller's generator does not notice.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        built = spoke.kind(**arguments)
        if target == "valid_lens":  # whose layers learn their widths from an input
            for name, part in zip(FOLDED, weights[1:], strict=True):
                built.get_submodule(name)(torch.zeros(1, part.weight.shape[1]))
    built.to(weights.query.weight).train(module.training)
    for what in ("weight", "bias"):
        for part, blocks in zip(weights[1:], rows_of(spoke, built, what), strict=False):
            rows = part.weight if what == "weight" else part.bias_or_zeros()
            for block, piece in zip(blocks, rows.chunk(len(blocks) or 1), strict=False):
                block.copy_(piece)
    return built


def arguments_of(
    target: str, weights: Weights, module: nn.Module, settings: dict[str, Any]
) -> dict[str, Any]:
    """What the constructor of the target asks for, by the names that it uses."""
    heads, *parts = weights
    d_in, kdim, vdim, d_out = (part.weight.shape[1] for part in parts)
    sizes = {"d_in": d_in, "kdim": kdim, "vdim": vdim} | dict.fromkeys(HEADS, heads)
    sizes |= dict.fromkeys(("d_out", "d_model", "num_hiddens", "embed_dim"), d_out)
    if target == "wrapper":  # where it means the width of one head, not of all
        sizes["d_out"] = d_out // heads

    free: dict[str, Any] = {"dropout": 0.0, "batch_first": False}
    free |= {"context_length": None, "order": None}
    for child in module.modules():
        free |= {name: vars(child)[name] for name in free if name in vars(child)}
        free |= {"dropout": child.p} if isinstance(child, nn.Dropout) else {}
    free["dropout_prob"] = free["dropout"]
    # A flag is on where there is a bias that it would keep.
    for part, rule in zip(parts, SPOKES[target].biases, strict=False):
        if isinstance(rule, str):
            free[rule] = free.get(rule, False) or part.bias is not None

    asked = inspect.signature(SPOKES[target].kind).parameters
    sizes, free = ({n: d[n] for n in d if n in asked} for d in (sizes, free))
    if unknown := ", ".join(f"`{name}`" for name in settings if name not in free):
        known = ", ".join(free) or "none"
        raise TypeError(f"{target!r} has no setting {unknown}; there are {known}")
    free |= settings
    for name in (name for name in free if free[name] is None):
        raise ValueError(f"{target!r} needs `{name}=...`, as `module` has none")
    return sizes | free


def check(target: str, weights: Weights, arguments: dict[str, Any]) -> None:
    """Refuse a target that cannot hold the weights, or would lose some of them."""
    heads, *parts = weights
    _, _, biases, one_width = SPOKES[target]
    widths = [getattr(weights, part).weight.shape[1] for part in one_width]
    if len(set(widths)) > 1:
        raise ValueError(
            f"{target!r} has one width for {', '.join(one_width)}, which in `module` "
            f"are {', '.join(map(str, widths))} wide; each may differ in 'valid_lens'"
        )
    if heads > 1 and arguments.keys().isdisjoint(HEADS):
        raise ValueError(f"{target!r} is one head, but `module` has {heads}")
    rows = weights.output.weight
    identity = rows.new_ones(len(rows)).diag()
    if len(biases) == 3 and (rows.is_meta or not rows.equal(identity)):
        raise ValueError(
            f"{target!r} has no output projection, but `module` has one, and it is not "
            f"the identity; 'causal' could hold it"
        )
    for part, rule, (_, bias) in zip(PARTS, (*biases, False), parts, strict=False):
        kept = arguments[rule] if isinstance(rule, str) else rule
        if not kept and bias is not None and not bias.is_meta and bias.any():
            loses = f"`{rule}={kept}`" if isinstance(rule, str) else repr(target)
            raise ValueError(
                f"{loses} would lose the {part} bias of `module`, whose largest entry "
                f"is {bias.abs().max():.3g}; zero it first if you can do without it"
            )
