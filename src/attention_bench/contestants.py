r"""# The contestants

All compute the function of [the page](../mha.md), with the same weights, brought to
each by [`convert`](../convert.md). Each gets its input in the layout that it likes, and
is told of the mask in the best way that it offers, both before the clock starts. So a
contestant is a function that builds an entry, and an entry is a module, a call, and how
its result is read.

What takes part in no contest at all is left out of a cell silently: `causal` has no
words for padding, and FlexAttention knows no dropout.

Source: the systems under *As others write it*; of PyTorch
[`nn.MultiheadAttention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html),
[`scaled_dot_product_attention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html)
and [FlexAttention](https://docs.pytorch.org/docs/2.11/nn.attention.flex_attention.html).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_bench.setting import Setting
from attention_bench.timing import Answer
from headnotes import convert, masks, mha


@dataclass
class Entry:
    """A module in a contest: how it is called, and where its answer lies."""

    module: nn.Module
    call: Callable[[Tensor], Any]
    batch_first: bool = True
    # What a result shows beside the output: weights `[q_len, k_len, batch_size]`.
    weights: Callable[[Any], Tensor] | None = None
    # How long its first answer took: what takes long is warm after that.
    seconds: float = 0.0

    def turned(self, x: Tensor) -> Tensor:
        """A sequence-first tensor in the layout of this entry, or back again."""
        return x.transpose(0, 1).contiguous() if self.batch_first else x

    def read(self, result: Any) -> Answer:
        """The output, and the weights if they are shown, in the words of this house."""
        output = result[0] if isinstance(result, tuple) else result
        answer = {"output": self.turned(output.detach())}
        if self.weights is not None:
            answer["weights"] = self.weights(result).detach()
        return answer


Build = Callable[[mha.MultiHeadAttention, Setting], Entry]


@dataclass(frozen=True)
class Contestant:
    """Who takes part in what, and how it is told of a mask."""

    build: Build
    # For each mask that it has words for, these words; for "none" there are none.
    told: Mapping[str, str]
    training: bool = True
    dropout: bool = True

    def takes_part(self, setting: Setting) -> bool:
        """Has it words for this setting?"""
        able = self.training or not setting.training
        able = able and (self.dropout or not setting.dropout)
        return able and setting.mask in self.told


def core(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """The readable page itself."""
    mask, module = setting.keep(), convert.to(ours, "core")
    return Entry(
        module,
        lambda x: module(query=x, key=x, value=x, mask=mask),
        batch_first=False,
    )


def fast(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """The same at full speed."""
    module, how = build_fast(ours, setting)
    return Entry(
        module, lambda x: module(query=x, key=x, value=x, **how), batch_first=False
    )


def fast_weights(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """The same, returning the mean of the weights over heads as well."""
    module, how = build_fast(ours, setting)
    how |= {"need_weights": True, "average_weights": True}
    return Entry(
        module,
        lambda x: module(query=x, key=x, value=x, **how),
        batch_first=False,
        weights=lambda result: result[1],
    )


def build_fast(
    ours: mha.MultiHeadAttention, setting: Setting
) -> tuple[nn.Module, dict[str, Any]]:
    """The fast module with our weights, and what it is told of the mask."""
    from headnotes import fast

    module = fast.MultiHeadAttention(setting.heads, setting.d_model, setting.dropout)
    module.to(**setting.like).load_state_dict(ours.state_dict())
    if setting.mask == "causal":
        return module, {"is_causal": True}
    return module, {"mask": setting.keep()}


def nn_plain(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """PyTorch's module, asked for no weights: it may use the fast kernels."""
    module, how = convert.to(ours, "torch"), torch_mask(setting)
    return Entry(
        module, lambda x: module(x, x, x, need_weights=False, **how), batch_first=False
    )


def nn_weights(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """PyTorch's module, as it comes: it returns the weights, averaged over heads."""
    module, how = convert.to(ours, "torch"), torch_mask(setting)
    return Entry(
        module,
        lambda x: module(x, x, x, **how),
        batch_first=False,
        weights=lambda result: result[1].permute(1, 2, 0),
    )


def nn_fastpath(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """PyTorch's module, batch first: without gradients it takes a path of its own."""
    module = convert.to(ours, "torch", batch_first=True)
    how = torch_mask(setting)
    return Entry(module, lambda x: module(x, x, x, need_weights=False, **how))


def torch_mask(setting: Setting) -> dict[str, Any]:
    """What `nn.MultiheadAttention` is told of the mask."""
    keep = setting.keep()
    if keep is None:
        return {}
    if setting.mask == "padding":
        return {"key_padding_mask": masks.to_key_padding_mask(keep)}
    # The hint alone would be enough, but it is refused without a mask to go with it.
    return {"attn_mask": ~keep[..., 0], "is_causal": True}


def causal(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """Batch first, and always looking backwards."""
    module = convert.to(ours, "causal", context_length=setting.seq_len)
    return Entry(module, module)


def valid_lens(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    r"""Heads folded into the batch; masks are lengths.

    >>> for mask in ("padding", "causal"):
    ...     setting = Setting(2, 3, mask, d_model=10, heads=5)
    ...     entry = valid_lens(setting.core(), setting)
    ...     entry.call(entry.turned(setting.x())).shape
    torch.Size([2, 3, 10])
    torch.Size([2, 3, 10])
    """
    module, lengths = convert.to(ours, "valid_lens"), None
    batch_size, seq_len = setting.batch_size, setting.seq_len
    if setting.mask == "padding":
        lengths = setting.lengths()  # [batch_size]
    elif setting.mask == "causal":
        each = torch.arange(seq_len, device=setting.device) + 1  # [seq_len]
        lengths = each.expand(batch_size, -1)  # [batch_size, seq_len]
    return Entry(module, lambda x: module(x, x, x, lengths))


def batch_first(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """Batch first, returning the weights of each head."""
    module, mask = convert.to(ours, "batch_first"), sdpa_mask(setting)
    return Entry(
        module,
        lambda x: module(x, x, x, mask),
        weights=lambda result: result[1].mean(dim=1).permute(1, 2, 0),
    )


def sdpa_mask(setting: Setting) -> Tensor | None:
    """The mask as `scaled_dot_product_attention` reads it."""
    keep = setting.keep()
    return None if keep is None else masks.to_sdpa(keep)


class Bare(nn.Module):
    r"""One projection before, one behind, and a kernel in between.

    >>> setting = Setting(2, 5, d_model=77, heads=7)
    >>> def first(query, key, value, dropout):
    ...     return value[:, :, :1].expand_as(value)
    >>> bare = Bare(setting.core(), first)
    >>> bare(torch.randn(2, 5, 77)).shape
    torch.Size([2, 5, 77])
    """

    def __init__(
        self,
        ours: mha.MultiHeadAttention,
        kernel: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    ) -> None:
        super().__init__()
        # All queries, then all keys, then all values: most models multiply once.
        fused: Any = convert.to(ours, "fused", order="3 heads d_k")
        self.heads, self.dropout = ours.heads, ours.dropout.p
        self.qkv, self.output, self.kernel = fused.qkv, fused.output, kernel

    def forward(
        self,
        x: Tensor,  # [batch_size, seq_len, d_model]
    ) -> Tensor:
        qkv = self.qkv(x)  # [batch_size, seq_len, 3 * d_model]
        qkv = qkv.unflatten(-1, (3, self.heads, -1))  # [batch_size, seq_len, 3, ...]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [batch_size, heads, ...]
        dropout = self.dropout if self.training else 0.0
        context = self.kernel(query, key, value, dropout)  # [batch_size, heads, ...]
        context = context.transpose(1, 2).flatten(2)  # [batch_size, seq_len, d_model]
        output: Tensor = self.output(context)  # [batch_size, seq_len, d_model]
        return output


def sdpa(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """The function that others are built on, with nothing around it."""
    how: dict[str, Any] = {"is_causal": setting.mask == "causal"}
    if setting.mask == "padding":
        how = {"attn_mask": sdpa_mask(setting)}
    attend = F.scaled_dot_product_attention
    module = Bare(ours, lambda q, k, v, p: attend(q, k, v, dropout_p=p, **how))
    return Entry(module, module)


def flex(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
    """A kernel that is compiled for the mask; it does not run without a compiler."""
    from torch.nn.attention.flex_attention import flex_attention

    keep = setting.keep()
    block_mask = None if keep is None else masks.to_block_mask(keep)
    attend = torch.compile(flex_attention, dynamic=False)
    module = Bare(ours, lambda q, k, v, p: attend(q, k, v, block_mask=block_mask))
    return Entry(module, module)


def compiled(build: Build) -> Build:
    """The same contestant, its call handed to `torch.compile`."""

    def build_compiled(ours: mha.MultiHeadAttention, setting: Setting) -> Entry:
        entry = build(ours, setting)
        entry.call = torch.compile(entry.call, dynamic=False)
        return entry

    return build_compiled


NONE = {"none": ""}
HOUSE = NONE | {"causal": "a bool mask", "padding": "a bool mask"}
FAST = NONE | {"causal": "`is_causal=True`", "padding": "a bool mask"}
TORCH = NONE | {
    "causal": "`is_causal=True`, with a bool mask",
    "padding": "`key_padding_mask`",
}
LENGTHS = NONE | {
    "causal": "a length for each query",
    "padding": "a length for each sentence",
}
BATCHED = NONE | {
    "causal": "a bool mask `[1, 1, q_len, k_len]`",
    "padding": "a bool mask",
}
BLOCKS = NONE | {"causal": "a `block_mask`", "padding": "a `block_mask`"}

CONTESTANTS = {
    "core": Contestant(core, HOUSE),
    "fast": Contestant(fast, FAST),
    "fast-weights": Contestant(fast_weights, FAST),
    "causal": Contestant(causal, {"causal": "it is always so"}),
    "valid_lens": Contestant(valid_lens, LENGTHS),
    "batch_first": Contestant(batch_first, HOUSE),
    "nn": Contestant(nn_plain, TORCH),
    "nn-weights": Contestant(nn_weights, TORCH),
    "nn-fastpath": Contestant(nn_fastpath, TORCH, training=False),
    "sdpa": Contestant(sdpa, FAST),
    "flex": Contestant(flex, BLOCKS, dropout=False),
}
