r"""# Attention over pages

A server of language models keeps keys and values in pages, which all sequences take
from one pool, and a table of the pages of each sequence. An attention that reads them
is checked as one to keys and values that are sequences: `over_pages` lays these out in
pages for each call.

Source: PagedAttention ([Kwon et al., 2023](https://arxiv.org/abs/2309.06180), section
4), in whose implementations the arguments have these names.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_laws.names import parameters_of, required_by_name

# The required arguments, in their usual order.
PAGE_ARGUMENTS = (
    r"q(uery)?",
    r"k(ey)?s?_\w+",
    r"v(alue)?s?_\w+",
    r"(block|page)_tables?",
    r"(context|seq|cache|kv)_len(gth)?s?",
)


def takes_pages(function: Any) -> bool:
    r"""Whether a function takes keys and values in pages, and a table of the pages.

    >>> def attend(q, k_cache, v_cache, block_table, context_lens, scale=None): ...
    >>> takes_pages(attend), takes_pages(lambda q, k, v: None)
    (True, False)
    """
    if not inspect.isfunction(function):
        return False
    required = required_by_name(parameters_of(function))
    first = [name for name, is_required in required.items() if is_required]
    return len(first) == len(PAGE_ARGUMENTS) and all(
        map(re.fullmatch, PAGE_ARGUMENTS, first)
    )


# How many tokens a page has.
PAGE = 4


def over_pages(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    r"""Attention to keys and values in pages, as one to sequences of them.

    `attention(query, key_pages, value_pages, tables, lengths)` has one query for each
    sequence. The pages of all sequences lie in one pool, in the reverse order; behind
    the end of a sequence, its last page has other tokens.

    >>> def first_token(query, key_pages, value_pages, tables, lengths):
    ...     return value_pages[tables[:, 0], 0]
    >>> q, x = torch.zeros(2, 1, 1, 1), torch.arange(10.0).reshape(2, 5, 1, 1)
    >>> over_pages(first_token)(q, x, x).flatten()
    tensor([0., 5.])
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        (batch_size, q_len), k_len = query.shape[:2], key.shape[1]
        if lengths is None:
            lengths = torch.full((batch_size,), k_len, device=query.device)
        if lengths.shape != (batch_size,):
            raise ValueError(f"lengths has shape {[*lengths.shape]}, not [batch_size]")
        count = -(-k_len // PAGE)
        order = torch.arange(batch_size * count, device=query.device).flip(0)

        def pages(x: Tensor) -> Tensor:
            rest = x.new_ones(batch_size, count * PAGE - k_len, *x.shape[2:])
            whole = torch.cat([x, rest], dim=1)
            return whole.reshape(-1, PAGE, *x.shape[2:])[order]

        output = attention(
            query.flatten(0, 1),
            pages(key),
            pages(value),
            order.reshape(batch_size, count).repeat_interleave(q_len, dim=0),
            lengths.repeat_interleave(q_len),
        )
        return output.reshape(batch_size, q_len, *output.shape[1:])

    return attend
