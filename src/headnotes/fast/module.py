r"""# Multi-head attention, at full speed

The same constructor, the same parameters, the same masks, errors and answers as the
[readable core](../mha.md): a checkpoint of either loads into the other. What differs is
only how the numbers move.

The core keeps an axis for each letter of its formula, `[q_len, k_len, batch_size,
heads]`, and lets its softmax run over the second of four: each number it needs lies far
from the one before. Here batch items and heads fold into a single axis, and every
product and softmax runs along the last one. The fold is free: sequence first,
`[seq_len, batch_size, heads * d_k]` and `[seq_len, batch_size * heads, d_k]` are the
same memory, so that a kernel which takes strides needs no copy, neither of what it
reads nor of what it writes.

Which kernel that is depends on the call, and is told [where it is
chosen](dispatch.md). The promise is the same for all: nothing of a call stays on the
module, and memory grows with the length, not with its square, unless the weights
themselves are asked for.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2; [FlashAttention-2](https://arxiv.org/abs/2307.08691), Dao 2023, for
the kernels behind `F.scaled_dot_product_attention`.
"""

# What is imported with a dot stands beside this file; nothing else is needed.
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headnotes import mha
from headnotes.fast.blocks import Rule
from headnotes.fast.dispatch import (
    FEW,
    eager,
    far,
    finite,
    read,
    read_and_show,
    with_past,
)
from headnotes.fast.kv_cache import KeyValueCache

NAMES = "query", "key", "value", "output"


class Packed(NamedTuple):
    """The maps as they are multiplied, and what they were made of."""

    weight: Tensor
    bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    made_of: list[int]
    held: list[Tensor]

    @classmethod
    def of(cls, layers: list[nn.Linear], heads: int, made_of: list[int]) -> "Packed":
        """Three projections interleaved, and the output map turned."""
        *three, output = layers
        # [heads, 1, d_k, d_model] each: what is to be interleaved lies side by side.
        weights = [p.weight.detach().view(heads, 1, -1, p.in_features) for p in three]
        weight = torch.cat(weights, dim=1).flatten(0, 2)  # [heads * 3 * d_k, d_model]
        none = torch.zeros_like(output.bias)  # [d_model]
        biases = [none if layer.bias is None else layer.bias for layer in three]
        parts = [bias.detach().view(heads, 1, -1) for bias in biases]
        bias = torch.cat(parts, dim=1).flatten()  # [heads * 3 * d_k]
        # What it was made of is held: nothing else can come to lie in its place.
        alive = [p for layer in layers for p in layer.parameters()]
        held = [*alive, *(p.detach() for p in alive)]
        return cls(weight.T, bias, output.weight.T, output.bias, made_of, held)


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention over `[seq_len, batch_size, d_model]`, at full speed.

    Takes what the core's class takes, and refuses what it refuses. Nothing of a call
    stays on the module; who wants the weights asks for them with `need_weights`.
    Source: Vaswani et al. 2017, section 3.2.2.

    >>> core = mha.MultiHeadAttention(7, 77).eval()
    >>> fast = MultiHeadAttention(7, 77).eval()
    >>> fast.load_state_dict(core.state_dict())
    <All keys matched successfully>
    >>> x, y = torch.randn(3, 2, 77), torch.randn(5, 2, 77)
    >>> output = fast(query=x, key=y, value=y)
    >>> same = core(query=x, key=y, value=y)
    >>> torch.allclose(output, same, atol=1e-6)
    True

    A key that no query may read may hold anything:

    >>> mask = torch.ones(1, 5, 2).bool()
    >>> mask[:, 3:, 1] = False
    >>> y[3:, 1] = torch.nan
    >>> output = fast(query=x, key=y, value=y, mask=mask)
    >>> output.isfinite().all()
    tensor(True)
    """

    def __init__(
        self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True
    ) -> None:
        r"""Build the four linear maps, which are all that is learned."""
        super().__init__()
        mha.check_settings(heads, d_model, dropout_prob)
        self.heads = heads
        self.d_k = d_model // heads
        # The core's names and biases: its checkpoints are to fit.
        self.query = mha.PrepareForMultiHeadAttention(
            d_model, heads, self.d_k, bias=bias
        )
        self.key = mha.PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.value = mha.PrepareForMultiHeadAttention(
            d_model, heads, self.d_k, bias=True
        )
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_prob)
        self.packed: Packed | None = None

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        average_weights: bool = False,
    ) -> Any:
        r"""Read from `value` where `query` meets `key`.

        Shapes, `mask` and errors are those of the core. `is_causal` forbids each query
        the keys after its own, where the last query meets the last key; it is said, and
        never guessed from a mask's values, and it joins a mask if there is one.

        With `need_weights` the result is a pair of output and weights, the latter
        before dropout, `[q_len, k_len, batch_size, heads]`, or with `average_weights`
        their mean over the heads, `[q_len, k_len, batch_size]`.

        >>> fast = MultiHeadAttention(7, 77).eval()
        >>> x, y = torch.randn(8, 2, 77).split([3, 5])
        >>> output, weights = fast(
        ...     query=x, key=y, value=y,
        ...     is_causal=True, need_weights=True,
        ... )
        >>> (weights[:, :, 0, 0] > 0).int()
        tensor([[1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1]], dtype=torch.int32)
        """
        alone = query is key is value and not need_weights
        if alone and (y := self.read_itself(query, mask, is_causal)) is not None:
            return y

        mask = check(self.output.weight, query, key, value, mask=mask)
        look = (mask is not None or is_causal) and eager(query)
        careful = Rule(mask, is_causal, self.dropout.p if self.training else 0.0)
        for rule in (careful._replace(finite=look), careful):
            q, k, v = self.project(query, key, value, rule)  # [..., heads, d_k]
            if need_weights:
                context, weights = read_and_show(
                    q, k, v, rule, average_weights
                )  # [q_len, batch_size, heads, d_k], [q_len, k_len, ...]
            else:
                context = read(q, k, v, rule)  # [q_len, batch_size, heads, d_k]
            output = self.output(context.flatten(-2))  # [q_len, batch_size, d_model]
            # A key that is no number, or of which none can be made, spoils whole rows
            # even unread: one number of each tells, and all is done again, with care.
            if not look or finite(output[..., 0]):
                break
        return (output, weights) if need_weights else output

    def read_itself(
        self, x: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor | None:
        """The plainest call, which for a short sequence is all overhead and no work.

        A handful of operators, each a view or a product; None where it does not apply.

        >>> fast = MultiHeadAttention(7, 77).eval()
        >>> x = torch.randn(5, 2, 77)
        >>> at_length = fast(query=x, key=x, value=x)
        >>> with torch.no_grad():
        ...     short = fast.read_itself(x, None, False)
        >>> torch.allclose(short, at_length, atol=1e-6)
        True
        """
        if self.training or (packed := self.pack()) is None:
            return None
        mask = check(packed.output_weight, x, x, x, mask=mask)
        plain = mask is None or (not is_causal and eager(x))
        if x.shape[0] > FEW or not plain:
            return None
        seq_len, batch_size, d_model = x.shape
        y = self.multiply(packed, x)  # [3, batch_size, heads, seq_len, d_k]
        q, k, v = y.unbind(0)  # [batch_size, heads, seq_len, d_k]
        keep = None if mask is None else mask.permute(2, 0, 1).unsqueeze(1)
        context = F.scaled_dot_product_attention(q, k, v, keep, is_causal=is_causal)
        context = context.permute(2, 0, 1, 3).reshape(-1, d_model)  # [..., d_model]
        output = torch.addmm(packed.output_bias, context, packed.output_weight)
        # As above: one number of each row tells whether the mask was enough.
        if mask is not None and not finite(output[:, 0]):
            return None
        return output.view(seq_len, batch_size, d_model)  # [..., batch_size, d_model]

    def project(
        self, query: Tensor, key: Tensor, value: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each `[seq_len, batch_size, heads, d_k]`."""
        # Zero times NaN is NaN: as in the core, what none may read is cleared.
        if rule.mask is not None and not rule.finite:
            mask = with_past(rule, query, key) if rule.is_causal else rule.mask
            unread = ~mask.any(dim=0).unsqueeze(-1)  # [..., 1]
            key, value = key.masked_fill(unread, 0), value.masked_fill(unread, 0)
        if query is key is value and (packed := self.pack()) is not None:
            y = self.multiply(packed, query)  # [3, ..., d_k]
            # Copied here rather than later, what it was copied from can go.
            if far(y):
                y = y.contiguous()
            q, k, v = y.permute(0, 3, 1, 2, 4)  # [..., d_k]
            return q, k, v
        return self.query(query), self.key(key), self.value(value)  # [..., d_k]

    def multiply(self, packed: Packed, x: Tensor) -> Tensor:
        """All three projections of a sequence in one product, as views by head."""
        seq_len, batch_size, d_model = x.shape
        x = x.reshape(-1, d_model)  # [seq_len * batch_size, d_model]
        y = torch.addmm(packed.bias, x, packed.weight)  # [..., heads * 3 * d_k]
        sizes = seq_len, batch_size, self.heads, 3, self.d_k
        y = y.view(sizes).permute(3, 1, 2, 0, 4)
        return y  # [3, batch_size, heads, seq_len, d_k]

    def pack(self) -> Packed | None:
        r"""The projections as one, or None where a gradient, compiler or hook looks on.

        Columns of the weight lie by head, then by query, key and value, then by
        component: so all three come out as views that still fold. It is made once, and
        again when a parameter is another one, lies elsewhere, or was written to; what
        `.data` hides from that is caught at the next `train()` or `eval()`. While there
        is something to learn it would not pay: gradients had to be copied apart.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        # Past the attributes of modules, whose search takes as long as a tiny product.
        layers: list[nn.Linear] = []
        made_of: list[int] = []
        for name in NAMES:
            part: Any = self._modules[name]
            layer = part if name == "output" else part._modules["linear"]
            hooks = part._forward_hooks or part._forward_pre_hooks
            hooks = hooks or layer._forward_hooks or layer._forward_pre_hooks
            if hooks or type(layer) is not nn.Linear:
                return None
            layers.append(layer)
            for p in layer._parameters.values():
                if p is not None:
                    try:
                        made_of += (id(p), p.data_ptr(), p._version)
                    except RuntimeError:  # of `vmap`, or of inference mode
                        return None
        if self.packed is None or self.packed.made_of != made_of:
            self.packed = Packed.of(layers, self.heads, made_of)
        return self.packed

    def cache(
        self, batch_size: int, capacity: int, *, grow: bool = False
    ) -> KeyValueCache:
        r"""An empty cache for `decode`, with the module's sizes, dtype and device.

        Under autocast the dtype is the one that products come in there.
        """
        like = self.output.weight
        dtype, kind = like.dtype, like.device.type
        if not like.is_meta and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        sizes = batch_size, self.heads, self.d_k, capacity
        return KeyValueCache(*sizes, grow=grow, dtype=dtype, device=like.device)

    @torch.no_grad()
    def decode(self, x: Tensor, cache: KeyValueCache) -> tuple[Tensor, KeyValueCache]:
        r"""Go on by the positions `x`, `[seq_len, batch_size, d_model]`, one or many.

        Each reads itself and all before it, those in the cache too, where its key and
        value then stay. Whatever the pieces, the outputs are those of one causal pass.
        There is no dropout here, and no gradient. Raises what `forward` raises, and
        `ValueError` where the cache is full or made for other sizes.

        >>> fast = MultiHeadAttention(7, 77).eval()
        >>> x = torch.randn(5, 2, 77)
        >>> cache = fast.cache(batch_size=2, capacity=5)
        >>> prompt, cache = fast.decode(x[:3], cache)
        >>> token, cache = fast.decode(x[3:4], cache)
        >>> at_once = fast(query=x, key=x, value=x, is_causal=True)
        >>> in_pieces = torch.cat([prompt, token])
        >>> torch.allclose(in_pieces, at_once[:4], atol=1e-6)
        True
        """
        like, d_model = self.output.weight, self.output.in_features
        mha.check_tensor("x", x, like.device, like.dtype)
        if x.dim() != 3 or x.shape[-1] != d_model:
            raise ValueError(
                f"`x` has shape {list(x.shape)}, not [seq_len, batch_size, d_model "
                f"(={d_model})]; a token of each sentence needs `x.unsqueeze(0)`"
            )
        if not isinstance(cache, KeyValueCache):
            raise TypeError(
                f"`cache` is a {type(cache).__name__}, not a KeyValueCache; make one "
                f"with `cache(batch_size, capacity)`"
            )
        q, k, v = self.project(x, x, x, Rule())  # [..., batch_size, heads, d_k]
        cache.append(k, v)
        if x.shape[0] == 1:
            # The last query may read all there is, as it lies: here each view counts.
            q = q.permute(1, 2, 0, 3)  # [batch_size, heads, ..., d_k]
            context = F.scaled_dot_product_attention(q, cache.keys, cache.values)
            context = context.permute(2, 0, 1, 3)  # [..., batch_size, heads, d_k]
        else:
            kept = cache.keys, cache.values
            k, v = (y.permute(2, 0, 1, 3) for y in kept)  # [..., heads, d_k]
            context = read(q, k, v, Rule(is_causal=True))  # [..., heads, d_k]
        output = self.output(context.flatten(-2))  # [..., batch_size, heads * d_k]
        return output, cache

    def train(self, mode: bool = True) -> Self:
        self.packed = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.packed = None
        module: Self = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return module

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"packed": None}


def check(like: Tensor, *x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Refuse what the core refuses, and return the mask as bool."""
    mha.check_inputs(like, *x)
    if mask is not None:
        mha.check_tensor("mask", mask, like.device)
        mha.check_mask(mask, x[0].shape, x[1].shape)
    return mask if mask is None else mask.bool()
