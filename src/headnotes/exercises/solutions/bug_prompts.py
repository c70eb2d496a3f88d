r"""# Solution: the second answer (KV cache)

This is a solution of the exercise [the second
answer](../../../exercises/21_bug_prompts.py), with the inputs that its check uses and
the mistakes that the check recognizes.

Without a dict from the caller, the given code uses one that belongs to the module. It
is empty in the first call only. In every later call, the keys and values of all earlier
sequences come first, and the new tokens attend to them. The law *deterministic* fails,
with many others: a second call with the same input gives another output.

The state of a sequence belongs to the caller, who knows when a new one begins. A module
cannot know: a prompt may consist of one token, too.

Source: the code is in the style of [nanoGPT](https://github.com/karpathy/nanoGPT); the
bug is our own.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, numbers

Cache = dict[str, Tensor]


class Attention(nn.Module):
    r"""Causal self-attention over `[batch_size, seq_len, d_model]`, fixed.

    >>> attention, x = Attention(d_model=21, heads=3), torch.randn(2, 5, 21)
    >>> torch.equal(attention(x), attention(x))
    True
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(d_model, 3 * d_model)
        self.c_proj = nn.Linear(d_model, d_model)
        self.cache: Cache = {}

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Attend from each token of `x` to itself and to earlier ones."""
        qkv = self.c_attn(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [batch_size, heads, seq_len, d_k]
        cache = self.cache_of_call(x, cache)
        if cache:
            k = torch.cat([cache["k"], k], dim=2)
            v = torch.cat([cache["v"], v], dim=2)
        cache["k"], cache["v"] = k, v
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        mask = self.mask(*scores.shape[-2:])
        weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
        context = weights @ v  # [batch_size, heads, seq_len, d_k]
        return self.c_proj(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def cache_of_call(self, x: Tensor, cache: Cache | None) -> Cache:
        """The dict of the caller, or a new one for a sequence of its own."""
        # `cache or {}` would not do: the caller's dict is empty at first.
        return {} if cache is None else cache

    def mask(self, q_len: int, k_len: int) -> Tensor:
        """A causal mask; the last query is aligned with the last key."""
        return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)


def converse(attention: type[nn.Module], first: Tensor, second: Tensor) -> Any:
    """Two sequences, and the second one again, decoded in two pieces."""
    torch.manual_seed(0)
    module = attention(d_model=first.shape[-1], heads=2).eval()
    alone = module(first), module(second)
    cache: dict[str, Tensor] = {}
    pieces = [module(piece, cache) for piece in second.tensor_split(2, dim=1)]
    return *alone, torch.cat(pieces, dim=1)


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same. Look at `self.cache` after
    a first sequence: it is not empty when the second one comes.
    """

    def cache_of_call(self, x: Tensor, cache: Cache | None) -> Cache:
        return self.cache if cache is None else cache


class NoCache(Attention):
    """Every call begins a new sequence, even if the caller passes a cache. Use the dict
    of the caller, also while it is empty: `cache or {}` takes an empty dict for none.
    """

    def cache_of_call(self, x: Tensor, cache: Cache | None) -> Cache:
        return {}


class ResetByLength(Attention):
    """The module keeps its cache, and clears it for a prompt of several tokens. A
    sequence may consist of one token; make a new dict for each call without a cache.
    """

    def cache_of_call(self, x: Tensor, cache: Cache | None) -> Cache:
        if x.shape[1] > 1:
            self.cache = {}
        return self.cache if cache is None else cache


class TopLeft(Attention):
    """The mask is aligned with the first key, so that a query with a cache sees less
    than it should. The given mask is right; the bug is elsewhere.
    """

    def mask(self, q_len: int, k_len: int) -> Tensor:
        return torch.ones(q_len, k_len, dtype=torch.bool).tril()


# endregion


def inputs(length: int, other_length: int, *shape: int) -> tuple[Any, ...]:
    """Two sequences of one batch size and of different lengths."""
    batch_size, d_model = shape
    first = numbers(batch_size, length, d_model)
    return first, numbers(batch_size, other_length, d_model, seed=1)


EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[inputs(1, 1, 1, 2), inputs(1, 2, 1, 2), inputs(5, 3, 2, 4)],
    mistakes=[Given, NoCache, ResetByLength, TopLeft],
    run=converse,
    laws=[
        "deterministic",
        "causality",
        "batch_independence",
        "longer_padding",
        "gradients",
        "long_sequences",
        "earlier_calls",
        "vmapped",
        "autocast",
        "copy_after_call",
        "state_dict",
    ],
)
