r"""# Solution: chunked prefill

This is a solution of the exercise [chunked
prefill](../../../exercises/12_chunked_prefill.py), with the inputs that its check uses
and the mistakes that the check recognizes.

Source: [Sarathi](https://arxiv.org/abs/2308.16369), Agrawal et al. 2023, section 4.2.
"""

import math

import torch
from torch import Tensor

from headnotes.exercises.exercise import Exercise, numbers
from headnotes.exercises.loops import attention, causal

Chunk = tuple[Tensor, Tensor, Tensor]


def prefill_chunk(
    query: Tensor,  # [chunk_len, batch_size, heads, d_k]
    key: Tensor,  # [chunk_len, batch_size, heads, d_k]
    value: Tensor,  # [chunk_len, batch_size, heads, d_k]
    past_key: Tensor,  # [past_len, batch_size, heads, d_k]
    past_value: Tensor,  # [past_len, batch_size, heads, d_k]
) -> Chunk:
    r"""The context of one chunk of a prompt, and the keys and values so far.

    >>> query, key, value = torch.randn(3, 5, 2, 4, 7)
    >>> past = torch.empty(2, 0, 2, 4, 7)
    >>> whole, *_ = prefill_chunk(query, key, value, *past)
    >>> first, *past = prefill_chunk(query[:3], key[:3], value[:3], *past)
    >>> last, *_ = prefill_chunk(query[3:], key[3:], value[3:], *past)
    >>> torch.cat([first, last]).allclose(whole, atol=1e-6)
    True
    """
    keys = torch.cat([past_key, key])  # [past_len + chunk_len, batch_size, heads, d_k]
    values = torch.cat([past_value, value])  # [past_len + chunk_len, ..., d_k]

    # The first query of the chunk is at position `past_len`: the diagonal is shifted by
    # it, so that the last query is aligned with the last key. All of the past is
    # visible, and of the chunk the lower triangle.
    shape = len(query), len(keys)
    mask = query.new_ones(shape, dtype=torch.bool)  # [chunk_len, past_len + chunk_len]
    mask = mask.tril(len(past_key))[..., None, None]  # [chunk_len, ..., 1, 1]

    q = query / math.sqrt(query.shape[-1])  # [chunk_len, batch_size, heads, d_k]
    scores = torch.einsum("ibhd,jbhd->ijbh", q, keys)  # [chunk_len, ..., heads]
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=1)  # [chunk_len, ...]
    context = torch.einsum("ijbh,jbhd->ibhd", weights, values)  # [chunk_len, ..., d_k]
    return context, keys, values


def reference(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor
) -> Chunk:
    """The same, one query and one key at a time."""
    keys, values = torch.cat([past_key, key]), torch.cat([past_value, value])
    context = attention(query, keys, values, causal(past=len(past_key)))
    return context, keys, values


# region Typical mistakes


def with_bias(bias: Tensor, query: Tensor, *others: Tensor) -> Chunk:
    """The context with another mask, as a bias `[chunk_len, past_len + chunk_len]`."""
    _, keys, values = prefill_chunk(query, *others)
    q = query / math.sqrt(query.shape[-1])
    scores = torch.einsum("ibhd,jbhd->ijbh", q, keys) + bias[..., None, None]
    weights = scores.softmax(dim=1)
    return torch.einsum("ijbh,jbhd->ibhd", weights, values), keys, values


def without_mask(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor
) -> Chunk:
    """Nothing is masked: a query attends to later positions of its own chunk."""
    bias = torch.zeros(len(query), len(past_key) + len(key))
    return with_bias(bias, query, key, value, past_key, past_value)


def top_left(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor
) -> Chunk:
    """The mask is aligned with the first key of the past: the first query sees only
    one key. Shift the diagonal by `past_len`, so that the last query sees all keys.
    """
    shape = len(query), len(past_key) + len(key)
    bias = torch.full(shape, -math.inf).triu(1)
    return with_bias(bias, query, key, value, past_key, past_value)


def without_past(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor
) -> Chunk:
    """The chunk attends to itself only. Concatenate the cached keys and values with
    the new ones before the scores are computed.
    """
    _, keys, values = prefill_chunk(query, key, value, past_key, past_value)
    context, *_ = prefill_chunk(query, key, value, past_key[:0], past_value[:0])
    return context, keys, values


def past_behind(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor
) -> Chunk:
    """The new keys are put before those of the past. The cache is in the order of the
    positions: past first.
    """
    context, *_ = prefill_chunk(query, key, value, past_key, past_value)
    return context, torch.cat([key, past_key]), torch.cat([value, past_value])


def unscaled(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor
) -> Chunk:
    """The scores are not scaled: divide them by the square root of `d_k`."""
    query = query * math.sqrt(query.shape[-1])
    return prefill_chunk(query, key, value, past_key, past_value)


def without_cache(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor
) -> Chunk:
    """The context is right, but only the new keys and values are returned, so that the
    next chunk has no past. Return past and chunk together.
    """
    context, *_ = prefill_chunk(query, key, value, past_key, past_value)
    return context, key, value


# endregion


def inputs(chunk_len: int, past_len: int, *shape: int) -> tuple[Tensor, ...]:
    """Arguments for a chunk of one length and a past of another."""
    lengths = [chunk_len] * 3 + [past_len] * 2
    return tuple(numbers(n, *shape, seed=i) for i, n in enumerate(lengths))


EXERCISE = Exercise(
    series="Make it fast, make it decode",
    solution=prefill_chunk,
    reference=reference,
    inputs=[
        inputs(1, 0, 1, 1, 1),
        inputs(1, 1, 1, 1, 1),
        inputs(2, 0, 1, 1, 1),
        inputs(2, 1, 1, 1, 2),
        inputs(3, 5, 2, 1, 7),
    ],
    mistakes=[
        without_mask,
        top_left,
        without_past,
        past_behind,
        unscaled,
        without_cache,
    ],
)
