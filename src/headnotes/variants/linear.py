r"""# Linear attention and the delta rule

This module is attention without a softmax, whose time grows with the length and not
with its square, and which needs no KV cache in decoding: its state is one matrix per
head. It is for readers who know the [core](../mha.md). The second half of the page, the
gated delta rule, is the layer of current hybrid models, such as Qwen3-Next and Kimi
Linear.

**The change.** The softmax compares a query with a key by $e^{q \cdot k}$. Linear
attention compares them by a product of features, $\phi(q) \cdot \phi(k)$, which can be
rearranged: the keys and values are summed first, for all queries.

$$C_i = \frac{\sum_j \left(\phi(q_i)^\top \phi(k_j)\right) v_j}
             {\sum_j \phi(q_i)^\top \phi(k_j)}
      = \frac{\phi(q_i)^\top \sum_j \phi(k_j)\, v_j^\top}
             {\phi(q_i)^\top \sum_j \phi(k_j)}$$

$$\phi(x) = \operatorname{elu}(x) + 1$$

**Three forms of one function.** In causal attention, the sum of query $i$ ends at $i$.

| form | how | time | for |
|---|---|---|---|
| parallel | all scores, as in the core, and a mask | quadratic | any mask |
| recurrent | $S_i = S_{i-1} + \phi(k_i)\, v_i^\top$ by token | linear | decoding |
| chunked | parallel in a chunk, recurrent from chunk to chunk | linear | training |

The denominator is the same sum for a value of 1. So each value gets one more component,
a 1, and the last component of the result divides the others.

**Left padding.** A mask hides it in `forward`, and in `decode`, where it hides
positions of the new piece: the state stays as it is.

**Reduces to:** the three forms agree. The delta rule reduces to linear attention,
without the denominator, where the gates are 1 and nothing is erased: keys that are
orthogonal find nothing in the state. Each value is then multiplied by its $\beta$.

**Laws.** Linear attention has no softmax, and returns no weights: of the laws that the
core passes, all but `formula`, `weights_axes`, `weights_match_output`,
`score_independence` and `dropout` apply. The delta rule has no denominator either, and
is always causal: of the laws that the core passes, all but `rows_sum_to_one`,
`formula`, `weights_axes`, `weights_match_output`, `score_independence`,
`linear_in_value`, `key_permutation`, `query_permutation`, `incremental_decoding` and
`dropout` apply. `linear_in_value` passes, but the checker takes the division of keys by
their lengths for a norm of the values, and runs it only if you insist
(`only="linear_in_value"`).

Source: [Transformers are RNNs](https://arxiv.org/abs/2006.16236), Katharopoulos et al.
2020, section 3; [Parallelizing Linear Transformers with the Delta
Rule](https://arxiv.org/abs/2406.06484), Yang et al. 2024; [Gated Delta
Networks](https://arxiv.org/abs/2412.06464), Yang et al. 2024, section 3.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headnotes.checks import check_next, check_sizes, check_tensor
from headnotes.mha import (
    PrepareForMultiHeadAttention,
    check_inputs,
    check_mask,
    check_settings,
    check_weight,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def feature_map(x: Tensor) -> Tensor:
    r"""The features of a query or key: $\operatorname{elu}(x) + 1$, all positive.

    Below 0 it is $e^x$, above 0 it is $x + 1$. Source: Katharopoulos et al. 2020,
    section 3.2.1.

    >>> feature_map(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """
    # $\operatorname{elu}(x)$ is $e^x - 1$ below 0: rounded, it would lose small $e^x$.
    return F.relu(x) + x.clamp(max=0).exp()


def parallel_linear_attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_v]
    mask: Tensor | None = None,
) -> Tensor:
    r"""The parallel form: the context `[q_len, batch_size, heads, d_v]`.

    Query and key are features, none of them negative. `mask` is that of the core; the
    context of a fully masked row is zero. Raises `TypeError` for a wrong dtype,
    `ValueError` for a wrong shape or device. Source: Katharopoulos et al. 2020,
    equation 3.

    >>> query, key = torch.rand(3, 2, 5, 7), torch.rand(11, 2, 5, 7)
    >>> mask = torch.ones(1, 11, 2).bool()
    >>> ones = torch.ones(11, 2, 5, 13)
    >>> context = parallel_linear_attention(query, key, ones, mask)
    >>> context.allclose(torch.ones(3, 2, 5, 13))
    True
    """
    check_heads_first("parallel_linear_attention", query, key, value)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    weights = torch.einsum("ibhd,jbhd->ijbh", q, k)  # [q_len, k_len, ..., heads]
    if mask is not None:
        check_tensor("mask", mask, query.device)
        check_mask(mask, query.shape, key.shape)
        hidden = ~mask.bool().unsqueeze(-1)  # [..., 1]
        weights = weights.masked_fill(hidden, 0)  # [q_len, k_len, ..., heads]
    context = torch.einsum(
        "ijbh,jbhd->ibhd", weights, with_one(v)
    )  # [q_len, batch_size, heads, d_v + 1]
    return divide_by_last(context).to(query.dtype)  # [q_len, batch_size, heads, d_v]


def recurrent_linear_attention(
    query: Tensor,  # [seq_len, batch_size, heads, d_k]
    key: Tensor,  # [seq_len, batch_size, heads, d_k]
    value: Tensor,  # [seq_len, batch_size, heads, d_v]
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The recurrent form, causal: the context, and the state after the last token.

    Query and key are features. The state is `[batch_size, heads, d_k, d_v + 1]`, in
    float32 or better, and not modified. Raises what the parallel form raises.
    Source: Katharopoulos et al. 2020, equations 16 to 20.

    A sequence may be processed in pieces:

    >>> q, k = torch.rand(11, 2, 5, 7), torch.rand(11, 2, 5, 7)
    >>> v = torch.randn(11, 2, 5, 3)
    >>> at_once, state = recurrent_linear_attention(q, k, v)
    >>> first, state = recurrent_linear_attention(q[:4], k[:4], v[:4])
    >>> second, state = recurrent_linear_attention(q[4:], k[4:], v[4:], state)
    >>> torch.cat([first, second]).allclose(at_once, atol=1e-5)
    True
    """
    check_heads_first("recurrent_linear_attention", query, key, value)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (
        query.to(wide),
        key.to(wide),
        with_one(value.to(wide)),
    )  # [seq_len, ..., d_k], [seq_len, ..., d_k], [seq_len, ..., d_v + 1]
    state = initial_state(k, v, state)  # [batch_size, heads, d_k, d_v + 1]
    contexts = [v[:0]]
    for i in range(len(query)):
        # $S_i = S_{i-1} + \phi(k_i)\, v_i^\top$, then $C_i = \phi(q_i)^\top S_i$.
        state = state + torch.einsum("bhd,bhe->bhde", k[i], v[i])
        contexts.append(torch.einsum("bhd,bhde->bhe", q[i], state)[None])
    context = divide_by_last(torch.cat(contexts))  # [seq_len, batch_size, heads, d_v]
    return context.to(query.dtype), state


def chunked_linear_attention(
    query: Tensor,  # [seq_len, batch_size, heads, d_k]
    key: Tensor,  # [seq_len, batch_size, heads, d_k]
    value: Tensor,  # [seq_len, batch_size, heads, d_v]
    state: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    r"""The chunked form, causal: the same context and state as the recurrent form.

    Within a chunk, all tokens are computed at once by matrix products, and only the
    state passes from one to the next. Raises what the parallel form raises, and
    `ValueError` for a `chunk_size` below 1. Source: Yang et al. 2024, section 2.1.

    >>> q, k = torch.rand(11, 2, 5, 7), torch.rand(11, 2, 5, 7)
    >>> v = torch.randn(11, 2, 5, 3)
    >>> context, state = chunked_linear_attention(q, k, v, chunk_size=4)
    >>> same, same_state = recurrent_linear_attention(q, k, v)
    >>> context.allclose(same, atol=1e-5), state.allclose(same_state, atol=1e-5)
    (True, True)
    """
    check_heads_first("chunked_linear_attention", query, key, value)
    check_sizes(chunk_size=chunk_size)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (
        query.to(wide),
        key.to(wide),
        with_one(value.to(wide)),
    )  # [seq_len, ..., d_k], [seq_len, ..., d_k], [seq_len, ..., d_v + 1]
    state = initial_state(k, v, state)  # [batch_size, heads, d_k, d_v + 1]
    # The last two axes are multiplied, so positions stand beside components.
    q, k, v = (
        x.permute(1, 2, 0, 3) for x in (q, k, v)
    )  # [batch_size, heads, seq_len, ...]
    contexts = []
    for start in range(0, max(1, len(query)), chunk_size):
        chunk = slice(start, start + chunk_size)
        q_c, k_c, v_c = (
            q[:, :, chunk],
            k[:, :, chunk],
            v[:, :, chunk],
        )  # [batch_size, heads, ...]
        # Earlier chunks through the state, this one through a triangle of weights.
        within = (q_c @ k_c.mT).tril() @ v_c
        contexts.append(q_c @ state + within)
        state = state + k_c.mT @ v_c
    context = torch.cat(contexts, dim=2).permute(
        2, 0, 1, 3
    )  # [seq_len, batch_size, heads, d_v + 1]
    context = divide_by_last(context)  # [seq_len, batch_size, heads, d_v]
    return context.to(query.dtype), state


class LinearAttention(nn.Module):
    r"""Multi-head linear attention over `[seq_len, batch_size, d_model]`.

    The parameters are those of the core, so its checkpoints load. There is no dropout,
    because there are no weights to which it could be applied. `chunk_size` changes the
    speed of causal attention, and no output. `torch.export` unrolls the loop over the
    chunks, so a causal program has a fixed length.

    Raises `ValueError` where `heads` does not divide `d_model`, or a size is below 1.
    Source: Katharopoulos et al. 2020, section 3.

    >>> attention = LinearAttention(heads=7, d_model=77, chunk_size=4)
    >>> x = torch.randn(13, 2, 77)
    >>> y = attention(query=x, key=x, value=x, is_causal=True)
    >>> y.shape
    torch.Size([13, 2, 77])

    In decoding, a state takes the place of the KV cache. It does not grow:

    >>> prompt, state = attention.decode(x[:6])
    >>> rest, state = attention.decode(x[6:], state)
    >>> torch.cat([prompt, rest]).allclose(y, atol=1e-6)
    True
    >>> state.shape
    torch.Size([2, 7, 11, 12])
    """

    def __init__(
        self, heads: int, d_model: int, bias: bool = True, *, chunk_size: int = 64
    ) -> None:
        super().__init__()
        check_settings(heads, d_model, 0.0)
        check_sizes(chunk_size=chunk_size)
        self.heads = heads
        self.d_k = d_model // heads
        self.chunk_size = chunk_size
        self.query = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.key = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.value = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=True)
        self.output = nn.Linear(d_model, d_model)

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        r"""Attend from `query` to `key`, and return the mean of `value`, projected.

        Shapes, `mask` and errors are those of the core. With `is_causal`, the last
        query is aligned with the last key. A mask `[1, k_len, batch_size or 1]` keeps
        the time linear; one with a row for each query needs a sum for each query, and
        so the parallel form.

        >>> attention = LinearAttention(heads=7, d_model=77)
        >>> x, y = torch.randn(3, 2, 77), torch.randn(13, 2, 77)
        >>> mask = torch.ones(3, 13, 2).bool()
        >>> parallel = attention(query=x, key=y, value=y, mask=mask)
        >>> linear = attention(query=x, key=y, value=y, mask=mask[:1])
        >>> parallel.allclose(linear, atol=1e-6)
        True
        """
        check_weight(self, "output")
        weight = self.output.weight
        check_inputs(weight, query, key, value)
        key, value, mask = clear_hidden(weight, query, key, value, mask)
        q = feature_map(self.query(query))  # [q_len, batch_size, heads, d_k]
        k = feature_map(self.key(key))  # [k_len, batch_size, heads, d_k]
        v = self.value(value)  # [k_len, batch_size, heads, d_k]

        if mask is not None and len(mask) != 1:
            if is_causal:
                offset = len(key) - len(query)
                mask = mask.permute(2, 0, 1).tril(offset).permute(1, 2, 0)
            context = parallel_linear_attention(q, k, v, mask)
            return self.project(context)  # [q_len, batch_size, d_model]

        # A hidden key has no features. (A feature of the number 0 would be 1.)
        if mask is not None:
            k = k.masked_fill(~mask[0, ..., None, None], 0)
        if is_causal:
            q, k, v = align_ends(q, k, v)
            context, _ = chunked_linear_attention(q, k, v, chunk_size=self.chunk_size)
            context = context[len(context) - len(query) :]
        else:
            context = sum_then_multiply(q, k, v)  # [q_len, batch_size, heads, d_k]
        return self.project(context)  # [q_len, batch_size, d_model]

    def project(
        self,
        context: Tensor,  # [seq_len, batch_size, heads, d_k]
    ) -> Tensor:
        """Concatenate the heads and mix them, as the core does."""
        output: Tensor = self.output(
            context.flatten(-2)
        )  # [seq_len, batch_size, heads * d_k]
        return output

    @torch.no_grad()
    def decode(
        self,
        x: Tensor,  # [seq_len, batch_size, d_model]
        state: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        r"""Decode the next positions, `x`: `[seq_len, batch_size, d_model]`.

        However a sequence is split into pieces, the outputs are those of one causal
        call. Without a `state` the sequence begins. `mask`, `[1, seq_len, batch_size or
        1]`, is False for padding in `x`, which may hold anything and leaves the state
        as it is. Raises what `forward` raises, and `ValueError` for a state of another
        shape, or a mask of several rows.

        A prompt with four positions of padding on the left, and one without:

        >>> attention = LinearAttention(heads=7, d_model=77)
        >>> x = torch.randn(13, 2, 77)
        >>> x[:4, 1] = torch.nan
        >>> mask = torch.ones(1, 11, 2).bool()
        >>> mask[:, :4, 1] = False
        >>> prompt, state = attention.decode(x[:11], mask=mask)
        >>> rest, state = attention.decode(x[11:], state)
        >>> same, _ = attention.decode(x[4:, 1:])
        >>> torch.allclose(rest[:, 1:], same[7:], atol=1e-6)
        True
        """
        check_weight(self, "output")
        x, mask = prepare_next(self.output.weight, x, mask)
        q, k = (
            feature_map(self.query(x)),
            feature_map(self.key(x)),
        )  # [seq_len, ..., heads, d_k]
        if mask is not None:
            k = k.masked_fill(~mask[0, ..., None, None], 0)
        context, state = chunked_linear_attention(
            q, k, self.value(x), state, chunk_size=self.chunk_size
        )  # [seq_len, ..., heads, d_k], [batch_size, heads, d_k, d_k + 1]
        return self.project(
            context
        ), state  # [seq_len, batch_size, d_model], [batch_size, ...]


def sum_then_multiply(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, heads, d_k]
    value: Tensor,  # [k_len, batch_size, heads, d_v]
) -> Tensor:
    r"""Attention to all keys: one state for all queries.

    >>> query, key = torch.rand(3, 2, 5, 7), torch.rand(11, 2, 5, 7)
    >>> sum_then_multiply(query, key, torch.ones(11, 2, 5, 13)).shape
    torch.Size([3, 2, 5, 13])
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    k, v = (
        key.to(wide),
        with_one(value.to(wide)),
    )  # [k_len, ..., d_k], [k_len, ..., d_v + 1]
    state = torch.einsum("jbhd,jbhe->bhde", k, v)  # [batch_size, heads, d_k, d_v + 1]
    context = torch.einsum(
        "ibhd,bhde->ibhe", query.to(wide), state
    )  # [q_len, ..., heads, d_v + 1]
    return divide_by_last(context).to(query.dtype)  # [q_len, batch_size, heads, d_v]


def with_one(
    value: Tensor,  # [..., d_v]
) -> Tensor:
    """One more component, which is 1: its weighted sum is the sum of the weights."""
    return F.pad(value, (0, 1), value=1.0)  # [..., d_v + 1]


def divide_by_last(
    context: Tensor,  # [..., d_v + 1]
) -> Tensor:
    """Divide by the sum of the weights; it is 0 where there is no key."""
    total = context[..., -1:]  # [..., 1]
    return context[..., :-1] / total.masked_fill(total == 0, 1)  # [..., d_v]


def recurrent_delta_rule(
    query: Tensor,  # [seq_len, batch_size, heads, d_k]
    key: Tensor,  # [seq_len, batch_size, heads, d_k]
    value: Tensor,  # [seq_len, batch_size, heads, d_v]
    beta: Tensor,  # [seq_len, batch_size, heads]
    log_gate: Tensor,  # [seq_len, batch_size, heads]
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The gated delta rule, token by token: the context, and the last state.

    Linear attention only adds to its state, so old values never leave it. The delta
    rule *replaces*: it looks up what the state holds for the key, and moves it towards
    the new value by the fraction $\beta$. Before that, a gate $\alpha$ lets the whole
    state decay:

    $$u_i = \beta_i \left(v_i - (\alpha_i S_{i-1})^\top k_i\right)$$

    $$S_i = \alpha_i S_{i-1} + k_i\, u_i^\top \qquad C_i = S_i^\top q_i$$

    `log_gate` is $\log \alpha \le 0$; minus infinity empties the state, for instance
    between documents. Keys should have length 1. The state is `[batch_size, heads, d_k,
    d_v]`, in float32 or better, and not modified. Raises `TypeError` for a wrong dtype,
    `ValueError` for a wrong shape or device. Source: Yang et al. 2024, *Gated Delta
    Networks*, equation 10.

    With $\beta = 1$, the second value of a key replaces the first:

    >>> key = torch.tensor([1.0, 0.0]).expand(2, 1, 1, 2)
    >>> value = torch.tensor([3.0, 5.0]).view(2, 1, 1, 1)
    >>> one, zero = torch.ones(2, 1, 1), torch.zeros(2, 1, 1)
    >>> context, state = recurrent_delta_rule(key, key, value, one, zero)
    >>> context.flatten()
    tensor([3., 5.])
    """
    per_token = {"beta": beta, "log_gate": log_gate}
    check_heads_first("recurrent_delta_rule", query, key, value, **per_token)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    gate = log_gate.to(wide).exp()[..., None, None]  # [seq_len, ..., heads, 1, 1]
    beta = beta.to(wide).unsqueeze(-1)  # [seq_len, batch_size, heads, 1]
    state = initial_state(k, v, state)  # [batch_size, heads, d_k, d_v]
    contexts = [v[:0]]
    for i in range(len(query)):
        state = gate[i] * state  # [batch_size, heads, d_k, d_v]
        stored = torch.einsum("bhd,bhde->bhe", k[i], state)  # [batch_size, heads, d_v]
        update = beta[i] * (v[i] - stored)
        state = state + torch.einsum("bhd,bhe->bhde", k[i], update)
        contexts.append(torch.einsum("bhd,bhde->bhe", q[i], state)[None])
    context = torch.cat(contexts)  # [seq_len, batch_size, heads, d_v]
    return context.to(query.dtype), state


def chunked_delta_rule(
    query: Tensor,  # [seq_len, batch_size, heads, d_k]
    key: Tensor,  # [seq_len, batch_size, heads, d_k]
    value: Tensor,  # [seq_len, batch_size, heads, d_v]
    beta: Tensor,  # [seq_len, batch_size, heads]
    log_gate: Tensor,  # [seq_len, batch_size, heads]
    state: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    r"""The gated delta rule, chunk by chunk: the same results as token by token.

    The updates $u_i$ of a chunk depend on one another, but linearly. With $\gamma_i$
    the product of the gates of the chunk up to $i$, and $S$ the state before it,

    $$u_i + \beta_i \sum_{j \lt i} \frac{\gamma_i}{\gamma_j}\, (k_i \cdot k_j)\, u_j
      = \beta_i \left(v_i - \gamma_i\, S^\top k_i\right)$$

    is a triangular system, solved for all tokens of the chunk at once. The rest is
    linear attention with $u$ instead of $v$. Raises what `recurrent_delta_rule` raises,
    and `ValueError` for a `chunk_size` below 1. Source: Yang et al. 2024,
    *Parallelizing*, section 3; *Gated Delta Networks*, section 3.3.

    >>> q, v = torch.randn(11, 2, 5, 7), torch.randn(11, 2, 5, 3)
    >>> k = unit_length(torch.randn(11, 2, 5, 7))
    >>> beta, log_gate = torch.rand(11, 2, 5), -torch.rand(11, 2, 5)
    >>> context, state = chunked_delta_rule(q, k, v, beta, log_gate, chunk_size=4)
    >>> same, same_state = recurrent_delta_rule(q, k, v, beta, log_gate)
    >>> context.allclose(same, atol=1e-5), state.allclose(same_state, atol=1e-5)
    (True, True)
    """
    per_token = {"beta": beta, "log_gate": log_gate}
    check_heads_first("chunked_delta_rule", query, key, value, **per_token)
    check_sizes(chunk_size=chunk_size)
    wide = torch.promote_types(query.dtype, torch.float32)
    parts = query, key, value, beta.unsqueeze(-1), log_gate.unsqueeze(-1)
    whole = [x.to(wide).permute(1, 2, 0, 3) for x in parts]
    state = initial_state(key.to(wide), value.to(wide), state)  # [..., d_k, d_v]
    contexts = [whole[2][:, :, :0]]
    for start in range(0, len(query), chunk_size):
        chunk = slice(start, start + chunk_size)
        q, k, v, b, log_gates = (
            x[:, :, chunk] for x in whole
        )  # [batch_size, heads, ...]
        # Products of gates are sums of logarithms. For a ratio, those after $j$ up to
        # $i$ are summed: in a difference of two sums from the start of the chunk, weak
        # gates would be lost beside a strong one that empties the state.
        gamma = log_gates.cumsum(dim=2).exp()  # [batch_size, heads, ..., 1]
        n = q.shape[2]
        after = log_gates.expand(-1, -1, -1, n).tril(-1)  # [batch_size, heads, n, n]
        ratio = after.cumsum(dim=2).exp().tril()  # [batch_size, heads, n, n]
        # The system is unit triangular: its diagonal and what is above are not read.
        system = b * (k @ k.mT) * ratio
        right = b * (v - gamma * (k @ state))
        u = torch.linalg.solve_triangular(
            system, right, upper=False, unitriangular=True
        )
        contexts.append(gamma * (q @ state) + (q @ k.mT * ratio) @ u)
        # What is left at the end of the chunk, of the old state and of each update.
        state = gamma[:, :, -1:] * state + (ratio[:, :, -1:].mT * k).mT @ u
    context = torch.cat(contexts, dim=2).permute(
        2, 0, 1, 3
    )  # [seq_len, batch_size, heads, d_v]
    return context.to(query.dtype), state


class DeltaNetAttention(nn.Module):
    r"""Causal multi-head attention by the gated delta rule, `[…, batch_size, d_model]`.

    Beside the parameters of the core it has `beta` and `gate`, linear maps from a token
    to a number for each head, and `A_log` and `dt_bias`, `[heads]`:

    $$\beta = \sigma(W_\beta\, x)$$

    $$\log \alpha = -e^{A}\, \operatorname{softplus}(W_\alpha\, x + \text{dt})$$

    Queries and keys are divided by their lengths, and queries by $\sqrt{d_k}$, as in
    Qwen3-Next. The layers around it in the models, a short convolution before and a
    gated norm after it, are not part of the rule, and left out. `torch.export` unrolls
    the loop over the chunks, so a program has a fixed length.

    Raises `ValueError` where `heads` does not divide `d_model`, or a size is below 1.
    Source: Yang et al. 2024, *Gated Delta Networks*, section 3.

    >>> attention = DeltaNetAttention(heads=7, d_model=77, chunk_size=4)
    >>> x = torch.randn(13, 2, 77)
    >>> y = attention(query=x, key=x, value=x)
    >>> prompt, state = attention.decode(x[:6])
    >>> rest, state = attention.decode(x[6:], state)
    >>> torch.cat([prompt, rest]).allclose(y, atol=1e-6)
    True
    >>> state.shape
    torch.Size([2, 7, 11, 11])
    """

    def __init__(
        self, heads: int, d_model: int, bias: bool = True, *, chunk_size: int = 64
    ) -> None:
        super().__init__()
        check_settings(heads, d_model, 0.0)
        check_sizes(chunk_size=chunk_size)
        self.heads = heads
        self.d_k = d_model // heads
        self.chunk_size = chunk_size
        self.query = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.key = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=bias)
        self.value = PrepareForMultiHeadAttention(d_model, heads, self.d_k, bias=True)
        self.output = nn.Linear(d_model, d_model)
        self.beta = nn.Linear(d_model, heads, bias=False)
        self.gate = nn.Linear(d_model, heads, bias=False)

        # As in Mamba 2: heads begin with memories of different length. `dt_bias` is the
        # inverse of softplus at steps from 0.001 to 0.1.
        self.A_log = nn.Parameter(
            torch.empty(heads).uniform_(0.01, 16).log()
        )  # [heads]
        step = torch.empty(heads).uniform_(-6.9, -2.3).exp()  # [heads]
        self.dt_bias = nn.Parameter(step + (-torch.expm1(-step)).log())

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,
    ) -> Tensor:
        r"""Apply the rule to keys and values, and look up the queries; causal.

        Shapes are those of the core; the last query is aligned with the last key.
        `mask` is `[1, k_len, batch_size or 1]`: a hidden key leaves the state as it is.
        One with a row for each query raises `ValueError`, because a state cannot differ
        from query to query.

        >>> attention = DeltaNetAttention(heads=7, d_model=77)
        >>> x, y = torch.randn(3, 2, 77), torch.randn(13, 2, 77)
        >>> mask = torch.ones(1, 13, 2).bool()
        >>> attention(query=x, key=y, value=y, mask=mask).shape
        torch.Size([3, 2, 77])
        """
        check_weight(self, "output")
        weight = self.output.weight
        check_inputs(weight, query, key, value)
        key, value, mask = clear_hidden(weight, query, key, value, mask)
        check_one_row(mask)
        q, k, v, beta, log_gate = self.prepare(
            query, key, value, mask
        )  # [q_len, ...], [k_len, ...], [k_len, ...], [k_len, ...], [k_len, ...]
        q, k, v, beta, log_gate = align_ends(q, k, v, beta, log_gate)
        context, _ = chunked_delta_rule(
            q, k, v, beta, log_gate, chunk_size=self.chunk_size
        )
        context = context[len(context) - len(query) :].flatten(-2)
        output: Tensor = self.output(context)  # [q_len, batch_size, d_model]
        return output

    def prepare(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Queries, keys, values, and for each key its beta and the log of its gate.

        Where a key is hidden, both are 0: nothing is added, and nothing decays.
        """
        q = unit_length(self.query(query)) / self.d_k**0.5  # [..., heads, d_k]
        k, v = unit_length(self.key(key)), self.value(value)  # [..., heads, d_k]
        beta = self.beta(key).sigmoid()  # [..., heads]
        # In float16, the exponential of a large logarithm would be infinite.
        wide = torch.promote_types(key.dtype, torch.float32)
        step = F.softplus(
            self.gate(key).to(wide) + self.dt_bias.to(wide)
        )  # [..., heads]
        log_gate = -self.A_log.to(wide).exp() * step  # [..., heads]
        if mask is not None:
            hidden = ~mask[0].unsqueeze(-1)  # [..., 1]
            beta = beta.masked_fill(hidden, 0)  # [..., heads]
            log_gate = log_gate.masked_fill(hidden, 0)  # [..., heads]
        return q, k, v, beta, log_gate

    @torch.no_grad()
    def decode(
        self,
        x: Tensor,  # [seq_len, batch_size, d_model]
        state: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        r"""Decode the next positions, `x`: `[seq_len, batch_size, d_model]`.

        However a sequence is split into pieces, the outputs are those of one call of
        `forward`. Without a `state` the sequence begins. `mask`, `[1, seq_len,
        batch_size or 1]`, is False for padding in `x`, which may hold anything and
        leaves the state as it is. Raises what `forward` raises, and `ValueError` for a
        state of another shape.

        >>> attention = DeltaNetAttention(heads=7, d_model=77)
        >>> x = torch.randn(13, 2, 77)
        >>> x[:4, 1] = torch.nan
        >>> mask = torch.ones(1, 11, 2).bool()
        >>> mask[:, :4, 1] = False
        >>> prompt, state = attention.decode(x[:11], mask=mask)
        >>> rest, state = attention.decode(x[11:], state)
        >>> same, _ = attention.decode(x[4:, 1:])
        >>> torch.allclose(rest[:, 1:], same[7:], atol=1e-6)
        True
        """
        check_weight(self, "output")
        x, mask = prepare_next(self.output.weight, x, mask)
        q, k, v, beta, log_gate = self.prepare(
            x, x, x, mask
        )  # [seq_len, batch_size, ...]
        context, state = chunked_delta_rule(
            q, k, v, beta, log_gate, state, chunk_size=self.chunk_size
        )  # [seq_len, ..., heads, d_k], [batch_size, heads, d_k, d_k]
        output: Tensor = self.output(
            context.flatten(-2)
        )  # [seq_len, batch_size, d_model]
        return output, state


def unit_length(x: Tensor) -> Tensor:
    r"""Divide a vector by its length, in float32 or better.

    >>> unit_length(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * (y.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()
    return y.to(x.dtype)


def align_ends(query: Tensor, *others: Tensor) -> list[Tensor]:
    r"""Pad queries or keys with zeros at the front, so that both end together.

    A key of zero adds nothing to a state, and the context of a query of zero is not
    used.

    >>> q, k = align_ends(torch.ones(2, 1), torch.ones(3, 1))
    >>> q.flatten(), k.flatten()
    (tensor([0., 1., 1.]), tensor([1., 1., 1.]))
    """
    length = max(len(query), len(others[0]))
    return [
        F.pad(x, [0, 0] * (x.dim() - 1) + [length - len(x), 0])
        for x in (query, *others)
    ]


def initial_state(
    key: Tensor,  # [..., batch_size, heads, d_k]
    value: Tensor,  # [..., batch_size, heads, d_v]
    state: Tensor | None,
) -> Tensor:
    """The state before the first token, `[batch_size, heads, d_k, d_v]`: zeros."""
    shape = *key.shape[1:], value.shape[-1]
    if state is None:
        return value.new_zeros(shape)  # [batch_size, heads, d_k, d_v]
    check_tensor("state", state, value.device, owner="`value`")
    if state.dtype != value.dtype:
        raise TypeError(
            f"`state` is {state.dtype}, but sums are in {value.dtype}; use "
            f"`state.to({value.dtype})`"
        )
    if state.shape != shape:
        raise ValueError(
            f"`state` has shape {list(state.shape)}, not {list(shape)}; pass the "
            f"second result of the previous call"
        )
    return state


def clear_hidden(
    weight: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As in the core: hidden keys and values are zero, since zero times NaN is NaN."""
    if mask is None:
        return key, value, None
    check_tensor("mask", mask, weight.device)
    check_mask(mask, query.shape, key.shape)
    mask = mask.bool()
    hidden = ~mask.any(dim=0).unsqueeze(-1)  # [..., 1]
    return key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), mask


def prepare_next(
    weight: Tensor, x: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The next positions to decode, of which padding is zero, and their mask."""
    check_next(x, weight, weight.shape[1])
    x, _, mask = clear_hidden(weight, x, x, x, mask)
    check_one_row(mask)
    return x, mask


# region Input checks


def check_one_row(mask: Tensor | None) -> None:
    """Refuse a mask with a row for each query, where all share one state."""
    if mask is not None and len(mask) != 1:
        raise ValueError(
            f"`mask` has {len(mask)} rows, one for each query, but all share one "
            f"state; pass a mask of the keys, [1, k_len, batch_size or 1]"
        )


def check_heads_first(
    name: str, query: Tensor, key: Tensor, value: Tensor, **per_token: Tensor
) -> None:
    """Refuse tensors that do not fit one another; causal forms have one length."""
    tensors: dict[str, Any] = {"query": query, "key": key, "value": value}
    check_tensor("query", query)
    for each, x in (tensors | per_token).items():
        check_tensor(each, x, query.device, owner="`query`")
        dtype = query.dtype if query.dtype in FLOATS else torch.float32
        # A gate may be more precise than what it is applied to.
        if x.dtype not in FLOATS or (each in tensors and x.dtype != dtype):
            raise TypeError(f"`{each}` is {x.dtype}; use `{each}.to({dtype})`")
    q, k, v = (list(x.shape) for x in tensors.values())
    fit = len(q) == len(k) == len(v) == 4 and q[1:] == k[1:] and k[:3] == v[:3]
    if not fit or (q[0] != k[0] and not name.startswith("parallel")):
        raise ValueError(
            f"`query`, `key`, `value` have shapes {q}, {k}, {v}, not [seq_len, "
            f"batch_size, heads, d_k] twice and [seq_len, batch_size, heads, d_v]"
        )
    for each, x in per_token.items():
        if list(x.shape) != k[:3]:
            raise ValueError(
                f"`{each}` has shape {list(x.shape)}, not [seq_len, batch_size, heads] "
                f"= {k[:3]}"
            )


# endregion
