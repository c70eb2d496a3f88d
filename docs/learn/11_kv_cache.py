# %% [markdown]
# # The cost of a token: the KV cache
#
# A language model generates one token at a time. The KV cache stores the keys and values
# of all earlier tokens, so that a step computes only those of the new one. This lesson is
# for readers who want to know what a generated token costs: it counts the operations that
# the cache saves, computes its size for ten published models, and measures how the time
# of a step grows with the size of the cache. You need [causal
# self-attention](03_causal_self_attention.md) and [sequence-first attention with
# einsum](08_sequence_first_with_einsum.md). Reading time: 15 minutes.

# %%
import torch
from IPython.display import Markdown, display
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from headnotes import fast

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(11)
length, batch_size, heads, d_model = 97, 2, 4, 64
attention = fast.MultiHeadAttention(heads, d_model).eval()
x = torch.randn(length, batch_size, d_model)

# %% [markdown]
# ## Generate without and with a cache
#
# Without a cache, each new token means a causal pass over the whole sequence so far, of
# which only the last output is needed. With a cache, the new token is projected, its key
# and value are appended, and its query attends to all stored keys. The outputs are equal,
# because a causal mask hides later tokens: the keys and values of a token never change.


# %%
def without_cache():
    outputs = []
    for n in range(1, length + 1):
        so_far = x[:n]
        output = attention(query=so_far, key=so_far, value=so_far, is_causal=True)
        outputs.append(output[-1:])
    return torch.cat(outputs)


def with_cache():
    cache = attention.cache(batch_size, capacity=length)
    outputs = []
    for token in x.split(1):
        output, cache = attention.decode(token, cache)
        outputs.append(output)
    return torch.cat(outputs)


def flops(call):
    """The floating-point operations of all matrix products in a call."""
    # The counter does not know the fused kernel for CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = call()
    return output, counter.get_total_flops()


slow, many = flops(without_cache)
quick, few = flops(with_cache)
torch.testing.assert_close(quick, slow)
print(f"without a cache: {many / 1e6:7.1f} million operations")
print(f"with a cache:    {few / 1e6:7.1f} million operations")
print(f"{many / few:.0f} times fewer")

# %% [markdown]
# Let $n$ be the length and $d$ `d_model`. One step with a cache projects one token, $8 d^2$
# operations for the four projections (a multiplication and an addition each), and attends
# to at most $n$ keys, $4 n d$. The whole sequence costs in the order of $n d^2 + n^2 d$.
# Without a cache, each step does the work of all steps before it again: $n^2 d^2 + n^3 d$.
# With a cache, the formula gives the counted number exactly:

# %%
projections = 8 * d_model**2 * length * batch_size
products = sum(4 * n * d_model * batch_size for n in range(1, length + 1))
assert few == projections + products
print(f"{projections / 1e6:.1f} + {products / 1e6:.1f} million")

# %% [markdown]
# ## Prefill and decoding
#
# The prompt is known at once. So its keys and values are computed in one pass, the
# *prefill*, which is limited by arithmetic. Only the tokens that follow are decoded one by
# one. However a sequence is split, the outputs are the same:

# %%
cache = attention.cache(batch_size, capacity=length)
pieces = []
for piece in x.split([61, 1, 1, 34]):
    output, cache = attention.decode(piece, cache)
    pieces.append(output)
torch.testing.assert_close(torch.cat(pieces), slow)
print(len(cache), "positions stored:", list(cache.keys.shape))

# %% [markdown]
# ## The size of the cache in bytes
#
# Each layer stores one key and one value per token and key-value head:
#
# $$\text{bytes per token} = 2 \cdot \text{layers} \cdot \text{key-value heads} \cdot d_k
#   \cdot \text{bytes per number}$$
#
# Nothing in this formula is the number of *query* heads. Multi-query attention (MQA)
# shares one key-value head among all query heads, [grouped-query
# attention](../source/variants/grouped_query.md) (GQA) shares each among a group of them.
# Multi-head latent attention (MLA) stores one latent vector
# per token and layer instead, from which the keys and values of all heads are computed,
# and one rotated key. A sliding window keeps the keys of the last tokens only, in the
# layers that have one. Here are ten models, with the settings that their authors
# published, in 16-bit numbers:

# %%
# layers, query heads, key-value heads, d_k, window and number of layers that have one
PUBLISHED = {
    "GPT-2 (124M)": (12, 12, 12, 64, None, 0),
    "GPT-NeoX-20B": (44, 64, 64, 96, None, 0),
    "Llama 7B": (32, 32, 32, 128, None, 0),
    "Phi-3-mini": (32, 32, 32, 96, None, 0),
    "Falcon-7B": (32, 71, 1, 64, None, 0),
    "StarCoder2-3B": (30, 24, 2, 128, 4096, 30),
    "Mistral 7B": (32, 32, 8, 128, 4096, 32),
    "Gemma 2 2B": (26, 8, 4, 256, 4096, 13),
    "gpt-oss-120b": (36, 64, 8, 64, 128, 18),
}
# layers, query heads, widths of the latent vector and of the rotated key
LATENT = {"DeepSeek-V3": (61, 128, 512 + 64)}
BYTES = 2


def kind(heads, kv_heads):
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"


def cached(tokens, layers, kv_heads, d_k, window, windowed):
    """Bytes of the cache after so many tokens."""
    full = (layers - windowed) * tokens
    band = windowed * min(tokens, window or tokens)
    return 2 * kv_heads * d_k * BYTES * (full + band)


rows = []
for name, (layers, heads, kv_heads, d_k, window, windowed) in PUBLISHED.items():
    settings = layers, kv_heads, d_k, window, windowed
    what = kind(heads, kv_heads)
    if windowed:
        what += f", window {window:,} in {windowed} of {layers} layers"
    rows.append((name, what, cached(1, *settings), cached(32_768, *settings)))
for name, (layers, _, width) in LATENT.items():
    one = layers * width * BYTES
    rows.append((name, "MLA", one, 32_768 * one))

rows.sort(key=lambda row: row[2])
table = [
    "|model|keys and values|KB per token|GB after 32,768 tokens|",
    "|---|---|--:|--:|",
]
table += [f"|{n}|{w}|{one / 1e3:,.1f}|{all_ / 1e9:,.2f}|" for n, w, one, all_ in rows]
display(Markdown("\n".join(table)))

# %% [markdown]
# (GPT-2 and some others were trained with fewer than 32,768 positions; the column compares
# their designs.) DeepSeek-V3 has 128 query heads in 61 layers. With the keys of 128 + 64 and
# the values of 128 numbers that each of its heads uses, plain multi-head attention would
# store:

# %%
layers, query_heads, width = LATENT["DeepSeek-V3"]
plain = layers * query_heads * (128 + 64 + 128) * BYTES
print(
    f"{plain / 1e6:.1f} MB per token, {plain / (layers * width * BYTES):.0f} times as much"
)

# %% [markdown]
# ## The time of a decoding step grows with what it reads
#
# For one query, each stored number is used in one multiplication and one addition. A
# processor computes faster than its memory delivers, so reading the cache takes most of the
# time of a step. With more query heads per key-value head, each number that was read is
# used more often, at little further cost. We measure the attention of one token over 8,192
# stored positions: 32 query heads of Llama's width, and 32, 8, 4 or 1 key-value heads. The
# calls take turns, and the shortest time of each counts.

# %%
from time import perf_counter

q_heads, k_len, d_k = 32, 8192, 128


def step(kv_heads):
    """Attention of one token: the queries of a group share their keys and values."""
    query = torch.randn(1, kv_heads, q_heads // kv_heads, d_k)
    keys, values = torch.randn(2, 1, kv_heads, k_len, d_k)
    return lambda: scaled_dot_product_attention(query, keys, values)


steps = {kv_heads: step(kv_heads) for kv_heads in (32, 8, 4, 1)}
times = dict.fromkeys(steps, float("inf"))
for _ in range(12):
    for kv_heads, call in steps.items():
        start = perf_counter()
        call()
        times[kv_heads] = min(times[kv_heads], perf_counter() - start)

rows = ["|key-value heads|MB read|ms|GB/s|", "|--:|--:|--:|--:|"]
for kv_heads, seconds in times.items():
    size = 2 * kv_heads * k_len * d_k * 4
    rows.append(
        f"|{kv_heads}|{size / 1e6:.1f}|{seconds * 1e3:.2f}|{size / seconds / 1e9:.1f}|"
    )
display(Markdown("\n".join(rows)))
assert times[32] > 2 * times[8]
assert times[32] > 4 * times[1]

# %% alt="Time of a step over the megabytes that it reads, for 1, 4, 8 and 32 key-value heads: the points lie near a straight line."
import matplotlib.pyplot as plt

figure, ax = plt.subplots(figsize=(4.8, 2.6))
sizes = {kv_heads: 2 * kv_heads * k_len * d_k * 4 / 1e6 for kv_heads in times}
ax.plot(sizes.values(), [1e3 * seconds for seconds in times.values()], "o-")
for kv_heads, seconds in times.items():
    ax.annotate(
        f"{kv_heads}",
        (sizes[kv_heads], 1e3 * seconds),
        (0, 6),
        textcoords="offset points",
    )
ax.set(xlabel="MB read (numbers: key-value heads)", ylabel="ms", xlim=0, ylim=0)
plt.show()

# %% [markdown]
# The arithmetic is the same in all four cases, as there are always 32 query heads. What
# differs is how much is read. The times were measured on the processor that built this
# page. A GPU is faster, but its step is limited by memory as well.
#
# A step also reads the weights of the model. A server decodes many sequences at once, so
# that the weights are read once for all of them. But each sequence has its own cache, whose
# size limits how many fit.
#
# ## Try it: how many sequences fit?
#
# A GPU has 24 GB, and the weights of Mistral 7B take 14.5 GB of them. How many sequences of
# 8,192 tokens can be decoded at once, with its window of 4,096 and without?


# %% fold="Answer"
room = 24e9 - 14.5e9
layers, _, kv_heads, d_k, window, windowed = PUBLISHED["Mistral 7B"]
with_window = cached(8192, layers, kv_heads, d_k, window, windowed)
without = cached(8192, layers, kv_heads, d_k, None, 0)
print(int(room // with_window), "with the window,", int(room // without), "without")
assert without == 2 * with_window

# %% [markdown]
# ## In short
#
# - With a KV cache, a generated token costs one projection and one row of attention;
#   without, a pass over the whole sequence. The outputs are the same.
# - The cache grows with layers, key-value heads, `d_k`, length and batch size, and not with
#   query heads. GQA, MQA, MLA and sliding windows make it smaller.
# - The time of a decoding step grows with what it reads. Fewer key-value heads make it
#   faster, although the arithmetic is the same.
# - [The KV cache of the fast module](../source/fast/module.md#KeyValueCache) is
#   preallocated, with its heads contiguous in memory.
#
# Next: [position encodings](12_position_encodings.md), compared on one task.
