r"""# Calling conventions

This module calls different attention implementations through one function, `call`, so
that they can be [compared](equivalence.md) and [probed](probes.md). Most are batch
first, some sequence first. In a mask, True means *may attend* or *is hidden*; it has an
axis for the batch, or for batch and heads, or there are valid lengths instead. The
weights are returned, stored on the module, or not available. Each function here calls
one implementation, and converts its results to the layout of Headnotes.

Source: the systems are those of the pages on other implementations, the
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
Result = tuple[Tensor, Tensor | None]


def call(module: nn.Module, x: Tensor, memory: Tensor, mask: Tensor | None) -> Result:
    r"""Call any implementation, with inputs and results in the convention of Headnotes.

    `x` gives the queries, `[q_len, batch_size, d_model]`; `memory` gives the keys and
    values, `[k_len, batch_size, d_model]`, and is `x` itself in self-attention. `mask`
    is in the convention of Headnotes, `[q_len, k_len, batch_size or 1]`. Raises
    `ValueError` if the implementation does not support these inputs, `TypeError` if it
    is unknown.

    >>> x = torch.randn(3, 2, 15)
    >>> memory = torch.randn(7, 2, 15)
    >>> lengths = torch.tensor([[7, 7, 7], [4, 4, 4]])
    >>> mask = masks.padding(lengths, k_len=7)
    >>> for module in (
    ...     mha.MultiHeadAttention(heads=5, d_model=15),
    ...     batch_first.MultiHeadAttention(15, n_heads=5),
    ...     valid_lens.MultiHeadAttention(15, 5, 0.0),
    ...     nn.MultiheadAttention(15, 5),
    ...     nn.MultiheadAttention(15, 5, batch_first=True),
    ... ):
    ...     output, weights = call(module, x, memory, mask)
    ...     print(list(output.shape), list(weights.shape))
    [3, 2, 15] [3, 7, 2, 5]
    [3, 2, 15] [3, 7, 2, 5]
    [3, 2, 15] [3, 7, 2, 5]
    [3, 2, 15] [3, 7, 2, 5]
    [3, 2, 15] [3, 7, 2, 5]

    A module that is always causal takes no other mask, and returns no weights:

    >>> module = causal.MultiHeadAttention(15, 15, 9, 0, 5)
    >>> output, weights = call(module, x, x, masks.causal(3))
    >>> list(output.shape), weights
    ([3, 2, 15], None)
    """
    for module_type, calling in CALLS.items():
        if isinstance(module, module_type):
            return calling(module, x, memory, mask)
    known = ", ".join(module_type.__qualname__ for module_type in CALLS)
    seen = type(module).__qualname__
    raise TypeError(f"`module` is a {seen}, but must be one of {known}")


def call_core(
    module: mha.MultiHeadAttention, x: Tensor, memory: Tensor, mask: Tensor | None
) -> Result:
    """Sequence first, with the mask of Headnotes: there is nothing to convert."""
    output = module(query=x, key=memory, value=memory, mask=mask)
    return output, module.attn


def call_batch_first(
    module: batch_first.MultiHeadAttention,
    x: Tensor,  # [q_len, batch_size, d_model]
    memory: Tensor,  # [k_len, batch_size, d_model]
    mask: Tensor | None,  # [q_len, k_len, ...]
) -> Result:
    """Batch first, and a mask with an axis for heads."""
    if mask is not None:
        mask = masks.to_sdpa(mask)  # [..., 1, q_len, k_len]
    x = x.transpose(0, 1)  # [batch_size, q_len, d_model]
    memory = memory.transpose(0, 1)  # [batch_size, k_len, d_model]
    output, weights = module(
        x, memory, memory, mask
    )  # [batch_size, q_len, d_model], [batch_size, heads, q_len, k_len]
    output = output.transpose(0, 1)  # [q_len, batch_size, d_model]
    weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, heads]
    return output, weights


def call_valid_lens(
    module: valid_lens.MultiHeadAttention,
    x: Tensor,  # [q_len, batch_size, d_model]
    memory: Tensor,  # [k_len, batch_size, d_model]
    mask: Tensor | None,  # [q_len, k_len, ...]
) -> Result:
    """Batch first, with the number of keys that each query may attend to."""
    lengths = None
    if mask is not None:
        lengths = mask.sum(dim=1).T.expand(x.shape[1], -1)  # [batch_size, q_len]
        same = masks.padding(lengths, len(memory))  # [q_len, k_len, batch_size]
        if not same.equal(mask.expand_as(same)):
            raise ValueError("`mask` allows more than the first few keys of a query")
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


def call_torch(
    module: nn.MultiheadAttention,
    x: Tensor,  # [q_len, batch_size, d_model]
    memory: Tensor,  # [k_len, batch_size, d_model]
    mask: Tensor | None,  # [q_len, k_len, ...]
) -> Result:
    """Either layout; True hides a key, and the mask is repeated for each head."""
    heads, attn_mask = module.num_heads, None
    if mask is not None:
        full = mask.expand(-1, -1, x.shape[1])  # [q_len, k_len, batch_size]
        attn_mask = masks.to_mha(full, heads)  # [batch_size * heads, q_len, k_len]
    if module.batch_first:
        x = x.transpose(0, 1)  # [batch_size, q_len, d_model]
        memory = memory.transpose(0, 1)  # [batch_size, k_len, d_model]
    output, weights = module(
        x, memory, memory, attn_mask=attn_mask, average_attn_weights=False
    )  # [..., d_model], [batch_size, heads, q_len, k_len]
    if module.batch_first:
        output = output.transpose(0, 1)  # [q_len, batch_size, d_model]
    weights = weights.permute(2, 3, 0, 1)  # [q_len, k_len, batch_size, heads]
    return output, weights


def call_causal(
    module: causal.MultiHeadAttention
    | stages.CausalAttention
    | stages.MultiHeadAttentionWrapper,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | None,
) -> Result:
    """Batch first, self-attention, and always causal."""
    if memory is not x:
        raise ValueError("it has self-attention only")
    if mask is None or not mask.equal(masks.causal(len(x), device=x.device)):
        raise ValueError("it is always causal, and takes no other mask")
    output: Tensor = module(x.transpose(0, 1))  # [batch_size, q_len, d_model]
    return output.transpose(0, 1), None  # [q_len, batch_size, d_model]


def call_unbatched(
    module: stages.SelfAttention_v1 | stages.SelfAttention_v2,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | None,
) -> Result:
    """One sequence at a time, self-attention, without a mask."""
    if memory is not x:
        raise ValueError("it has self-attention only")
    if mask is not None:
        raise ValueError("it has no mask")
    return torch.stack([module(item) for item in x.unbind(1)], dim=1), None


CALLS: dict[type[nn.Module], Callable[..., Result]] = {
    mha.MultiHeadAttention: call_core,
    batch_first.MultiHeadAttention: call_batch_first,
    valid_lens.MultiHeadAttention: call_valid_lens,
    nn.MultiheadAttention: call_torch,
    causal.MultiHeadAttention: call_causal,
    stages.CausalAttention: call_causal,
    stages.MultiHeadAttentionWrapper: call_causal,
    stages.SelfAttention_v1: call_unbatched,
    stages.SelfAttention_v2: call_unbatched,
}
