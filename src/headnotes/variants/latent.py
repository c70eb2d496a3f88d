r"""# Multi-head latent attention (MLA)

Latent attention stores one short vector for each token, the *latent*, in place of the
keys and values of all heads. It is projected up to keys and values where they are
needed. DeepSeek-V2, DeepSeek-V3 and Kimi K2 use it.

The keys and values of all heads are computed from the latent $c$ of their token, which
is computed from the input $x$:

$$c_j = W^{DKV} x_j \qquad K_{jh} = W^{UK}_h c_j \qquad V_{jh} = W^{UV}_h c_j$$

[Rotary positions](rotary.md) do not fit in between: a rotation of $K_{jh}$ depends on
the position, so it could not be moved to the query below. So a second, short key
$k^R_j = \operatorname{rotate}(W^{KR} x_j, j)$ carries the position. All heads share it,
and each query has a second part $q^R$ for it:

$$S_{ijh} = \frac{q_{ih} \cdot K_{jh} + q^R_{ih} \cdot k^R_j}{\sqrt{d_k + d_r}}$$

A cache then holds `kv_rank + rotary_dim` numbers for each token and layer. In
DeepSeek-V2 they are 512 + 64, where multi-head attention of 128 heads with keys and
values of width 128 would have 32,768.

**Absorption.** Decoding never computes the keys and values. A product can be regrouped,

$$q_{ih} \cdot (W^{UK}_h c_j) = (W^{UK\top}_h q_{ih}) \cdot c_j$$

so the up-projection is applied to the one new query and not to all stored latents; and
the weighted mean of the latents is projected up, not each of them. It is multi-query
attention over the latents. That is `decode`; `forward` is the plain form, which needs
fewer operations where there are as many queries as keys. `LatentCache` has room for
further positions, so that a step copies none of the earlier ones.

**Reduces to** itself: both forms give the same output, to rounding.

**Laws.** `relative_positions` applies. Of the laws that the core passes, all but
`key_permutation`, `query_permutation`, `longer_padding`, `formula`,
`weights_match_output` and `linear_in_value` apply: the order of tokens matters, keys
that are appended behind the last query here move the queries along, and the next two
laws need the projections of the core. A norm is not linear; with `norm=False` the last
law passes, but the checker runs it only if you insist (`only="linear_in_value"`).

Source: [DeepSeek-V2](https://arxiv.org/abs/2405.04434), DeepSeek-AI 2024, section 2.1
and appendix C; section 3.1.2 for the norms.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headnotes.checks import (
    check_heads,
    check_items,
    check_next,
    check_padding,
    check_sizes,
    zero_padding,
)
from headnotes.mha import (
    PrepareForMultiHeadAttention,
    check_inputs,
    check_mask,
    check_tensor,
    check_weight,
    masked_softmax,
)
from headnotes.variants.rotary import (
    FLOAT64,
    check_width,
    prepare_positions,
    rotary_angles,
    rotary_frequencies,
    rotate,
)


class LatentAttention(nn.Module):
    r"""Multi-head latent attention over `[seq_len, batch_size, d_model]`.

    `kv_rank` is the width of the latent, `rotary_dim` that of the rotated parts. `d_k`
    is the width of the other part of queries and keys, `d_v` that of the values; both
    are `d_model / heads` by default. With a `query_rank` the queries are computed from
    a latent of their own, which saves memory in training only. `norm` is the RMS norm
    of both latents: the models have it, the equations of section 2.1 do not. `bias` is
    that of the projections to the latents, to the rotary key, and to the output.

    `frequencies` are those of `rotary_frequencies`, and neighboring components form a
    pair, as in the code of the models. For YaRN multiply the attribute `scale`.

    Raises `ValueError` for settings out of range.
    Source: DeepSeek-AI 2024, section 2.1.

    >>> own = {"query_rank": 13, "d_v": 7}
    >>> mla = LatentAttention(3, 30, kv_rank=11, rotary_dim=8, **own)
    >>> x, y = torch.randn(5, 2, 30), torch.randn(17, 2, 30)
    >>> mla(query=x, key=y, value=y).shape
    torch.Size([5, 2, 30])
    """

    attn: Tensor | None

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = False,
        *,
        kv_rank: int,
        rotary_dim: int,
        query_rank: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        norm: bool = True,
        frequencies: Tensor | None = None,
    ) -> None:
        super().__init__()
        if d_k is None or d_v is None:
            check_heads("d_model", d_model, "heads", heads)
            d_k, d_v = d_k or d_model // heads, d_v or d_model // heads
        check_settings(heads, d_model, dropout_prob, kv_rank, d_k, d_v)
        check_sizes(rotary_dim=rotary_dim)
        check_width("`rotary_dim`", rotary_dim)
        if frequencies is None:
            frequencies = rotary_frequencies(rotary_dim)  # [rotary_dim // 2]
        if 2 * len(frequencies) != rotary_dim:
            raise ValueError(
                f"`frequencies` has {len(frequencies)} pairs, but `rotary_dim` is "
                f"{rotary_dim}; `rotary_frequencies({rotary_dim})` would do"
            )
        self.heads, self.d_k = heads, d_k
        self.kv_rank, self.rotary_dim = kv_rank, rotary_dim
        self.frequencies: tuple[float, ...] = tuple(frequencies.tolist())
        self.scale = 1 / math.sqrt(d_k + rotary_dim)

        # Down to the latents. The second one is for the queries, and not stored.
        self.latent = nn.Linear(d_model, kv_rank, bias)
        self.latent_norm = nn.RMSNorm(kv_rank, eps=1e-6) if norm else nn.Identity()
        self.query_latent: nn.Module = nn.Identity()
        if query_rank is not None:
            check_sizes(query_rank=query_rank)
            down = nn.Linear(d_model, query_rank, bias)
            scaled = nn.RMSNorm(query_rank, eps=1e-6) if norm else nn.Identity()
            self.query_latent = nn.Sequential(down, scaled)

        # Up to the heads: both parts of the query, the keys and the values.
        width = query_rank or d_model
        self.query = PrepareForMultiHeadAttention(
            width, heads, d_k + rotary_dim, bias=False
        )
        self.key = PrepareForMultiHeadAttention(kv_rank, heads, d_k, bias=False)
        self.value = PrepareForMultiHeadAttention(kv_rank, heads, d_v, bias=False)
        self.rotary_key = PrepareForMultiHeadAttention(d_model, 1, rotary_dim, bias)
        self.output = nn.Linear(heads * d_v, d_model, bias)
        self.dropout = nn.Dropout(dropout_prob)
        self.attn = None

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        r"""Attend from `query` to `key`, with keys and values expanded for each head.

        Arguments and errors are those of `RotaryAttention.forward`. In a decoder `key`
        and `value` are one tensor, and have one latent.

        >>> mla = LatentAttention(3, 30, kv_rank=11, rotary_dim=8)
        >>> x = torch.randn(7, 2, 30)
        >>> mask = torch.ones(5, 7).bool().tril(2)
        >>> mask = mask.unsqueeze(-1).expand(-1, -1, 2)
        >>> mla(query=x[2:], key=x, value=x, mask=mask).shape
        torch.Size([5, 2, 30])
        """
        check_weight(self, "latent")
        check_inputs(self.latent.weight, query, key, value)
        positions = prepare_positions(
            query, key, query_positions, key_positions
        )  # [q_len, ...], [k_len, ...]
        if mask is not None:
            check_tensor("mask", mask, query.device)
            check_mask(mask, query.shape, key.shape)
            mask = mask.bool().unsqueeze(-1)  # [q_len, k_len, batch_size, 1]
            hidden = ~mask.any(dim=(0, 3)).unsqueeze(-1)  # [k_len, batch_size, 1]
            same = key is value
            key = key.masked_fill(hidden, 0)
            value = key if same else value.masked_fill(hidden, 0)

        content, rotated = self.get_queries(
            query, positions[0]
        )  # [q_len, batch_size, heads, d_k], [q_len, batch_size, heads, rotary_dim]
        latent = self.latent_norm(self.latent(key))  # [k_len, batch_size, kv_rank]
        shared = self.get_rotary_key(
            key, positions[1]
        )  # [k_len, batch_size, rotary_dim]

        # Every token is expanded to a key of each head.
        keys = self.key(latent)  # [k_len, batch_size, heads, d_k]
        scores = torch.einsum(
            "ibhd,jbhd->ijbh", content, keys
        )  # [q_len, k_len, batch_size, heads]
        scores = scores + torch.einsum("ibhd,jbd->ijbh", rotated, shared)
        attn = masked_softmax(scores, mask)  # [q_len, k_len, batch_size, heads]
        if not torch.compiler.is_exporting():
            self.attn = attn.detach()

        # And to a value of each head.
        if value is not key:
            latent = self.latent_norm(self.latent(value))
        values = self.value(latent)  # [k_len, batch_size, heads, ...]
        context = torch.einsum(
            "ijbh,jbhd->ibhd", self.dropout(attn), values
        )  # [q_len, batch_size, heads, ...]
        output: Tensor = self.output(context.flatten(-2))  # [q_len, ..., d_model]
        return output

    def cache(
        self, batch_size: int, capacity: int, *, left_padding: Tensor | None = None
    ) -> "LatentCache":
        r"""An empty cache for `decode`, with the module's sizes, dtype and device.

        `left_padding` counts the padded positions at the start of each sequence. They
        may hold anything. Under autocast, the dtype is that of the projections.

        >>> mla = LatentAttention(3, 30, kv_rank=11, rotary_dim=8)
        >>> x = torch.randn(7, 2, 30)
        >>> x[:4, 1] = torch.nan
        >>> cache = mla.cache(2, 7, left_padding=torch.tensor([0, 4]))
        >>> prompt, cache = mla.decode(x[:5], cache)
        >>> rest, cache = mla.decode(x[5:], cache)
        >>> same, _ = mla.decode(x[4:, 1:], mla.cache(1, 3))
        >>> torch.allclose(rest[:, 1:], same[1:], atol=1e-6)
        True
        """
        check_weight(self, "latent")
        weight = self.latent.weight
        dtype, kind = weight.dtype, weight.device.type
        if not weight.is_meta and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return LatentCache(
            batch_size,
            self.kv_rank + self.rotary_dim,
            capacity,
            left_padding=left_padding,
            dtype=dtype,
            device=weight.device,
        )

    @torch.no_grad()
    def decode(
        self,
        x: Tensor,  # [seq_len, batch_size, d_model]
        cache: "LatentCache",
    ) -> tuple[Tensor, "LatentCache"]:
        r"""Decode the next positions, `x`, with absorbed projections.

        Each position attends to itself, to those before it, and to those in the cache,
        to which it is appended. However a sequence is split into pieces, the outputs
        are those of one call of `forward` with a causal mask, without dropout and
        gradients. Raises `TypeError` for a wrong dtype or cache, `ValueError` for a
        wrong shape or device. After any error, the cache is as it was before.

        >>> mla = LatentAttention(3, 30, kv_rank=11, rotary_dim=8).eval()
        >>> x = torch.randn(7, 2, 30)
        >>> prompt, cache = mla.decode(x[:5], mla.cache(batch_size=2, capacity=7))
        >>> rest, cache = mla.decode(x[5:], cache)
        >>> cache.latents.shape
        torch.Size([7, 2, 19])
        >>> mask = torch.ones(7, 7).bool().tril()
        >>> mask = mask.unsqueeze(-1).expand(-1, -1, 2)
        >>> y = mla(query=x, key=x, value=x, mask=mask)
        >>> torch.allclose(torch.cat([prompt, rest]), y, atol=1e-6)
        True
        """
        check_weight(self, "latent")
        weight = self.latent.weight
        check_cache(cache, self.kv_rank + self.rotary_dim)
        check_next(x, weight, weight.shape[1], cache.buffer.shape[1])
        x = zero_padding(
            x, cache.left_padding, cache.length
        )  # [seq_len, batch_size, d_model]
        order = torch.arange(
            cache.length, cache.length + len(x), device=x.device
        )  # [seq_len]
        positions = order.unsqueeze(1)  # [seq_len, 1]
        content, rotated = self.get_queries(
            x, positions
        )  # [seq_len, batch_size, heads, d_k], [seq_len, batch_size, heads, rotary_dim]
        latent = self.latent_norm(self.latent(x))  # [seq_len, batch_size, kv_rank]
        shared = self.get_rotary_key(x, positions)  # [seq_len, batch_size, rotary_dim]
        cache.append(torch.cat([latent, shared], dim=-1))
        try:
            context = self.attend_to_cache(content, rotated, cache)  # [seq_len, ...]
            output: Tensor = self.output(context)  # [seq_len, batch_size, d_model]
        except BaseException:
            cache.length -= len(x)
            raise
        return output, cache

    def attend_to_cache(
        self,
        content: Tensor,  # [seq_len, batch_size, heads, d_k]
        rotated: Tensor,  # [seq_len, batch_size, heads, rotary_dim]
        cache: "LatentCache",
    ) -> Tensor:
        """The context of the last positions in the cache: `[seq_len, ...]`."""
        seq_len = len(content)
        # $W^{UK\top}_h q$: the query of each head, as wide as a latent. With the rotary
        # part beside it, one product with the cache gives both parts of the scores.
        check_weight(self.key, "linear")
        up = self.key.linear.weight.view(
            self.heads, self.d_k, self.kv_rank
        )  # [heads, d_k, kv_rank]
        absorbed = torch.einsum(
            "ibhd,hdr->bihr", content, up
        )  # [batch_size, seq_len, heads, kv_rank]
        rotated = rotated.transpose(0, 1)  # [batch_size, seq_len, heads, rotary_dim]
        query = torch.cat([absorbed, rotated], dim=-1)  # [..., heads, width]

        # Multi-query attention: all heads share the latents, as keys and as values. To
        # PyTorch's kernel, the heads of a position are queries, and positions are heads
        # with the same keys, an expanded view; nothing is copied. The kernel is fast
        # for values as wide as keys, so it averages the rotary keys, too.
        keys = cache.latents.transpose(0, 1).unsqueeze(1)  # [batch_size, 1, ..., width]
        keys = keys.expand(-1, seq_len, -1, -1)  # [batch_size, seq_len, ..., width]
        # (It divides by the number of heads: with none, PyTorch 2.11 crashes.)
        if seq_len == 0:
            mean = query  # [batch_size, 0, heads, width]
        else:
            mean = F.scaled_dot_product_attention(
                query, keys, keys, cache.mask(seq_len), scale=1.0
            )  # [batch_size, seq_len, heads, width]

        # From the mean of the latents, without that of the rotary keys, a value for
        # each head.
        check_weight(self.value, "linear")
        up = self.value.linear.weight.view(
            self.heads, self.value.d_k, self.kv_rank
        )  # [heads, ..., kv_rank]
        context = torch.einsum(
            "bihr,hdr->ibhd", mean[..., : self.kv_rank], up
        )  # [seq_len, batch_size, heads, ...]
        return context.flatten(-2)  # [seq_len, batch_size, ...]

    def get_queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts of the queries of all heads, scaled; the second is rotated."""
        width = self.d_k + self.rotary_dim
        query = self.query(self.query_latent(x)) * self.scale  # [..., heads, width]
        parts = query.split([self.d_k, width - self.d_k], dim=-1)
        return parts[0], self.rotate(parts[1], positions)

    def get_rotary_key(self, x: Tensor, positions: Tensor) -> Tensor:
        """The rotated key that all heads share: `[seq_len, batch_size, rotary_dim]`."""
        key = self.rotate(self.rotary_key(x), positions)  # [..., 1, rotary_dim]
        return key.squeeze(2)  # [..., rotary_dim]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate all components of `x` to their positions."""
        # In float64, and not rounded with the module.
        return rotate(
            x,
            rotary_angles(positions, torch.tensor(self.frequencies, **FLOAT64)),
            pairing="neighbors",
        )

    def __getstate__(self) -> dict[str, Any]:
        # As in the core, the weights of the last call are not part of a copy.
        return self.__dict__ | {"attn": None}


class LatentCache:
    r"""The KV cache of latent attention: a latent and a rotary key for each position.

    It holds `batch_size * k_len * (kv_rank + rotary_dim)` numbers; the sum is the
    `width`. New positions are written in place. The capacity is doubled when it does
    not suffice. `left_padding`, `[batch_size]`, counts the padded positions at the
    start of each sequence, to which no query attends.

    Raises `ValueError` for sizes below 1, or padding of another shape.
    Source: DeepSeek-AI 2024, section 2.1.2.

    >>> cache = LatentCache(batch_size=2, width=5, capacity=3)
    >>> x = torch.randn(17, 2, 5)
    >>> cache.append(x[:3])
    >>> cache.append(x[3:])
    >>> len(cache), cache.capacity, torch.equal(cache.latents, x)
    (17, 24, True)
    """

    def __init__(
        self,
        batch_size: int,
        width: int,
        capacity: int,
        *,
        left_padding: Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size, width=width, capacity=capacity)
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.buffer = torch.zeros(
                capacity, batch_size, width, dtype=dtype, device=device
            )  # [capacity, batch_size, width]
        self.length = 0
        self.left_padding: Tensor | None = None
        if left_padding is not None:
            padding = check_padding(left_padding, batch_size)  # [batch_size]
            self.left_padding = padding.to(self.buffer.device)  # [batch_size]

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        # `if cache:` tests whether a cache exists; an empty one must be true as well.
        return True

    @property
    def capacity(self) -> int:
        """The number of positions that fit into the buffer."""
        return len(self.buffer)

    @property
    def latents(self) -> Tensor:
        """A view of what is stored, `[stored, batch_size, width]`."""
        return self.buffer[: self.length]  # [..., batch_size, width]

    def mask(self, seq_len: int) -> Tensor | None:
        """Which stored positions the last `seq_len` queries may attend to.

        `[batch_size or 1, seq_len, 1, k_len]`, or None if each may attend to all. Two
        queries of five positions:

        >>> cache = LatentCache(1, 1, 5)
        >>> cache.append(torch.zeros(5, 1, 1))
        >>> cache.mask(2).int().squeeze()
        tensor([[1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1]], dtype=torch.int32)
        """
        if seq_len == 1 and self.left_padding is None:
            return None
        j = torch.arange(self.length, device=self.buffer.device)  # [k_len]
        i = j[self.length - seq_len :]  # [seq_len]
        allowed = (j <= i.unsqueeze(1)).unsqueeze(1)  # [seq_len, 1, k_len]
        if self.left_padding is None:
            return allowed.unsqueeze(0)  # [1, seq_len, 1, k_len]
        present = j >= self.left_padding.unsqueeze(1)  # [batch_size, k_len]
        return allowed & present[:, None, None]  # [batch_size, seq_len, 1, k_len]

    @torch.no_grad()
    def append(
        self,
        x: Tensor,  # [seq_len, batch_size, width]
    ) -> None:
        r"""Store the next positions, without their gradients.

        Raises `TypeError` for another dtype, `ValueError` for a shape or device that
        does not fit; the cache is then as it was before.
        """
        check_stored(x, self.buffer)
        seq_len = len(x)
        end = self.length + seq_len
        if end > self.capacity:
            self.grow_to(end)
        self.buffer[self.length : end] = x
        self.length = end

    def grow_to(self, needed: int) -> None:
        """Double the capacity until it suffices; doubling keeps copies rare."""
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        with torch.inference_mode(False):
            buffer = self.buffer.new_zeros(
                capacity, *self.buffer.shape[1:]
            )  # [capacity, batch_size, width]
            buffer[: self.length] = self.latents
        self.buffer = buffer  # [capacity, batch_size, width]

    def reorder(self, index: Tensor) -> None:
        r"""Replace batch item `i` by the latents of item `index[i]`.

        Beam search needs this. `index` holds integers, `[batch_size]`, one for each new
        batch item. Raises `TypeError` for another dtype, `ValueError` for another
        shape, or an item that does not exist.

        >>> cache = LatentCache(batch_size=3, width=1, capacity=2)
        >>> cache.append(torch.tensor([5.0, 7.0, 11.0]).view(1, 3, 1))
        >>> cache.reorder(torch.tensor([2, 2, 0]))
        >>> cache.latents.flatten()
        tensor([11., 11.,  5.])
        """
        check_items(index, self.buffer.shape[1])
        with torch.inference_mode(False):
            index = index.to(self.buffer.device).clone()  # not an inference tensor
            self.buffer = self.buffer.index_select(1, index)  # [capacity, ...]
            if self.left_padding is not None:
                self.left_padding = self.left_padding[index]


# region Input checks


def check_settings(
    heads: int, d_model: int, dropout_prob: float, kv_rank: int, d_k: int, d_v: int
) -> None:
    """Refuse sizes that no layer can have."""
    check_sizes(heads=heads, d_model=d_model, kv_rank=kv_rank, d_k=d_k, d_v=d_v)
    if type(dropout_prob) not in (int, float) or not 0 <= dropout_prob <= 1:
        raise ValueError(f"`dropout_prob` (={dropout_prob!r}) must lie between 0 and 1")


def check_cache(cache: LatentCache, width: int) -> None:
    """Refuse a cache of another kind, or of another module."""
    if not isinstance(cache, LatentCache):
        raise TypeError(
            f"`cache` is a {type(cache).__name__}, not a LatentCache; make one with "
            f"`cache(batch_size, capacity)`"
        )
    if cache.buffer.shape[2] != width:
        raise ValueError(
            f"`cache` has width {cache.buffer.shape[2]}, the module kv_rank + "
            f"rotary_dim (={width}); make one with `cache(batch_size, capacity)`"
        )


def check_stored(x: Tensor, buffer: Tensor) -> None:
    """Refuse a tensor that does not fit the stored ones."""
    if isinstance(x, Tensor) and x.dtype != buffer.dtype:
        raise TypeError(
            f"`x` is {x.dtype}, the cache {buffer.dtype}; make the cache with the "
            f"`dtype` that it is to hold"
        )
    check_tensor("x", x, buffer.device)
    _, batch_size, width = buffer.shape
    if x.dim() != 3 or x.shape[1:] != (batch_size, width):
        raise ValueError(
            f"`x` has shape {list(x.shape)}, not [seq_len, batch_size "
            f"(={batch_size}), width (={width})]"
        )


# endregion
