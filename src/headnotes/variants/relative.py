r"""# Relative positions: Shaw, Transformer-XL and T5

In these three variants a score depends on the content of query and key and on the
distance between them, for which the model learns something. Nothing is added to the
embeddings. They differ in what is learned:

| | for each distance | changes |
|---|---|---|
| Shaw | a vector added to the key, and one added to the value | scores, context |
| Transformer-XL | a projection of a sinusoid, and two biases of the query | scores |
| T5 | a number for each head, one for a whole range of far distances | scores |

In all of them the first step that changes is `get_scores` of the
[core](../mha.md#MultiHeadAttention.get_scores), in Shaw's to

$$S_{ij} = q_i \cdot (k_j + a_{j-i}) / \sqrt{d_k}$$

in Transformer-XL, with $r$ a sinusoid, to

$$S_{ij} = ((q_i + u) \cdot k_j + (q_i + v) \cdot W r_{i-j}) / \sqrt{d_k}$$

and in T5 to

$$S_{ij} = q_i \cdot k_j + b_{\operatorname{bucket}(j-i)}$$

T5 does not divide by $\sqrt{d_k}$. **The last query is at the position of the last
key**, as in decoding: with 3 queries and 7 keys, query 0 is at position 4.

**At full speed** T5's is the `bias` of [`Scores`](../fast/components.md#Scores), an
argument of [`fast.MultiHeadAttention`](../fast/module.md). With the same weights (the
table is `score_bias` there), the outputs are equal. The other two are not available:

```python
from headnotes import fast
from headnotes.architectures import BucketBias

bias = BucketBias(buckets=32, heads=3, max_distance=128, bidirectional=True)
scores = fast.Scores(scale=1.0, bias=bias)
quick = fast.MultiHeadAttention(heads=3, d_model=42, scores=scores)
```

**Reduces to** the core where all that is learned for distances is zero (for T5: the
core without a scale).

**Laws.** All three obey
[`relative_positions`](../attention_laws/positions.md#relative_positions). Of the laws
that the core passes, all but `key_permutation`, `query_permutation`, `longer_padding`,
`formula` and `weights_match_output` apply: the order of tokens matters, keys that are
appended behind the last query here move the queries along, and the last two laws
compare with the scores and the context of the core.

Source: [Self-Attention with Relative Position
Representations](https://arxiv.org/abs/1803.02155), Shaw et al. 2018, section 3.2;
[Transformer-XL](https://arxiv.org/abs/1901.02860), Dai et al. 2019, section 3.3 and
appendix B; [T5](https://arxiv.org/abs/1910.10683), Raffel et al. 2019, section 2.1.
"""

import math

import torch
from torch import Tensor, nn

from headnotes.checks import check_sizes, check_tensor
from headnotes.mha import (
    MultiHeadAttention,
    PrepareForMultiHeadAttention,
    check_weight,
)


def relative_positions(q_len: int, k_len: int, device: torch.device) -> Tensor:
    r"""The position of each key less that of each query, $j - i$: `[q_len, k_len]`.

    >>> relative_positions(2, 4, torch.device("cpu"))
    tensor([[-2, -1,  0,  1],
            [-3, -2, -1,  0]])
    """
    i = torch.arange(k_len - q_len, k_len, device=device)  # [q_len]
    j = torch.arange(k_len, device=device)  # [k_len]
    return j - i.unsqueeze(1)  # [q_len, k_len]


class ShawAttention(MultiHeadAttention):
    r"""Attention with a learned vector for each relative position, shared by all heads.

    Positions further apart than `max_distance` share the vector of that distance. The
    parameters `key_table` and `value_table` are `[2 * max_distance + 1, d_k]`, from the
    keys before the query to those after it.

    Raises what the core raises, and `ValueError` for a `max_distance` below 1.
    Source: Shaw et al. 2018, section 3.2.

    >>> mha = ShawAttention(heads=2, d_model=14, max_distance=3)
    >>> mha.key_table.shape
    torch.Size([7, 7])
    >>> mha.table_index(2, 6, torch.device("cpu"))
    tensor([[0, 0, 1, 2, 3, 4],
            [0, 0, 0, 1, 2, 3]])
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        max_distance: int = 16,
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        check_sizes(max_distance=max_distance)
        self.max_distance = max_distance
        rows, d_k = 2 * max_distance + 1, self.d_k
        self.key_table = nn.Parameter(
            nn.init.xavier_uniform_(torch.empty(rows, d_k))
        )  # [rows, d_k]
        self.value_table = nn.Parameter(
            nn.init.xavier_uniform_(torch.empty(rows, d_k))
        )  # [rows, d_k]

    def table_index(self, q_len: int, k_len: int, device: torch.device) -> Tensor:
        """The row of the tables for each pair, `[q_len, k_len]`."""
        limit = self.max_distance
        index = relative_positions(q_len, k_len, device)  # [q_len, k_len]
        return index.clamp(-limit, limit) + limit  # [q_len, k_len]

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The dot product of each query with each key and its vector.

        $$S_{ijbh} = \sum_d Q_{ibhd}\, (K_{jbhd} + a^K_{j-i,d})$$

        >>> mha = ShawAttention(heads=5, d_model=55)
        >>> query = torch.randn(3, 2, 5, 11)
        >>> mha.get_scores(query, torch.randn(7, 2, 5, 11)).shape
        torch.Size([3, 7, 2, 5])
        """
        content = super().get_scores(query, key)  # [q_len, k_len, batch_size, heads]
        # Two products instead of one sum: $k_j + a_{j-i}$ would be one vector for each
        # pair and batch item.
        q_len, k_len = query.shape[0], key.shape[0]
        index = self.table_index(q_len, k_len, query.device)  # [q_len, k_len]
        table = self.key_table[index]  # [q_len, k_len, d_k]
        # The query meets the vector of the distance.
        position = torch.einsum(
            "ibhd,ijd->ijbh", query, table
        )  # [q_len, k_len, batch_size, heads]
        return content + position  # [q_len, k_len, batch_size, heads]

    def apply_weights(
        self,
        attn: Tensor,  # [q_len, k_len, batch_size, heads]
        value: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The weighted sum of the values, each with its vector.

        $$C_{ibhd} = \sum_j A_{ijbh}\, (V_{jbhd} + a^V_{j-i,d})$$

        >>> mha = ShawAttention(heads=5, d_model=55)
        >>> attn = torch.rand(3, 7, 2, 5)
        >>> mha.apply_weights(attn, torch.randn(7, 2, 5, 11)).shape
        torch.Size([3, 2, 5, 11])
        """
        content = super().apply_weights(attn, value)  # [q_len, batch_size, heads, d_k]
        q_len, k_len = attn.shape[:2]
        index = self.table_index(q_len, k_len, attn.device)  # [q_len, k_len]
        table = self.value_table[index]  # [q_len, k_len, d_k]
        position = torch.einsum(
            "ijbh,ijd->ibhd", attn, table
        )  # [q_len, batch_size, heads, d_k]
        return content + position  # [q_len, batch_size, heads, d_k]


# region Transformer-XL


class TransformerXLAttention(MultiHeadAttention):
    r"""Attention with a projected sinusoid for each distance.

    The parameters are those of the core; the projection `position` of the sinusoids;
    and two biases of the query, `[heads, d_k]`: `content_bias`, the paper's $u$, and
    `position_bias`, its $v$. Both begin at zero. The paper's own projections have no
    bias (`bias=False`).

    labml's [relative attention](https://nn.labml.ai/transformers/xl/relative_mha.html)
    learns a vector for each distance in place of $W r$, and a number for each distance
    and head in place of $v \cdot W r$; the rest is the same.

    Raises what the core raises. Source: Dai et al. 2019, section 3.3.

    >>> mha = TransformerXLAttention(heads=5, d_model=55)
    >>> x = torch.randn(3, 2, 55)
    >>> memory = torch.cat([torch.randn(4, 2, 55), x])
    >>> mha(query=x, key=memory, value=memory).shape
    torch.Size([3, 2, 55])
    """

    def __init__(
        self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        self.position = PrepareForMultiHeadAttention(d_model, heads, self.d_k, False)
        zeros = torch.zeros(heads, self.d_k)  # [heads, d_model // heads]
        self.content_bias = nn.Parameter(zeros)
        self.position_bias = nn.Parameter(zeros.clone())

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The score of the content, and that of the distance.

        $$S_{ijbh} = \sum_d (Q_{ibhd} + u_{hd})\, K_{jbhd} +
          \sum_d (Q_{ibhd} + v_{hd})\, R_{i-j,hd}$$

        >>> mha = TransformerXLAttention(heads=5, d_model=55)
        >>> query = torch.randn(3, 2, 5, 11)
        >>> mha.get_scores(query, torch.randn(7, 2, 5, 11)).shape
        torch.Size([3, 7, 2, 5])
        """
        # The query arrives divided by $\sqrt{d_k}$, so the biases need it, too.
        content_query = query + self.content_bias * self.scale
        position_query = query + self.position_bias * self.scale
        content = super().get_scores(
            content_query, key
        )  # [q_len, k_len, batch_size, heads]

        # The distances $i - j$ that occur, from that of the last query and the first
        # key to that of the first query and the last key; and one more.
        q_len, k_len = query.shape[0], key.shape[0]
        distances = torch.arange(
            k_len - 1, -q_len - 1, -1, device=query.device
        )  # [q_len + k_len]
        check_weight(self.position, "linear")
        weight = self.position.linear.weight
        d_model = weight.shape[1]
        table = xl_sinusoids(distances, d_model)  # [q_len + k_len, d_model]
        table = self.position(table.to(weight.dtype))  # [q_len + k_len, heads, d_k]

        # One product for each query and distance, of which there are `q_len + k_len`,
        # and not one for each pair. The shift then finds the distance of each key.
        by_distance = torch.einsum(
            "ibhd,mhd->imbh", position_query, table
        )  # [q_len, q_len + k_len, batch_size, heads]
        return content + relative_shift(by_distance)  # [..., batch_size, heads]


def relative_shift(
    x: Tensor,  # [q_len, columns, ...]
) -> Tensor:
    r"""From scores by distance, `[q_len, q_len + k_len, ...]`, to scores by key.

    The result is `[q_len, k_len, ...]`. In a row of `x` the distances fall from
    `k_len - 1` to `-q_len`. Row $i$ needs those from the column `q_len - 1 - i` on, one
    earlier than the row above it. If the matrix is read as rows that are shorter by
    one, each begins one earlier: no index is needed, only another view of the same
    memory.

    Raises `TypeError` for what is no tensor, `ValueError` for more rows than columns.
    Source: Dai et al. 2019, appendix B.

    Two queries at positions 1 and 2, and three keys. Here scores are the distances:

    >>> distances = torch.tensor([2, 1, 0, -1, -2])
    >>> relative_shift(distances.expand(2, 5))
    tensor([[ 1,  0, -1],
            [ 2,  1,  0]])
    """
    check_tensor("x", x)
    if x.dim() < 2 or x.shape[0] > x.shape[1]:
        raise ValueError(f"`x` has shape {list(x.shape)}, not [q_len, q_len + k_len]")
    q_len, columns = x.shape[:2]
    if not q_len:
        return x
    shorter = columns - 1
    x = x.flatten(0, 1)[q_len - 1 :][: q_len * shorter]  # [q_len * shorter, ...]
    x = x.view(q_len, shorter, *x.shape[1:])  # [q_len, shorter, ...]
    return x[:, : columns - q_len]  # [q_len, columns - q_len, ...]


def xl_sinusoids(
    distances: Tensor,  # [length]
    d_model: int,
) -> Tensor:
    r"""The sinusoids of distances, `[length, d_model]`: all sines, then all cosines.

    $$r_t = [\sin(t\,\theta_0), \sin(t\,\theta_1), \ldots,
      \cos(t\,\theta_0), \cos(t\,\theta_1), \ldots]$$

    The angles are those of the sinusoidal encoding, `positions.sinusoids`, where sines
    and cosines alternate. The order here is that of the code of the paper, which
    the checkpoints have. Angles are float64, whatever the dtype of a model (float32 on
    Apple's GPUs). Raises `TypeError` or `ValueError` for other arguments.

    >>> xl_sinusoids(torch.tensor([0, 1, -1]), 4)[:, [0, 2]]
    tensor([[ 0.0000,  1.0000],
            [ 0.8415,  0.5403],
            [-0.8415,  0.5403]], dtype=torch.float64)
    """
    check_tensor("distances", distances)
    check_sizes(d_model=d_model)
    if distances.dim() != 1 or distances.is_complex() or distances.dtype == torch.bool:
        raise ValueError(
            f"`distances` is {distances.dtype} of shape {list(distances.shape)}, not "
            "[length] of real numbers"
        )
    wide = torch.float32 if distances.device.type == "mps" else torch.float64
    even = torch.arange(
        0, d_model, 2, dtype=wide, device=distances.device
    )  # [(d_model + 1) // 2]
    frequencies = 10000 ** -(even / d_model)  # [(d_model + 1) // 2]
    angles = distances.to(wide).unsqueeze(1) * frequencies  # [length, ...]
    table = torch.cat([angles.sin(), angles.cos()], dim=1)  # [length, ...]
    # An odd width has one cosine less.
    return table[:, :d_model]  # [length, d_model]


# endregion
# region T5


class T5Attention(MultiHeadAttention):
    r"""Attention with a learned bias of the scores for each bucket of distances.

    `relative_bias` is a table `[buckets, heads]`. A decoder has `bidirectional=False`:
    all of its buckets are for keys before the query. In T5 all layers share the table
    of the first: `other.relative_bias = first.relative_bias`. Scores are not divided by
    $\sqrt{d_k}$, because T5 initializes the queries with smaller weights instead; set
    the attribute `scale` where another model does divide. T5 itself has `bias=False`,
    and no bias of value and output.

    Raises what the core and `relative_buckets` raise.
    Source: Raffel et al. 2019, section 2.1.

    >>> mha = T5Attention(heads=5, d_model=55, bidirectional=False)
    >>> mha.scale, mha.relative_bias.weight.shape
    (1.0, torch.Size([32, 5]))
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        check_buckets(buckets, max_distance, bidirectional)
        self.scale = 1.0
        self.buckets = buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.relative_bias = nn.Embedding(buckets, heads)

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
    ) -> Tensor:
        r"""The dot product of each query with each key, and the bias of its bucket.

        $$S_{ijbh} = \sum_d Q_{ibhd}\, K_{jbhd} + B_{\operatorname{bucket}(j-i),h}$$

        >>> mha = T5Attention(heads=5, d_model=55)
        >>> query = torch.randn(3, 2, 5, 11)
        >>> mha.get_scores(query, torch.randn(7, 2, 5, 11)).shape
        torch.Size([3, 7, 2, 5])
        """
        scores = super().get_scores(query, key)  # [q_len, k_len, batch_size, heads]
        bucket = relative_buckets(
            relative_positions(query.shape[0], key.shape[0], query.device),
            buckets=self.buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )  # [q_len, k_len]
        bias: Tensor = self.relative_bias(bucket)  # [q_len, k_len, heads]
        bias = bias.unsqueeze(2)  # [q_len, k_len, 1, heads]
        return scores + bias.to(scores.dtype)  # [q_len, k_len, batch_size, heads]


def relative_buckets(
    positions: Tensor,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Tensor:
    r"""The bucket of each relative position $j - i$, of the same shape.

    Half of the buckets are for one distance each, the others for ranges that grow as a
    geometric series up to `max_distance`; all distances from there on share the last
    bucket. With `bidirectional`, keys after the query have the second half of all
    buckets; otherwise they share bucket 0 with the query itself.

    Raises `TypeError` for positions that are not integers, `ValueError` for numbers
    that do not fit. Source: Raffel et al. 2019, section 2.1, and its code.

    >>> positions = torch.tensor([-200, -20, -8, -3, 0, 3, 20])
    >>> relative_buckets(positions)
    tensor([15, 10,  8,  3,  0, 19, 26])
    >>> relative_buckets(positions, bidirectional=False)
    tensor([31, 17,  8,  3,  0,  0,  0])
    """
    check_buckets(buckets, max_distance, bidirectional)
    check_tensor("positions", positions)
    dtype = positions.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"`positions` is {dtype}; use `positions.long()`")
    positions = positions.long()
    if bidirectional:
        buckets = buckets // 2
        offset = torch.where(positions > 0, buckets, 0)
        distance = positions.abs()
    else:
        offset = torch.zeros_like(positions)
        distance = (-positions).clamp(min=0)
    exact = buckets // 2
    # The logarithm is 0 at `exact`, and 1 at `max_distance`.
    clamped = distance.clamp(min=exact).float()
    share = (clamped / exact).log() / math.log(max_distance / exact)
    bucket = exact + (share * (buckets - exact)).long()
    bucket = torch.where(distance < exact, distance, bucket.clamp(max=buckets - 1))
    result: Tensor = offset + bucket
    return result


# endregion
# region Input checks


def check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Refuse numbers of which no series of buckets can be made."""
    if type(bidirectional) is not bool:
        raise TypeError(f"`bidirectional` (={bidirectional!r}) must be True or False")
    sides = 2 if bidirectional else 1
    check_sizes(2 * sides, buckets=buckets)
    if buckets % sides:
        raise ValueError(
            f"`buckets` (={buckets}) must be even, as keys before and after the query "
            "have half of them each"
        )
    check_sizes(buckets // sides // 2 + 1, max_distance=max_distance)


# endregion
