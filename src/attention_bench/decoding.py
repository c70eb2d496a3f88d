r"""# Decoding with a KV cache

A language model generates one token at a time. The keys and values of all earlier
tokens do not change, so they are stored in a KV cache. A *decoder* of this benchmark
starts from a cache filled with the keys and values of a long prefix, and takes one
token of each batch item at a time. The whole step is timed: projections, writing to the
cache, attention, and the output projection.

Decoders differ in what they store, and how it grows:

- `nn` has no cache: it projects the whole sequence again for each token;
- `cat`, `gpt2` and `x-transformers` copy their cache to a larger one for each token;
- `fast`, `bmm` and `sdpa` write in place, to a cache with spare capacity. `bmm` and
  `sdpa` are bare kernels on a cache with contiguous heads: no decoder here does less
  work, so the others are compared with them.

Before each measurement, the cache is reset to the prefix. The reference output of all
decoders is that of the core module, which processes the same tokens in one causal pass.

Source: [Efficiently Scaling Transformer
Inference](https://arxiv.org/abs/2211.05102), Pope et al. 2022, section 3.3, on why the
bytes of the cache determine the time of a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_bench.implementations import gpt2_module, x_transformers_module
from attention_bench.setting import Setting
from headnotes import convert, fast, masks, mha

# The number of tokens that are decoded in one measurement.
TOKENS = 8


@dataclass
class Prefix:
    """The embedded tokens so far, with the keys and values that `core` makes of them.

    `x` is `[k_len, batch_size, d_model]`, the others `[k_len, batch_size, heads, d_k]`.
    """

    core: mha.MultiHeadAttention
    x: Tensor
    key: Tensor
    value: Tensor

    def with_contiguous_heads(self) -> tuple[Tensor, Tensor]:
        """Keys and values as `[batch_size, heads, k_len, d_k]`, contiguous."""
        key = self.key.permute(1, 2, 0, 3).contiguous()
        value = self.value.permute(1, 2, 0, 3).contiguous()
        return key, value


@dataclass
class Decoder:
    """`step` decodes one token of each batch item; `reset` returns to the prefix.

    A step takes and returns `[1, batch_size, d_model]`, or `[batch_size, 1, d_model]`
    if `batch_first`.
    """

    reset: Callable[[], object]
    step: Callable[[Tensor], Tensor]
    batch_first: bool = False


def start_fast(prefix: Prefix) -> Decoder:
    """The fast module, and its preallocated KV cache."""
    k_len, batch_size, d_model = prefix.x.shape
    module = fast.MultiHeadAttention(prefix.core.heads, d_model, 0.0)
    module.to(prefix.x).load_state_dict(prefix.core.state_dict())
    module.eval()
    cache = module.cache(batch_size, k_len + TOKENS)
    cache.append(prefix.key, prefix.value)

    def reset() -> None:
        cache.length = k_len

    return Decoder(reset, lambda x: module.decode(x, cache)[0])


class BareKernel(nn.Module):
    """A kernel between two projections, on a cache with contiguous heads."""

    def __init__(self, prefix: Prefix, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        fused: Any = convert.to(prefix.core, "fused", order="3 heads d_k")
        self.qkv, self.output, self.kernel = fused.qkv, fused.output, kernel
        self.heads, self.k_len = prefix.core.heads, len(prefix.x)
        key, value = prefix.with_contiguous_heads()
        # Spare capacity for the tokens to be decoded.
        self.keys = F.pad(key, (0, 0, 0, TOKENS))
        self.values = F.pad(value, (0, 0, 0, TOKENS))
        self.length = self.k_len

    def reset(self) -> None:
        self.length = self.k_len

    def forward(
        self,
        x: Tensor,  # [1, batch_size, d_model]
    ) -> Tensor:
        qkv = self.qkv(x[0])  # [batch_size, 3 * d_model]
        sizes = (3, self.heads, 1, -1)
        qkv = qkv.unflatten(-1, sizes)  # [batch_size, 3, heads, 1, d_k]
        query, key, value = qkv.unbind(1)  # [batch_size, heads, 1, d_k]
        new = slice(self.length, self.length + 1)
        self.keys[:, :, new], self.values[:, :, new] = key, value
        self.length += 1
        keys = self.keys[:, :, : self.length]  # [batch_size, heads, ..., d_k]
        values = self.values[:, :, : self.length]  # [batch_size, heads, ..., d_k]
        context = self.kernel(query, keys, values)  # [batch_size, heads, 1, d_k]
        output: Tensor = self.output(context.flatten(1))  # [batch_size, d_model]
        return output.unsqueeze(0)  # [1, batch_size, d_model]


def plain_attention(
    query: Tensor,  # [batch_size, heads, 1, d_k]
    keys: Tensor,  # [batch_size, heads, k_len, d_k]
    values: Tensor,  # [batch_size, heads, k_len, d_k]
) -> Tensor:
    """Attention in three plain operations."""
    query = query * query.shape[-1] ** -0.5  # [batch_size, heads, 1, d_k]
    weights = (query @ keys.mT).softmax(dim=-1)  # [batch_size, heads, 1, k_len]
    context: Tensor = weights @ values  # [batch_size, heads, 1, d_k]
    return context


def start_bmm(prefix: Prefix) -> Decoder:
    """Plain batched matrix products on a cache with contiguous heads."""
    module = BareKernel(prefix, plain_attention)
    return Decoder(module.reset, module)


def start_sdpa(prefix: Prefix) -> Decoder:
    """The fused kernel on the same cache."""
    module = BareKernel(prefix, F.scaled_dot_product_attention)
    return Decoder(module.reset, module)


def start_cat(prefix: Prefix) -> Decoder:
    """The core module with a cache that `torch.cat` copies to grow, sequence first."""
    core = prefix.core
    cache = {"key": prefix.key, "value": prefix.value}

    def reset() -> None:
        cache.update(key=prefix.key, value=prefix.value)

    def step(
        x: Tensor,  # [1, batch_size, d_model]
    ) -> Tensor:
        query = core.query(x) * core.scale  # [1, batch_size, heads, d_k]
        key = torch.cat([cache["key"], core.key(x)])  # [k_len, ..., heads, d_k]
        value = torch.cat([cache["value"], core.value(x)])  # [k_len, ..., heads, d_k]
        cache.update(key=key, value=value)
        attn = core.get_scores(query, key).softmax(dim=1)  # [1, k_len, ..., heads]
        context = core.apply_weights(attn, value)  # [1, batch_size, heads, d_k]
        output: Tensor = core.output(context.flatten(-2))  # [1, batch_size, d_model]
        return output

    return Decoder(reset, step)


def start_nn(prefix: Prefix) -> Decoder:
    """`nn.MultiheadAttention` without a cache: it projects all tokens each time."""
    module: Any = convert.to(prefix.core, "torch")
    k_len = len(prefix.x)
    text = F.pad(prefix.x, (0, 0, 0, 0, 0, TOKENS))
    state = {"length": k_len}

    def reset() -> None:
        state["length"] = k_len

    def step(
        x: Tensor,  # [1, batch_size, d_model]
    ) -> Tensor:
        text[state["length"]] = x[0]
        state["length"] += 1
        memory = text[: state["length"]]  # [..., batch_size, d_model]
        output: Tensor = module(x, memory, memory, need_weights=False)[0]
        return output  # [1, batch_size, d_model]

    return Decoder(reset, step)


def start_gpt2(prefix: Prefix) -> Decoder:
    """The attention of GPT-2, and the cache that `generate` uses by default."""
    from transformers.cache_utils import DynamicCache

    module: Any = gpt2_module(prefix.core, layer_idx=0)
    key, value = prefix.with_contiguous_heads()
    state: dict[str, Any] = {}

    def reset() -> None:
        state["cache"] = DynamicCache()
        # `update` concatenates, which copies: the prefix stays as it is.
        state["cache"].update(key, value, 0)

    def step(x: Tensor) -> Tensor:
        output: Tensor = module(x, past_key_values=state["cache"])[0]
        return output

    return Decoder(reset, step, batch_first=True)


def start_x_transformers(prefix: Prefix) -> Decoder:
    """The attention of x-transformers, and the cache that it returns."""
    from x_transformers.attend import Intermediates

    module: Any = x_transformers_module(prefix.core, causal=True)
    prefix_kv = prefix.with_contiguous_heads()
    state: dict[str, Any] = {}

    def reset() -> None:
        state["cache"] = Intermediates(cached_kv=prefix_kv)

    def step(x: Tensor) -> Tensor:
        output: Tensor
        output, state["cache"] = module(
            x, cache=state["cache"], return_intermediates=True
        )
        return output

    return Decoder(reset, step, batch_first=True)


DECODERS: dict[str, Callable[[Prefix], Decoder]] = {
    "fast": start_fast,
    "bmm": start_bmm,
    "sdpa": start_sdpa,
    "cat": start_cat,
    "gpt2": start_gpt2,
    "x-transformers": start_x_transformers,
    "nn": start_nn,
}


@torch.inference_mode()
def make_prefix(setting: Setting) -> tuple[Prefix, Tensor, Tensor]:
    r"""The prefix, the tokens to decode, and the reference output for these.

    >>> setting = Setting(2, 5, decoding=True, d_model=77, heads=7)
    >>> prefix, tokens, expected = make_prefix(setting)
    >>> list(prefix.key.shape), list(expected.shape)
    ([5, 2, 7, 11], [8, 2, 77])

    Decoders with a cache of any kind, and `nn` without one, agree:

    >>> for start in (start_bmm, start_sdpa, start_cat, start_nn):
    ...     with torch.inference_mode():
    ...         decoder = start(prefix)
    ...         decoder.reset()
    ...         output = decoder.step(tokens[:1])
    ...     print(output.shape, torch.allclose(output, expected[:1], atol=1e-6))
    torch.Size([1, 2, 77]) True
    torch.Size([1, 2, 77]) True
    torch.Size([1, 2, 77]) True
    torch.Size([1, 2, 77]) True
    """
    core = setting.core().eval()
    k_len = setting.seq_len
    generator = torch.Generator().manual_seed(7)
    sizes = (k_len + TOKENS, setting.batch_size, setting.d_model)
    text = torch.randn(sizes, generator=generator)  # [..., batch_size, d_model]
    text = text.to(**setting.factory_kwargs)  # [..., batch_size, d_model]
    x, tokens = text[:k_len], text[k_len:]  # [..., batch_size, d_model]
    prefix = Prefix(core, x, core.key(x), core.value(x))

    # The reference has the rounded weights and tokens, but computes in float32.
    precise: Any = convert.to(core, "core")
    precise.to(torch.promote_types(setting.dtype, torch.float32))
    text = text.to(precise.output.weight)  # [..., batch_size, d_model]
    # The last rows of a causal mask: a new token may attend to the prefix, and to the
    # new tokens up to itself.
    mask = masks.causal(TOKENS, len(text), device=text.device)  # [8, k_len + 8, 1]
    expected = precise(query=text[k_len:], key=text, value=text, mask=mask)
    return prefix, tokens, expected  # [8, batch_size, d_model]


def decode_tokens(
    decoder: Decoder,
    tokens: Tensor,  # [new, batch_size, d_model]
) -> Tensor:
    r"""Decode all tokens, one after the other, in the layout of the decoder.

    >>> tokens = torch.randn(3, 2, 10)
    >>> for batch_first in (False, True):
    ...     echo = Decoder(lambda: None, lambda x: x, batch_first)
    ...     decode_tokens(echo, tokens).equal(tokens)
    True
    True
    """
    outputs = []
    for n in range(len(tokens)):
        token = tokens[n : n + 1]  # [1, batch_size, d_model]
        if decoder.batch_first:
            token = token.transpose(0, 1)  # [batch_size, 1, d_model]
        outputs.append(decoder.step(token))
    if decoder.batch_first:
        return torch.cat(outputs, dim=1).transpose(0, 1)  # [new, batch_size, d_model]
    return torch.cat(outputs)  # [new, batch_size, d_model]
