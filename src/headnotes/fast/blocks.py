r"""# Weights, a block at a time

Scores are many: `q_len * k_len` for every head of every batch item, far more than the
numbers that they are made of. Who writes them all to memory waits for memory. This
module cuts them into blocks, of 128 queries against all keys, and computes the weights
of one block after another in the same buffer, which stays in the processor's cache:

$$P_I = \operatorname{softmax}\left(\frac{Q_I K^\top}{\sqrt{d_k}}\right)
  \qquad \text{for each block } I \text{ of queries}$$

[blockwise](blockwise.md) uses a block's weights while they are there, forward and
backward. Of what a causal mask forbids, most is never computed.

Source: [Self-attention Does Not Need O(n²) Memory](https://arxiv.org/abs/2112.05682),
Rabe and Staats 2021, section 2, with whole rows of keys in a block, so that a softmax
is a softmax.
"""

# Nothing but PyTorch and the standard library: this file runs wherever it is put.
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Queries in a block, scores in a buffer, and the heads that it holds at least, for the
# cores to share. 1 MiB of float32 stays in the cache of a core, beside the keys and
# values that are met; eight heads of long sequences are more. All were found by trying.
ROWS = 128
SCORES = 1 << 18
HEADS = 8


class Rule(NamedTuple):
    r"""Which weights are zero: by a mask, by causality, and by chance.

    `mask` is bool, `[q_len or 1, k_len, batch_size or 1]`; True means that this query
    may attend to this key. `is_causal` lets the last query meet the last key, and no
    query a later one. `seed` fixes what dropout takes away. Where all scores are known
    to be `finite`, nobody looks for those that are not.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    dropout_prob: float = 0.0
    seed: int = 0
    finite: bool = False


class Block(NamedTuple):
    """Some queries of some heads, and how many keys any of them may read."""

    rows: slice
    items: slice
    heads: slice
    k_len: int


class Workspace:
    r"""The buffers that the blocks of one call share, and what is written to them.

    >>> x = torch.randn(300, 1, 7, 11)
    >>> work = Workspace(x, x, Rule(is_causal=True))
    >>> [(b.rows.start, b.rows.stop, b.k_len) for b in work.blocks()]
    [(0, 128, 128), (128, 256, 256), (256, 300, 300)]
    """

    def __init__(self, query: Tensor, key: Tensor, rule: Rule) -> None:
        self.q_len, self.batch_size, self.heads, d_k = query.shape
        self.k_len, self.rule, self.like = key.shape[0], rule, query
        self.scale = 1 / math.sqrt(d_k)
        # With more queries than keys, causality leaves the first of them nothing.
        self.first = max(0, self.q_len - self.k_len) if rule.is_causal else 0
        self.buffers: dict[str, Tensor] = {}
        # As many heads as fit: some of one batch item, or all of several items.
        self.rows = min(ROWS, self.q_len)
        fit = max(HEADS, SCORES // max(1, self.rows * self.k_len))
        self.step = max(1, fit // self.heads), min(fit, self.heads)

        # What is not a number cannot be lowered, only replaced, which takes longer. One
        # reading tells whether there is any.
        bare = rule.mask is None and not rule.is_causal
        known = rule.finite or bare or query.is_meta
        self.finite = known or bool((query.sum() + key.sum()).isfinite())
        if rule.is_causal and rule.mask is None:
            past = query.new_ones(self.rows, self.rows).tril().bool()  # [rows, rows]
            self.past = bounds(past, query)

        self.dropped, self.gain = chances(rule.dropout_prob)
        self.generator: torch.Generator | None = None
        if rule.dropout_prob and not query.is_meta:
            self.generator = torch.Generator(query.device).manual_seed(rule.seed)

    def blocks(self) -> Iterator[Block]:
        """Cut the work. A causal block ends at the last key that it may read."""
        shift = self.k_len - self.q_len
        items, heads = self.step
        for item in range(0, self.batch_size, items):
            for head in range(0, self.heads, heads):
                for row in range(self.first, self.q_len, ROWS):
                    end = min(row + ROWS, self.q_len)
                    yield Block(
                        slice(row, end),
                        slice(item, min(item + items, self.batch_size)),
                        slice(head, min(head + heads, self.heads)),
                        end + shift if self.rule.is_causal else self.k_len,
                    )

    def output(self) -> Tensor:
        """Like the query. Where no block will write, it is zero."""
        output = self.like.new_empty(self.like.shape)
        output[: self.first] = 0
        return output

    def near(self, x: Tensor) -> Tensor:
        """Keys or values in half precision with each head's side by side.

        A product would copy them so for each block of queries.
        """
        if x.itemsize > 2 or self.q_len <= ROWS:
            return x
        return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)

    def buffer(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Room for one block, which holds whatever was left there."""
        if name not in self.buffers:
            heads = min(self.step[0], self.batch_size) * self.step[1]
            size = max(1, heads * self.rows * self.k_len)
            self.buffers[name] = self.like.new_empty(size, dtype=dtype)
        return self.buffers[name][: math.prod(shape)].view(shape)

    def weights(self, query: Tensor, key: Tensor, block: Block) -> Tensor:
        """The weights of a block, `[folded, rows, k_len]`; empty rows are zero."""
        q, k = rows_of(query, block), read_of(key, block)
        scores = self.buffer("weights", (*q.shape[:2], block.k_len))
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=self.scale, out=scores)
        if self.rule.mask is None:
            if self.rule.is_causal:
                # Each row may read one key more than the row before. What is forbidden
                # lies in the last columns, as many as there are rows.
                n = q.shape[1]
                self.forbid(scores[:, :, -n:], self.past[:n, :n])
            return torch.softmax(scores, -1, out=scores)

        # As in the core, a row without keys is allowed all of them on the way in, where
        # it would make NaN, and none on the way out, where it would be uniform.
        keep = self.allowed(block, self.rule.mask)
        empty = ~keep.any(-1, keepdim=True)
        each = scores.view(*sizes_of(block), *scores.shape[1:])
        self.forbid(each, bounds(keep | empty, scores))
        torch.softmax(scores, -1, out=scores)
        if query.is_meta or empty.any():
            each.masked_fill_(empty, 0)
        return scores

    def forbid(self, scores: Tensor, bounds: Tensor) -> None:
        """Lower the scores to their bounds, those too that are not a number."""
        if self.finite:
            torch.minimum(scores, bounds, out=scores)
        else:
            scores.masked_fill_(bounds < 0, -math.inf)

    def allowed(self, block: Block, mask: Tensor) -> Tensor:
        """The mask of a block, batch first, with an axis for the heads."""
        mask = mask[block.rows] if mask.shape[0] > 1 else mask
        mask = mask[..., block.items] if mask.shape[2] > 1 else mask
        mask = mask[:, : block.k_len].permute(2, 0, 1).unsqueeze(1)
        if self.rule.is_causal:
            rows = block.rows.stop - block.rows.start
            past = mask.new_ones(rows, block.k_len).tril(block.k_len - rows)
            mask = mask & past
        return mask

    def kept(self, weights: Tensor) -> Tensor:
        """Draw for the next block; backward draws the same ones again."""
        words = self.buffer("words", (weights.numel() // 4 + 1,), torch.int64)
        words.random_(torch.iinfo(torch.int64).min, None, generator=self.generator)
        return kept(words, weights, self.dropped)


def chances(p: float) -> tuple[int, float]:
    """In how many cases of 2¹⁶ a weight is dropped, and what those kept gain by it.

    The gain makes up for the probability as it was rounded.
    """
    dropped = min(round(p * 2**16), 2**16 - 1)
    return dropped, 1 / (1 - dropped / 2**16) if p < 1 else 0.0


def kept(words: Tensor, weights: Tensor, dropped: int) -> Tensor:
    """1 where a weight stays, 0 where it is dropped, in the place of what was drawn.

    On a CPU a random number costs more than the weight that it decides on. So one
    integer of 64 bits serves four weights: of 16 bits each, read with a sign.
    """
    draws = words.view(torch.int16)[: weights.numel()].view(weights.shape)
    return draws.ge_(dropped - 2**15)


def sizes_of(block: Block) -> tuple[int, int]:
    """How many batch items a block holds, and how many heads of each."""
    return (
        block.items.stop - block.items.start,
        block.heads.stop - block.heads.start,
    )


def rows_of(x: Tensor, block: Block) -> Tensor:
    """The queries of a block, items and heads as one axis: `[folded, rows, d_k]`."""
    return x[block.rows, block.items, block.heads].flatten(1, 2).transpose(0, 1)


def read_of(x: Tensor, block: Block) -> Tensor:
    """The keys or values that a block may read: `[folded, k_len, d_k]`."""
    return x[: block.k_len, block.items, block.heads].flatten(1, 2).transpose(0, 1)


def by_head(x: Tensor, block: Block) -> Tensor:
    """What was computed for a block, heads apart: `[heads, items, rows, k_len]`."""
    return x.view(*sizes_of(block), *x.shape[1:]).transpose(0, 1)


def shown_of(x: Tensor, block: Block) -> Tensor:
    """What is shown of a block, `[n, items, rows, k_len]`: one head may be for all."""
    heads = block.heads if len(x) > 1 else slice(1)
    return x[heads, block.items, block.rows, : block.k_len]


def bounds(keep: Tensor, scores: Tensor) -> Tensor:
    """What no score may exceed: minus infinity where it is forbidden."""
    return scores.new_full(keep.shape, -math.inf).masked_fill_(keep, math.inf)
