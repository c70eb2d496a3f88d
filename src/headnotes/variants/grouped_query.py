r"""# Grouped-query attention (GQA) and multi-query attention (MQA)

Grouped-query attention has fewer heads of keys and values than of queries. Neighboring
heads of queries form a group, and a group shares one head of keys and values. With one
group for all it is multi-query attention.

A decoder stores the keys and values of all earlier tokens, and reads them for each new
one, which is most of the time of a step. The [KV
cache](../fast/module.md#KeyValueCache) holds `2 * k_len * kv_heads * d_k` numbers for
each layer and sequence. Llama 3 8B has 32 heads, and 8 of keys and values: its cache is
a quarter as large as that of multi-head attention. Mistral, Qwen, Gemma and gpt-oss
share heads as well; PaLM, Falcon 7B and StarCoder have a single one.

Two steps of the [core](../mha.md) change, the scores and the weighted sum: query head
$h$ of a group $g$ meets the keys and values of that group.

$$S_{ijbgh} = \sum_d Q_{ibghd}\, K_{jbgd} \qquad
  C_{ibghd} = \sum_j A_{ijbgh}\, V_{jbgd}$$

**At full speed** it is the argument `kv_heads` of
[`fast.MultiHeadAttention`](../fast/module.md). With the same weights, the outputs are
equal:

```python
from headnotes import fast

quick = fast.MultiHeadAttention(heads=6, d_model=42, kv_heads=2)
```

**Reduces to** the core where `kv_heads` equals `heads`. Otherwise it is the core with
each key and value head repeated for its group: the formula is the same, but nothing is
copied here.

**Laws.** Of the laws that the core passes, all apply; the checker takes the option
`kv_heads`.

Source: [Fast Transformer Decoding](https://arxiv.org/abs/1911.02150), Shazeer 2019,
section 3, for one head; [GQA](https://arxiv.org/abs/2305.13245), Ainslie et al. 2023,
section 2, for groups, and for their weights from those of a multi-head model.
"""

import torch
from torch import Tensor

from headnotes.mha import (
    MultiHeadAttention,
    PrepareForMultiHeadAttention,
    check_sizes,
    check_weight,
)


class GroupedQueryAttention(MultiHeadAttention):
    r"""Multi-head attention whose heads share `kv_heads` heads of keys and values.

    The arguments are those of the core, and `kv_heads`, which divides `heads`. Query
    heads 0 to `heads / kv_heads - 1` share the first head of keys and values, as in the
    checkpoints of Llama; a group is a block of neighbors, not each `kv_heads`-th head.

    Raises what the core raises, and `ValueError` where `kv_heads` does not divide
    `heads`. Source: Ainslie et al. 2023, section 2.2.

    Six heads of queries, and two of keys and values:

    >>> gqa = GroupedQueryAttention(6, 66, kv_heads=2).eval()
    >>> x, y = torch.randn(13, 5, 66), torch.randn(17, 5, 66)
    >>> gqa.key(y).shape
    torch.Size([17, 5, 2, 11])
    >>> output = gqa(query=x, key=y, value=y)

    It is multi-head attention with repeated keys and values:

    >>> mha = MultiHeadAttention(6, 66).eval()
    >>> state = gqa.state_dict()
    >>> for name in state:
    ...     if name.startswith(("key", "value")):
    ...         heads = state[name].view(2, 11, -1)
    ...         repeated = heads.repeat_interleave(3, dim=0)
    ...         state[name] = repeated.reshape_as(mha.state_dict()[name])
    >>> _ = mha.load_state_dict(state)
    >>> torch.allclose(output, mha(query=x, key=y, value=y), atol=1e-6)
    True
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        kv_heads: int,
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        check_kv_heads(heads, kv_heads)
        self.kv_heads = kv_heads
        # These replace the projections of the core. Only their height differs.
        size = d_model, kv_heads, self.d_k
        self.key = PrepareForMultiHeadAttention(*size, bias=bias)
        self.value = PrepareForMultiHeadAttention(*size, bias=True)

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    ) -> Tensor:
        r"""The dot product of each query with the keys of its group:

        $$S_{ijbgh} = \sum_d Q_{ibghd}\, K_{jbgd}$$

        >>> gqa = GroupedQueryAttention(6, 66, kv_heads=2)
        >>> query = torch.randn(13, 5, 6, 11)
        >>> gqa.get_scores(query, torch.randn(17, 5, 2, 11)).shape
        torch.Size([13, 17, 5, 6])
        """
        # Splitting an axis is free. Without it each key would have to be repeated.
        group = self.heads // self.kv_heads
        query = query.view(
            *query.shape[:2], self.kv_heads, group, self.d_k
        )  # [q_len, batch_size, kv_heads, heads // kv_heads, d_k]
        scores = torch.einsum("ibghd,jbgd->ijbgh", query, key).flatten(-2)
        return scores  # [q_len, k_len, batch_size, heads]

    def apply_weights(
        self,
        attn: Tensor,  # [q_len, k_len, batch_size, heads]
        value: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    ) -> Tensor:
        r"""The weighted sum of the values of its group, for each query and head:

        $$C_{ibghd} = \sum_j A_{ijbgh}\, V_{jbgd}$$

        >>> gqa = GroupedQueryAttention(6, 66, kv_heads=2)
        >>> attn = torch.rand(13, 17, 5, 6)
        >>> gqa.apply_weights(attn, torch.randn(17, 5, 2, 11)).shape
        torch.Size([13, 5, 6, 11])
        """
        group = self.heads // self.kv_heads
        attn = attn.view(
            *attn.shape[:3], self.kv_heads, group
        )  # [q_len, k_len, batch_size, kv_heads, heads // kv_heads]
        context = torch.einsum("ijbgh,jbgd->ibghd", attn, value).flatten(2, 3)
        return context  # [q_len, batch_size, heads, d_k]

    @classmethod
    def from_multi_head(
        cls, mha: MultiHeadAttention, kv_heads: int
    ) -> "GroupedQueryAttention":
        r"""A module with the weights of `mha`, and the mean keys and values of groups.

        A short further training recovers most of the quality; the paper takes 5% of
        the steps of the first one. `mha` is not modified, and neither is the
        random number generator. Raises `TypeError` for another module, `ValueError`
        where `kv_heads` does not divide its heads. Source: Ainslie et al. 2023, section
        2.1.

        >>> mha = MultiHeadAttention(6, 66)
        >>> gqa = GroupedQueryAttention.from_multi_head(mha, kv_heads=2)
        >>> first, second = mha.key.linear.bias.view(2, 3, 11).mean(dim=1)
        >>> torch.allclose(gqa.key.linear.bias[:11], first)
        True
        """
        if type(mha) is not MultiHeadAttention:
            kind = type(mha).__name__
            raise TypeError(f"`mha` is a {kind}, not the core's MultiHeadAttention")
        check_kv_heads(mha.heads, kv_heads)
        check_weight(mha, "output")
        weight, heads, d_k = mha.output.weight, mha.heads, mha.d_k
        state = mha.state_dict()
        bias = "query.linear.bias" in state
        settings = heads, len(weight), mha.dropout.p, bias
        # The random numbers of the initialization are overwritten below.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            module = cls(*settings, kv_heads=kv_heads)
        module.to(weight)
        for name in state:
            if name.startswith(("key", "value")):
                # The heads of a group are neighbors.
                shape = kv_heads, -1, d_k, *state[name].shape[1:]
                groups = state[name].view(
                    shape
                )  # [kv_heads, heads // kv_heads, d_k, ...]
                state[name] = groups.mean(dim=1).flatten(0, 1)
        module.load_state_dict(state)
        return module.train(mha.training)


# region Input checks


def check_kv_heads(heads: int, kv_heads: int) -> None:
    """Refuse a number of heads of keys and values that does not divide the heads."""
    check_sizes(kv_heads=kv_heads)
    if heads % kv_heads:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        below = [n for n in divisors if n < kv_heads][-1:]
        above = [n for n in divisors if n > kv_heads][:1]
        raise ValueError(
            f"`heads` (={heads}) must be divisible by `kv_heads` (={kv_heads}); "
            f"{' and '.join(map(str, below + above))} would do"
        )


# endregion
