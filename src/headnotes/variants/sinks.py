r"""# Attention sinks: a learned logit per head

This module is the core with one learned number per head, the *sink*: a logit that takes
part in the softmax and has no value. gpt-oss uses it in every layer. It is for readers
who know the [core](../mha.md); only the softmax changes.

The weights of a softmax sum to 1, so a head must attend to something even where no key
is relevant. Trained models then put the weight on a token that carries little
information, often the first. With a sink, $s_h$, that part of the weight goes nowhere:

$$A_{ijbh} = \frac{e^{S_{ijbh}}}{e^{s_h} + \sum_k e^{S_{ikbh}}}$$

A sink of 0 adds $e^0 = 1$ to the sum, which is known as *softmax plus one* (also
"softmax off by one", or "quiet softmax"). The sinks begin there;
`requires_grad_(False)` keeps them there.

**At full speed** they are an option of [`Scores`](../fast/components.md#Scores), an
argument of [`fast.MultiHeadAttention`](../fast/module.md). With the same weights, the
outputs are equal:

```python
from headnotes import fast

quick = fast.MultiHeadAttention(heads=3, d_model=42, scores=fast.Scores(sinks=True))
```

**Reduces to** the core as the sinks fall to minus infinity.

**Laws.** The law [`sinks`](../attention_laws/sinks.md#sinks) tests the idea itself.
Of the laws that the core passes, all but `rows_sum_to_one`, `formula`,
`weights_match_output` and `score_independence` apply: a row of weights sums to less
than 1. A fully masked row gives its whole weight to the sink.

[Sliding window attention](sliding_window.md) has another kind of sink: the first tokens
of a sequence, which stay visible.

Source: [gpt-oss model card](https://arxiv.org/abs/2508.10925), OpenAI 2025, section
2.2; [Efficient Streaming Language Models with Attention
Sinks](https://arxiv.org/abs/2309.17453), Xiao et al. 2023, section 3.3, equation 2, for
the logit of 0; [Attention Is Off By
One](https://www.evanmiller.org/attention-is-off-by-one.html), Miller 2023.
"""

import torch
from torch import Tensor, nn

from headnotes.mha import MultiHeadAttention, masked_softmax


class SinkAttention(MultiHeadAttention):
    r"""Multi-head attention with a learned logit per head that has no value.

    Arguments, masks and errors are those of the core. The parameter `sinks`, `[heads]`,
    begins at 0. Source: OpenAI 2025, section 2.2.

    Four keys with a score of 0 and the sink of 0 share the weight, a fifth each:

    >>> mha = SinkAttention(heads=2, d_model=6, bias=False)
    >>> x = torch.zeros(4, 1, 6)
    >>> _ = mha(query=x[:1], key=x, value=x)
    >>> mha.attn[0, :, 0, 0]
    tensor([0.2000, 0.2000, 0.2000, 0.2000])
    """

    def __init__(
        self, heads: int, d_model: int, dropout_prob: float = 0.1, bias: bool = True
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        self.sinks = nn.Parameter(torch.zeros(heads))  # [heads]

    def get_weights(
        self,
        scores: Tensor,  # [q_len, k_len, batch_size, heads]
        mask: Tensor | None,  # [q_len, k_len, batch_size, 1]
    ) -> Tensor:
        r"""The softmax over the keys and the sink, without the weight of the sink.

        >>> mha = SinkAttention(heads=5, d_model=10)
        >>> mask = torch.ones(3, 7, 2, 1).bool()
        >>> mask[:, 4:] = False
        >>> weights = mha.get_weights(torch.zeros(3, 7, 2, 5), mask)
        >>> weights[0, :, 0, 0].detach()
        tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.0000, 0.0000, 0.0000])
        """
        q_len, k_len, batch_size, heads = scores.shape

        # The logit of the sink is not divided by $\sqrt{d_k}$: it is no dot product. At
        # minus infinity, a fully masked row would be 0 / 0; the least finite number has
        # the same weight of zero beside any key. The greatest stands for what autocast
        # rounds to infinity.
        finite = torch.finfo(scores.dtype)
        sinks = self.sinks.to(scores.dtype).clamp(finite.min, finite.max)  # [heads]

        # One more key for all queries, which no mask hides. The core's line is
        # `masked_softmax(scores, mask)`.
        sinks = sinks.expand(q_len, 1, batch_size, heads)  # [q_len, 1, ..., heads]
        scores = torch.cat([scores, sinks], dim=1)  # [q_len, k_len + 1, ..., heads]
        if mask is not None:
            mask = nn.functional.pad(
                mask, (0, 0, 0, 0, 0, 1), value=True
            )  # [q_len, k_len + 1, ..., 1]
        attn = masked_softmax(scores, mask)  # [q_len, k_len + 1, ..., heads]

        # Its weight is dropped after the softmax, which is the same as a value of zero.
        return attn[:, :k_len]  # [q_len, k_len, batch_size, heads]
