r"""# Decoders

A language model writes one token at a time. The token's query reads all keys before it,
and these do not change: so they are kept. Here a *decoder* has such a cache, filled
with the keys and values of a long text, and is handed one token of each sentence at a
time. What is timed is a whole step: projections, the cache, attention, and the output
projection.

What can be kept, and how, is where decoders differ. `nn` keeps nothing but the text,
and projects all of it again. `cat`, `gpt2` and `x-transformers` grow their cache by
copying it into a larger one. The others have room in advance, and write in place: `bmm`
and `sdpa` are the bare kernels on a cache that lies head by head, the two fastest ways
that are known here, for the rest to be measured against.

Before each turn the cache is as long as before the last. All are judged by the readable
page, asked for the same tokens at once.

Source: [Efficiently Scaling Transformer
Inference](https://arxiv.org/abs/2211.05102), Pope et al. 2022, section 3.3, on why the
bytes of the cache are what a step costs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_bench.peers import build_gpt2, build_x_transformers
from attention_bench.setting import Setting
from headnotes import convert, masks, mha

# How many tokens are decoded in a turn.
TOKENS = 8


@dataclass
class Prefix:
    """The text so far, and its keys and values, of the same weights for all.

    `x` is `[k_len, batch_size, d_model]`, the others `[k_len, batch_size, heads, d_k]`.
    """

    ours: mha.MultiHeadAttention
    x: Tensor
    key: Tensor
    value: Tensor

    @property
    def head_major(self) -> tuple[Tensor, Tensor]:
        """Keys and values head by head: `[batch_size, heads, k_len, d_k]`."""
        key, value = (part.permute(1, 2, 0, 3) for part in (self.key, self.value))
        return key.contiguous(), value.contiguous()


@dataclass
class Decoder:
    """A cache set back by `reset`, and a `step` for one token of each sentence.

    A step takes and returns `[1, batch_size, d_model]`, or batch first.
    """

    reset: Callable[[], object]
    step: Callable[[Tensor], Tensor]
    batch_first: bool = False


def fast(prefix: Prefix) -> Decoder:
    """The fast module of this house, and its preallocated cache."""
    from headnotes import fast

    k_len, batch_size, d_model = prefix.x.shape
    module = fast.MultiHeadAttention(prefix.ours.heads, d_model, 0.0)
    module.to(prefix.x).load_state_dict(prefix.ours.state_dict())
    module.eval()
    cache: Any = module.cache(batch_size, k_len + TOKENS)
    cache.append(prefix.key, prefix.value)

    def reset() -> None:
        cache.length = k_len

    return Decoder(reset, lambda x: module.decode(x, cache)[0])


class HeadMajor(nn.Module):
    """Bare kernels: a cache head by head, with room for what is to come."""

    def __init__(self, prefix: Prefix, kernel: Callable[..., Tensor]) -> None:
        super().__init__()
        fused: Any = convert.to(prefix.ours, "fused", order="3 heads d_k")
        self.qkv, self.output, self.kernel = fused.qkv, fused.output, kernel
        self.heads, self.k_len = prefix.ours.heads, len(prefix.x)
        key, value = prefix.head_major
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
        keys, values = (t[:, :, : self.length] for t in (self.keys, self.values))
        context = self.kernel(query, keys, values)  # [batch_size, heads, 1, d_k]
        output: Tensor = self.output(context.flatten(1))  # [batch_size, d_model]
        return output.unsqueeze(0)  # [1, batch_size, d_model]


def products(
    query: Tensor,  # [batch_size, heads, 1, d_k]
    keys: Tensor,  # [batch_size, heads, k_len, d_k]
    values: Tensor,  # [batch_size, heads, k_len, d_k]
) -> Tensor:
    """Attention in three calls, as one writes it first."""
    query = query * query.shape[-1] ** -0.5  # [batch_size, heads, 1, d_k]
    weights = (query @ keys.mT).softmax(dim=-1)  # [batch_size, heads, 1, k_len]
    context: Tensor = weights @ values  # [batch_size, heads, 1, d_k]
    return context


def bmm(prefix: Prefix) -> Decoder:
    """Plain batched products on a cache that lies head by head."""
    module = HeadMajor(prefix, products)
    return Decoder(module.reset, module)


def sdpa(prefix: Prefix) -> Decoder:
    """The fused kernel on the same cache."""
    module = HeadMajor(prefix, F.scaled_dot_product_attention)
    return Decoder(module.reset, module)


def cat(prefix: Prefix) -> Decoder:
    """The readable page with a cache that is copied to grow, sequence first."""
    ours, kept = prefix.ours, {"key": prefix.key, "value": prefix.value}

    def reset() -> None:
        kept.update(key=prefix.key, value=prefix.value)

    def step(
        x: Tensor,  # [1, batch_size, d_model]
    ) -> Tensor:
        query = ours.query(x) * ours.scale  # [1, batch_size, heads, d_k]
        key = torch.cat([kept["key"], ours.key(x)])  # [k_len, ..., heads, d_k]
        value = torch.cat([kept["value"], ours.value(x)])  # [k_len, ..., heads, d_k]
        kept.update(key=key, value=value)
        attn = ours.get_scores(query, key).softmax(dim=1)  # [1, k_len, ..., heads]
        context = ours.apply_weights(attn, value)  # [1, batch_size, heads, d_k]
        output: Tensor = ours.output(context.flatten(-2))  # [1, batch_size, d_model]
        return output

    return Decoder(reset, step)


def nn_again(prefix: Prefix) -> Decoder:
    """PyTorch's module, which has no cache: it projects the whole text each time."""
    module: Any = convert.to(prefix.ours, "torch")
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


def gpt2(prefix: Prefix) -> Decoder:
    """The attention of GPT-2, and the cache that `generate` uses by default."""
    from transformers.cache_utils import DynamicCache

    module: Any = build_gpt2(prefix.ours, layer_idx=0)
    key, value = prefix.head_major
    state: dict[str, Any] = {}

    def reset() -> None:
        state["cache"] = DynamicCache()
        # Concatenated to nothing, which copies: what follows cannot change the prefix.
        state["cache"].update(key, value, 0)

    def step(x: Tensor) -> Tensor:
        output: Tensor = module(x, past_key_values=state["cache"])[0]
        return output

    return Decoder(reset, step, batch_first=True)


def x_transformers(prefix: Prefix) -> Decoder:
    """The attention of x-transformers, and the cache that it returns."""
    from x_transformers.attend import Intermediates

    module: Any = build_x_transformers(prefix.ours, causal=True)
    state: dict[str, Any] = {}

    def reset() -> None:
        state["cache"] = Intermediates(cached_kv=prefix_kv)

    prefix_kv = prefix.head_major

    def step(x: Tensor) -> Tensor:
        output: Tensor
        output, state["cache"] = module(
            x, cache=state["cache"], return_intermediates=True
        )
        return output

    return Decoder(reset, step, batch_first=True)


DECODERS: dict[str, Callable[[Prefix], Decoder]] = {
    "fast": fast,
    "bmm": bmm,
    "sdpa": sdpa,
    "cat": cat,
    "gpt2": gpt2,
    "x-transformers": x_transformers,
    "nn": nn_again,
}


@torch.inference_mode()
def prefix_of(setting: Setting) -> tuple[Prefix, Tensor, Tensor]:
    r"""The text so far, the tokens to come, and what the judge says to these.

    >>> setting = Setting(2, 5, decoding=True, d_model=77, heads=7)
    >>> prefix, tokens, right = prefix_of(setting)
    >>> list(prefix.key.shape), list(right.shape)
    ([5, 2, 7, 11], [8, 2, 77])

    All that have a cache of their own, and `nn`, which has none, say the same:

    >>> for start in (bmm, sdpa, cat, nn_again):
    ...     with torch.inference_mode():
    ...         decoder = start(prefix)
    ...         decoder.reset()
    ...         said = decoder.step(tokens[:1])
    ...     print(said.shape, torch.allclose(said, right[:1], atol=1e-6))
    torch.Size([1, 2, 77]) True
    torch.Size([1, 2, 77]) True
    torch.Size([1, 2, 77]) True
    torch.Size([1, 2, 77]) True
    """
    ours = setting.core().eval()
    k_len = setting.seq_len
    draw = torch.Generator().manual_seed(7)
    sizes = (k_len + TOKENS, setting.batch_size, setting.d_model)
    text = torch.randn(sizes, generator=draw)  # [..., batch_size, d_model]
    text = text.to(**setting.like)  # [..., batch_size, d_model]
    x, tokens = text[:k_len], text[k_len:]  # [..., batch_size, d_model]
    prefix = Prefix(ours, x, ours.key(x), ours.value(x))

    better: Any = convert.to(ours, "core")
    better.to(torch.promote_types(setting.dtype, torch.float32))
    text = text.to(better.output.weight)  # [..., batch_size, d_model]
    # The last rows of a causal mask: a new token reads the text, and new ones up to it.
    keep = masks.causal(TOKENS, len(text), device=text.device)  # [8, k_len + 8, 1]
    right = better(query=text[k_len:], key=text, value=text, mask=keep)
    return prefix, tokens, right  # [8, batch_size, d_model]
