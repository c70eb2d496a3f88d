"""Calls with the cache of the tokens before."""

import pytest
import torch
from torch import nn

from attention_laws.adapter import Options, Sizes
from attention_laws.cached_calls import (
    call_with_cache,
    empty_cache,
    restart_with_cache,
)
from attention_laws.infer import infer_adapter
from attention_laws.script import Script
from specimens.base import WithCache
from specimens.decoding import SlotsOfServer


@pytest.mark.parametrize("attention", [WithCache, SlotsOfServer])
def test_the_next_sequence_begins_with_an_empty_cache(
    attention: type[nn.Module],
) -> None:
    adapter = infer_adapter(attention, "attention_class", "", Options())
    script = Script(adapter, Sizes(2, 7, 7, 3, 4))
    restart_with_cache(script)
    args = script.make_arguments()
    whole = script.evaluate(script.call(args))
    for pieces in ((3, 4), (1, 5, 1)):
        cache, start, outputs = empty_cache(script), 0, []
        for count in pieces:
            output, cache = call_with_cache(script, args, start, count, cache)
            start += count
            outputs.append(script.evaluate(output))
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
