# %% [markdown]
# # One computation, five ways
#
# The lessons so far came with classes of their own: other names, another layout, another
# kind of mask. Are these many ideas, or one? There is a sharp test. If they compute the
# same thing, then **one set of weights**, moved from class to class, must give the same
# output in all of them, as exactly as floating point can.
#
# Here are two sentences of six words, as random vectors. The numbers are float64, so
# that there are many digits to agree on.

# %%
import torch
from IPython.display import Markdown, display
from torch import nn

from headnotes import MultiHeadAttention, convert, masks
from headnotes.implementations import batch_first, causal, valid_lens
from headnotes.plots import display_attention

torch.set_grad_enabled(False)  # nothing is trained on this page
torch.manual_seed(5)
words = ["one", "thought", "told", "in", "five", "tongues"]
length, batch_size, d_model, heads = len(words), 2, 16, 4
x = 3 * torch.randn(length, batch_size, d_model, dtype=torch.float64)

# %% [markdown]
# ## Moving the weights
#
# We begin with [the core](../source/mha.md), and let
# [`convert.to`](../source/convert.md) build the other four around its weights. The
# causal one must be told how long a text may become; no weight knows that.

# %%
core = MultiHeadAttention(heads, d_model).double().eval()
systems = {
    "core": core,
    "causal": convert.to(core, "causal", context_length=length),
    "valid_lens": convert.to(core, "valid_lens"),
    "batch_first": convert.to(core, "batch_first"),
    "torch": convert.to(core, "torch"),
}
for name, system in systems.items():
    tensors = dict(system.named_parameters())
    print(f"{name:12}", *[t for t in tensors if t.endswith("weight")])

# %% [markdown]
# Four of them have one matrix for each of query, key, value and output, and differ in
# what they call it. PyTorch's own stacks the first three into one. No matrix has to be
# transposed, and nothing is computed: conversion only says which row goes where. So
# there is a way back, and it ends on the same bits:

# %%
for system in systems.values():
    back = convert.to(system, "core").state_dict()
    assert all(torch.equal(back[t], p) for t, p in core.state_dict().items())
print("five ways there and back, and not a bit has changed")

# %% [markdown]
# ## One question, five dialects
#
# Each word may read itself and what came before it. All five can do that, and each
# wants to be told differently. From each we take the output, as `[batch_size, seq_len,
# d_model]`, and the weights, as `[batch_size, heads, q_len, k_len]`.
#
# **The core** reads sequence first, and takes a bool mask `[q_len, k_len, 1]` in which
# True means *may read*. It keeps its weights, heads last.

# %%
outputs, weights = {}, {}
keep = masks.causal(length)

y = core(query=x, key=x, value=x, mask=keep)
outputs["core"] = y.transpose(0, 1)
weights["core"] = core.attn.permute(2, 3, 0, 1)

# %% [markdown]
# **[The causal class](../source/implementations/causal.md)** reads batch first, as the next two do. It takes no mask, for it
# can do nothing else. Nor does it show its weights; but they all pass through its
# dropout, and there one can listen.

# %%
by_sentence = x.transpose(0, 1)
system = systems["causal"]
system.dropout.register_forward_hook(
    lambda module, inputs, output: weights.update(causal=output)
)
outputs["causal"] = system(by_sentence)

# %% [markdown]
# **[Valid lengths](../source/implementations/valid_lens.md)** count how many of the first words may be read: one for the first
# word, two for the second. Heads are folded into the batch, and so are the weights.

# %%
lens = torch.arange(1, length + 1).expand(batch_size, length)
print(lens)

# %%
system = systems["valid_lens"]
outputs["valid_lens"] = system(by_sentence, by_sentence, by_sentence, lens)
folded = system.attention.attention_weights
weights["valid_lens"] = folded.unflatten(0, (batch_size, heads))

# %% [markdown]
# **[Batch first](../source/implementations/batch_first.md)** takes zeros and ones, `[q_len, k_len]`, and hands its weights back
# with the output.

# %%
ones = torch.ones(length, length).int().tril()
system = systems["batch_first"]
outputs["batch_first"], weights["batch_first"] = system(
    by_sentence, by_sentence, by_sentence, ones
)

# %% [markdown]
# **PyTorch's own** reads sequence first again, unless it was built otherwise, and its
# bool mask has the opposite sense: True means *must not read*. By default it returns
# the mean of its heads.

# %%
blocked = ~keep.squeeze(-1)
y, weights["torch"] = systems["torch"](
    x, x, x, attn_mask=blocked, average_attn_weights=False
)
outputs["torch"] = y.transpose(0, 1)

# %% [markdown]
# ## Do they agree?
#
# Ten pairs, and for each pair the largest difference between any two numbers: **above**
# the diagonal between outputs, **below** it between weights.


# %% fold="How the table is made"
def table(outputs, weights):
    """Largest differences: of outputs above the diagonal, of weights below."""
    rows = [["system", *outputs], ["---", *["---:"] * len(outputs)]]
    for i, a in enumerate(outputs):
        cells = []
        for j, b in enumerate(outputs):
            kind = outputs if i < j else weights
            difference = (kind[a] - kind[b]).abs().max().item()
            text = f"{difference:.0e}" if difference else "0"
            cells.append("·" if i == j else text)
        rows.append([f"**{a}**", *cells])
    return Markdown("\n".join("| " + " | ".join(row) + " |" for row in rows))


def worst(answers):
    """The largest difference between any two of the answers."""
    both = torch.stack(list(answers.values()))
    return (both.amax(dim=0) - both.amin(dim=0)).max().item()


# %%
display(table(outputs, weights))

# %%
largest = max(y.abs().max().item() for y in outputs.values())
print(f"outputs reach {largest:.1f}, and differ by {worst(outputs):.0e}")
print(f"weights reach 1, and differ by {worst(weights):.0e}")
assert worst(outputs) <= 1e-14
assert worst(weights) <= 1e-14

# %% [markdown]
# They agree to the fifteenth digit. What is left is rounding, for a floating-point sum
# depends on its order. A zero says that two of them share even that. And one can look:

# %% alt="Five maps of attention, one for each system. They are the same in every cell: a staircase, zero above the diagonal, with the first row wholly on the first word."
maps = torch.stack([weights[name][0, 1] for name in systems], dim=-1)
_ = display_attention(words, words, maps, titles=list(systems), columns=3)

# %% [markdown]
# One head of one sentence, five times. It is one computation; what differs is names and
# layout.
#
# ## The same seed
#
# It goes further. With all biases switched on, four of the five even *begin* alike.
# They draw their numbers from the same range, in the same order: query, key, value,
# output. Then the same seed makes the same weights.


# %% fold="How the five are made"
def new(name):
    """A fresh system with all its biases, made from the same seed."""
    torch.manual_seed(5)
    if name == "core":
        return MultiHeadAttention(heads, d_model)
    if name == "causal":
        return causal.MultiHeadAttention(
            d_model, d_model, length, 0.1, heads, qkv_bias=True
        )
    if name == "valid_lens":
        lazy = valid_lens.MultiHeadAttention(d_model, heads, 0.1, bias=True)
        # It draws at its first call; in training, dropout would draw, too.
        lazy.eval()(*[torch.zeros(1, 1, d_model)] * 3, None)
        return lazy
    if name == "batch_first":
        return batch_first.MultiHeadAttention(d_model, heads)
    return nn.MultiheadAttention(d_model, heads)


# %%
def learned(module):
    """All that a system would learn, in one long vector."""
    parts = convert.extract(module)[1:]
    return torch.cat([t.flatten() for part in parts for t in part])


first = learned(new("core"))
for name in systems:
    same = torch.equal(learned(new(name)), first)
    print(f"{name:12}", "the same" if same else "other", "weights")
    assert same == (name != "torch")

# %% [markdown]
# PyTorch's own module draws the output matrix first, then the other three at once, from
# another range, and lets its biases begin at zero. Its *output* is therefore what the
# others have as *query*:

# %%
theirs, ours = convert.extract(new("torch")), convert.extract(new("core"))
assert torch.equal(theirs.output.weight, ours.query.weight)
assert all(not part.bias.any() for part in theirs[1:])

# %% [markdown]
# The four agree only while all their biases are there. A class without some of them
# draws fewer numbers, and all that follow are others.
#
# ## What weights do not carry
#
# A layout and a mask come with each call, and there conversion cannot help. Take the
# core's mask and hand it to PyTorch's module as it is. Both are bool, both have the
# right shape, nobody complains:

# %%
inverted = keep.squeeze(-1)
y, _ = systems["torch"](x, x, x, attn_mask=inverted, need_weights=False)
assert torch.equal(y[-1], systems["torch"].out_proj.bias.expand_as(y[-1]))
difference = (y.transpose(0, 1) - outputs["core"]).abs().max().item()
print(f"largest difference: {difference:.1f}")
assert difference > 0.1

# %% [markdown]
# Each word has now read only what follows it, and the last one nothing at all. (Had we
# asked for the weights, `need_weights=True`, its row would have been NaN, and somebody
# might have noticed.) Such an error trains without a sound, and looks like a model that
# learns well: it sees the word that it is asked for. So whenever you change classes, do
# what this page did: convert the weights, ask both the same question, and look at the
# largest difference.
#
# ## Try it
#
# Let the four heads of the core change places: reorder the rows of its query, key and
# value by head. The output is no longer the same. What else must move so that it is?

# %% fold="What else must move"
order = torch.tensor([2, 0, 3, 1])
d_k = d_model // heads
rows = torch.arange(d_model).view(heads, d_k)[order].flatten()  # head by head
moved = convert.to(core, "core")
for projection in (moved.query, moved.key, moved.value):
    projection.linear.weight.copy_(projection.linear.weight[rows])
    projection.linear.bias.copy_(projection.linear.bias[rows])
before = core(query=x, key=x, value=x, mask=keep)
y = moved(query=x, key=x, value=x, mask=keep)
print(f"only query, key, value: {(y - before).abs().max():.1f}")
assert (y - before).abs().max() > 0.1

# A head's rows write what the same columns of the output matrix read.
moved.output.weight.copy_(moved.output.weight[:, rows])
y = moved(query=x, key=x, value=x, mask=keep)
print(f"and the output's columns: {(y - before).abs().max():.0e}")
assert (y - before).abs().max() <= 1e-14
assert (moved.attn - core.attn[..., order]).abs().max() <= 1e-14

# %% [markdown]
# The columns of the output matrix go along with the rows that they read. Its own rows,
# and its bias, stay. Heads have no order: "head 3" is a place in memory, not a meaning.
