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
fewer operations where there are as many queries as keys.

**Reduces to** itself: both forms give the same output, to rounding.

**Laws.** `relative_positions` applies. `key_permutation` and `query_permutation` do
not, as the order of tokens matters; neither does `longer_padding`, which appends keys
behind the last query, which here move the queries along. `formula`, `score_scale` and
`weights_match_output` need the projections of the core. `linear_in_value` applies with
`norm=False` only, as a norm is not linear.

Source: [DeepSeek-V2](https://arxiv.org/abs/2405.04434), DeepSeek-AI 2024, section 2.1
and appendix C; section 3.1.2 for the norms.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from headnotes.checks import check_heads, check_next, check_sizes
from headnotes.mha import (
    PrepareForMultiHeadAttention,
    check_inputs,
    check_mask,
    check_tensor,
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

    def decode(
        self,
        x: Tensor,
        cache: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        r"""Decode the next positions, with absorbed projections; return the new cache.

        `x` is `[seq_len, batch_size, d_model]`.
        `cache` is `[past_len, batch_size, kv_rank + rotary_dim]`, the normalized
        latents and rotated keys of all earlier tokens; None at the beginning. It is not
        modified. Each position attends to itself and to those before it. There is no
        dropout. Raises what `forward` raises, the same for the cache.

        >>> mla = LatentAttention(3, 30, kv_rank=11, rotary_dim=8)
        >>> x = torch.randn(7, 2, 30)
        >>> prompt, cache = mla.decode(x[:5])
        >>> rest, cache = mla.decode(x[5:], cache)
        >>> cache.shape
        torch.Size([7, 2, 19])
        >>> mask = torch.ones(7, 7).bool().tril()
        >>> mask = mask.unsqueeze(-1).expand(-1, -1, 2)
        >>> y = mla.eval()(query=x, key=x, value=x, mask=mask)
        >>> torch.allclose(torch.cat([prompt, rest]), y, atol=1e-6)
        True
        """
        weight = self.latent.weight
        check_next(x, weight, weight.shape[1])
        width = self.kv_rank + self.rotary_dim
        if cache is not None:
            check_cache(cache, x, width)
        past = [] if cache is None else [cache]
        past_len, seq_len = sum(map(len, past)), len(x)
        order = torch.arange(past_len, past_len + seq_len, device=x.device)  # [seq_len]
        positions = order.unsqueeze(1)  # [seq_len, 1]
        content, rotated = self.get_queries(
            x, positions
        )  # [seq_len, batch_size, heads, d_k], [seq_len, batch_size, heads, rotary_dim]
        latent = self.latent_norm(self.latent(x))  # [seq_len, batch_size, kv_rank]
        shared = self.get_rotary_key(x, positions)  # [seq_len, batch_size, rotary_dim]
        new = torch.cat([latent, shared], dim=-1)  # [seq_len, batch_size, width]
        cache = torch.cat([*past, new])  # [past_len + seq_len, batch_size, width]

        # $W^{UK\top}_h q$: the query of each head, as wide as a latent. With the rotary
        # part beside it, one product with the cache gives both parts of the scores.
        up = self.key.linear.weight.view(
            self.heads, self.d_k, self.kv_rank
        )  # [heads, d_k, kv_rank]
        absorbed = torch.einsum(
            "ibhd,hdr->ibhr", content, up
        )  # [seq_len, batch_size, heads, kv_rank]
        query = torch.cat([absorbed, rotated], dim=-1)  # [..., heads, width]
        scores = torch.einsum(
            "ibhr,jbr->ijbh", query, cache
        )  # [seq_len, past_len + seq_len, batch_size, heads]
        keys = torch.arange(past_len + seq_len, device=x.device)  # [past_len + seq_len]
        causal = order[:, None] >= keys  # [seq_len, past_len + seq_len]
        attn = masked_softmax(
            scores, causal[..., None, None]
        )  # [seq_len, past_len + seq_len, batch_size, heads]

        # The mean of the latents, and then one value of it for each head.
        latents = cache[..., : self.kv_rank]  # [past_len + seq_len, ..., kv_rank]
        mean = torch.einsum(
            "ijbh,jbr->ibhr", attn, latents
        )  # [seq_len, batch_size, heads, kv_rank]
        up = self.value.linear.weight.view(
            self.heads, self.value.d_k, self.kv_rank
        )  # [heads, ..., kv_rank]
        context = torch.einsum(
            "ibhr,hdr->ibhd", mean, up
        )  # [seq_len, batch_size, heads, ...]
        output: Tensor = self.output(context.flatten(-2))  # [seq_len, batch_size, ...]
        return output, cache

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


# region Input checks


def check_settings(
    heads: int, d_model: int, dropout_prob: float, kv_rank: int, d_k: int, d_v: int
) -> None:
    """Refuse sizes that no layer can have."""
    check_sizes(heads=heads, d_model=d_model, kv_rank=kv_rank, d_k=d_k, d_v=d_v)
    if type(dropout_prob) not in (int, float) or not 0 <= dropout_prob <= 1:
        raise ValueError(f"`dropout_prob` (={dropout_prob!r}) must lie between 0 and 1")


def check_cache(cache: Tensor, x: Tensor, width: int) -> None:
    """Refuse a cache of another module or batch."""
    check_tensor("cache", cache, x.device, x.dtype)
    if cache.dim() != 3 or tuple(cache.shape[1:]) != (x.shape[1], width):
        raise ValueError(
            f"`cache` has shape {list(cache.shape)}, not [past_len, batch_size "
            f"(={x.shape[1]}), kv_rank + rotary_dim (={width})]; pass the one that "
            "`decode` returned"
        )


# endregion
