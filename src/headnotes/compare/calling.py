r"""# One question, many dialects

Implementations of attention are asked in different ways. Most want the batch first, one
the sequence; a mask says who may be read, or who may not, once for each item or once
for each head, or there are only lengths; weights come back beside the output, stay on
the module, or are not to be had. Each function here puts the same question to one of
them, and brings its answer back into the words of this house. This is how they can be
[compared](equivalence.md) and [probed](probes.md).

Source: the systems are those of the pages under *As others write it*, the
[core](../mha.md), and
[`torch.nn.MultiheadAttention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headnotes import masks, mha
from headnotes.implementations import batch_first, causal, stages, valid_lens

# Output `[q_len, batch_size, d_model]`, and weights `[q_len, k_len, batch_size, heads]`
# where the implementation shows them.
Answer = tuple[Tensor, Tensor | None]


def ask(module: nn.Module, x: Tensor, memory: Tensor, keep: Tensor | None) -> Answer:
    r"""Put one question to any implementation, in its own dialect.

    `x` is `[q_len, batch_size, d_model]` and asks; `memory` is
    `[k_len, batch_size, d_model]` and is read, and is `x` itself in self-attention.
    `keep` is a mask of this house, `[q_len, k_len, batch_size or 1]`. Raises
    `ValueError` where the implementation has no words for the question, `TypeError`
    where it is unknown.

    >>> x = torch.randn(3, 2, 15)
    >>> memory = torch.randn(7, 2, 15)
    >>> lengths = torch.tensor([[7, 7, 7], [4, 4, 4]])
    >>> keep = masks.padding(lengths, k_len=7)
    >>> for module in (
    ...     mha.MultiHeadAttention(heads=5, d_model=15),
    ...     batch_first.MultiHeadAttention(15, n_heads=5),
    ...     valid_lens.MultiHeadAttention(15, 5, 0.0),
    ...     nn.MultiheadAttention(15, 5),
    ...     nn.MultiheadAttention(15, 5, batch_first=True),
    ... ):
    ...     answer = ask(module, x, memory, keep)
    ...     print(*(list(part.shape) for part in answer))
    [3, 2, 15] [3, 7, 2, 5]
    [3, 2, 15] [3, 7, 2, 5]
    [3, 2, 15] [3, 7, 2, 5]
    [3, 2, 15] [3, 7, 2, 5]
    [3, 2, 15] [3, 7, 2, 5]

    What is always causal takes no other question, and shows no weights:

    >>> module = causal.MultiHeadAttention(15, 15, 9, 0, 5)
    >>> output, weights = ask(module, x, x, masks.causal(3))
    >>> list(output.shape), weights
    ([3, 2, 15], None)
    """
    for kind, dialect in DIALECTS.items():
        if isinstance(module, kind):
            return dialect(module, x, memory, keep)
    known = ", ".join(kind.__qualname__ for kind in DIALECTS)
    seen = type(module).__qualname__
    raise TypeError(f"`module` is a {seen}, whose dialect is not known; known: {known}")


def ask_core(
    module: mha.MultiHeadAttention, x: Tensor, memory: Tensor, keep: Tensor | None
) -> Answer:
    """Sequence first, and a mask of this house: nothing to translate."""
    output = module(query=x, key=memory, value=memory, mask=keep)
    return output, module.attn


def ask_batch_first(
    module: batch_first.MultiHeadAttention,
    x: Tensor,  # [q_len, batch_size, d_model]
    memory: Tensor,  # [k_len, batch_size, d_model]
    keep: Tensor | None,  # [q_len, k_len, ...]
) -> Answer:
    """Batch first, and a mask with an axis for heads."""
    mask = keep
    if keep is not None:
        mask = masks.to_sdpa(keep)  # [..., 1, q_len, k_len]
    x = x.transpose(0, 1)  # [batch_size, q_len, d_model]
    memory = memory.transpose(0, 1)  # [batch_size, k_len, d_model]
    output, weights = module(
        x, memory, memory, mask
    )  # [batch_size, q_len, d_model], [batch_size, heads, q_len, k_len]
    output = output.transpose(0, 1)  # [q_len, batch_size, d_model]
    weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, heads]
    return output, weights


def ask_valid_lens(
    module: valid_lens.MultiHeadAttention,
    x: Tensor,  # [q_len, batch_size, d_model]
    memory: Tensor,  # [k_len, batch_size, d_model]
    keep: Tensor | None,  # [q_len, k_len, ...]
) -> Answer:
    """Batch first, and each query says how many keys it may read."""
    lengths = None
    if keep is not None:
        lengths = keep.sum(dim=1).T.expand(x.shape[1], -1)  # [batch_size, q_len]
        same = masks.padding(lengths, len(memory))  # [q_len, k_len, batch_size]
        if not same.equal(keep.expand_as(same)):
            raise ValueError("`keep` allows more than the first few keys of a query")
    x = x.transpose(0, 1)  # [batch_size, q_len, d_model]
    memory = memory.transpose(0, 1)  # [batch_size, k_len, d_model]
    output = module(x, memory, memory, lengths)  # [batch_size, q_len, d_model]
    output = output.transpose(0, 1)  # [q_len, batch_size, d_model]
    # Row $b \cdot heads + h$ is head $h$ of batch item $b$.
    heads = module.num_heads
    weights: Any = module.attention.attention_weights
    weights = weights.unflatten(0, (-1, heads))  # [batch_size, heads, q_len, k_len]
    weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, heads]
    return output, weights


def ask_torch(
    module: nn.MultiheadAttention,
    x: Tensor,  # [q_len, batch_size, d_model]
    memory: Tensor,  # [k_len, batch_size, d_model]
    keep: Tensor | None,  # [q_len, k_len, ...]
) -> Answer:
    """Either layout; its mask is True where ours is False, once for each head."""
    heads, mask = module.num_heads, None
    if keep is not None:
        each = keep.expand(-1, -1, x.shape[1])  # [q_len, k_len, batch_size]
        mask = masks.to_mha(each, heads)  # [batch_size * heads, q_len, k_len]
    if module.batch_first:
        x = x.transpose(0, 1)  # [batch_size, q_len, d_model]
        memory = memory.transpose(0, 1)  # [batch_size, k_len, d_model]
    output, weights = module(
        x, memory, memory, attn_mask=mask, average_attn_weights=False
    )  # [..., d_model], [batch_size, heads, q_len, k_len]
    if module.batch_first:
        output = output.transpose(0, 1)  # [q_len, batch_size, d_model]
    weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, heads]
    return output, weights


def ask_causal(
    module: causal.MultiHeadAttention
    | stages.CausalAttention
    | stages.MultiHeadAttentionWrapper,
    x: Tensor,
    memory: Tensor,
    keep: Tensor | None,
) -> Answer:
    """Batch first, reads itself, and always looks backwards only."""
    if memory is not x:
        raise ValueError("it reads only itself")
    if keep is None or not keep.equal(masks.causal(len(x), device=x.device)):
        raise ValueError("it is always causal, and nothing else")
    output: Tensor = module(x.transpose(0, 1))  # [batch_size, q_len, d_model]
    return output.transpose(0, 1), None  # [q_len, batch_size, d_model]


def ask_unbatched(
    module: stages.SelfAttention_v1 | stages.SelfAttention_v2,
    x: Tensor,
    memory: Tensor,
    keep: Tensor | None,
) -> Answer:
    """One sequence at a time, without a mask."""
    if memory is not x:
        raise ValueError("it reads only itself")
    if keep is not None:
        raise ValueError("it has no mask")
    return torch.stack([module(item) for item in x.unbind(1)], dim=1), None


DIALECTS: dict[type[nn.Module], Callable[..., Answer]] = {
    mha.MultiHeadAttention: ask_core,
    batch_first.MultiHeadAttention: ask_batch_first,
    valid_lens.MultiHeadAttention: ask_valid_lens,
    nn.MultiheadAttention: ask_torch,
    causal.MultiHeadAttention: ask_causal,
    stages.CausalAttention: ask_causal,
    stages.MultiHeadAttentionWrapper: ask_causal,
    stages.SelfAttention_v1: ask_unbatched,
    stages.SelfAttention_v2: ask_unbatched,
}
