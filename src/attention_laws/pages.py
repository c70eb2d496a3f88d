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
from torch.nn.functional import pad

from attention_laws.names import parameters_of, required_by_name, with_options

# The required arguments, in their usual order.
PAGE_ARGUMENTS = (
    r"q(uery)?",
    r"k(ey)?s?_\w+",
    r"v(alue)?s?_\w+",
    r"(block|page)_tables?",
    r"(context|seq|cache|kv)_len(gth)?s?",
)
# What may be required behind them.
SCALE_ARGUMENT = r"(softmax_|sm_)?scale"


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
    patterns = [*PAGE_ARGUMENTS, *[SCALE_ARGUMENT] * (len(first) > len(PAGE_ARGUMENTS))]
    return len(first) == len(patterns) and all(map(re.fullmatch, patterns, first))


# How many tokens a page has.
PAGE = 4


def over_pages(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    r"""Attention to keys and values in pages, as one to sequences of them.

    `attention(query, key_pages, value_pages, tables, lengths)` has one query for each
    sequence. The pages of all sequences lie in one pool, in the reverse order; behind
    the end of a sequence, its last page has other tokens. Options are passed on. A
    scale that is required is the usual one.

    >>> def first_token(query, key_pages, value_pages, tables, lengths):
    ...     return value_pages[tables[:, 0], 0]
    >>> query, key = torch.zeros(2, 7, 3, 11), torch.randn(2, 19, 3, 11)
    >>> for lengths in (None, torch.tensor([19, 13])):
    ...     output = over_pages(first_token)(query, key, key, lengths)
    ...     print(output.equal(key[:, :1].expand_as(query)))
    True
    True
    """

    required = [p.name for p in parameters_of(attention) if p.default is p.empty]
    scales = required[len(PAGE_ARGUMENTS) :]

    def attend(
        query: Tensor,  # [batch_size, q_len, heads, d_k]
        key: Tensor,  # [batch_size, k_len, heads, d_k]
        value: Tensor,  # [batch_size, k_len, heads, d_k]
        lengths: Tensor | None = None,  # [batch_size]
        **options: Any,
    ) -> Tensor:
        (batch_size, q_len), k_len = query.shape[:2], key.shape[1]
        if lengths is None:
            lengths = torch.full((batch_size,), k_len).to(key.device)  # [batch_size]
        if lengths.shape != (batch_size,):
            raise ValueError(f"lengths has shape {[*lengths.shape]}, not [batch_size]")
        count = -(-k_len // PAGE)
        total = batch_size * count
        order = torch.arange(total).flip(0).to(key.device)  # [total]
        tables = order.reshape(batch_size, count)  # [batch_size, count]

        def in_pages(x: Tensor) -> Tensor:
            missing = 0, 0, 0, 0, 0, count * PAGE - k_len
            x = pad(x, missing, value=1.0)  # [batch_size, count * 4, heads, d_k]
            x = x.reshape(-1, PAGE, *x.shape[2:])  # [batch_size * count, 4, heads, d_k]
            return x[order]

        queries = query.flatten(0, 1)  # [batch_size * q_len, heads, d_k]
        tables = tables.repeat_interleave(q_len, dim=0)  # [batch_size * q_len, count]
        lengths = lengths.repeat_interleave(q_len)  # [batch_size * q_len]
        options = {**dict.fromkeys(scales, query.shape[-1] ** -0.5), **options}
        output = attention(  # [batch_size * q_len, heads, d_k]
            queries, in_pages(key), in_pages(value), tables, lengths, **options
        )
        return output.reshape(query.shape)  # [batch_size, q_len, heads, d_k]

    own = [*inspect.signature(attend).parameters.values()][:-1]
    signature = with_options(attention, own)
    attend.__signature__ = signature  # type: ignore[attr-defined]
    return attend
