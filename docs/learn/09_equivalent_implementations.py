# %% [markdown]
# # Equivalent implementations
#
# The lessons so far used several attention classes, with different parameter names,
# layouts and mask conventions. This lesson shows that five of them, PyTorch's own among
# them, compute the same function: it moves **one set of weights** from class to class,
# calls each in its own convention, and compares the outputs and attention weights. You
# need [padding masks](06_padding_masks.md) and [sequence-first
# attention](08_sequence_first_with_einsum.md). Reading time: 10 minutes.
#
# The input consists of two sequences of six random vectors. They are float64, so that
# a real difference cannot hide behind rounding.

# %%
import torch
from IPython.display import Markdown, display
from torch import nn

from headnotes import MultiHeadAttention, convert, masks
from headnotes.implementations import batch_first, causal, valid_lens
from headnotes.plots import display_attention

torch.set_grad_enabled(False)  # nothing is trained on this page
torch.manual_seed(5)
words = ["one", "function", "in", "five", "different", "notations"]
length, batch_size, d_model, heads = len(words), 2, 16, 4
x = 3 * torch.randn(length, batch_size, d_model, dtype=torch.float64)

# %% [markdown]
# ## Convert weights between implementations
#
# We create [the core module](../source/mha.md), and
# [`convert.to`](../source/convert.md) builds the other four with its weights. The
# causal class also needs the longest sequence length that it will accept, which no
# weight determines.

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
    parameters = dict(system.named_parameters())
    print(f"{name:12}", *[p for p in parameters if p.endswith("weight")])

# %% [markdown]
# Four of them have one matrix each for query, key, value and output, under different
# names. PyTorch's module stacks the first three in one matrix. Conversion transposes
# nothing and computes nothing; it only copies rows. So converting back returns exactly
# the same weights, bit for bit:

# %%
for system in systems.values():
    back = convert.to(system, "core").state_dict()
    assert all(torch.equal(back[name], p) for name, p in core.state_dict().items())
print("all five: converted back, every weight is bit-identical")

# %% [markdown]
# ## Call each implementation: layouts and masks
#
# All five compute causal self-attention, each with its own arguments. From each we take
# the output as `[batch_size, seq_len, d_model]`, and the attention weights as
# `[batch_size, heads, q_len, k_len]`.
#
# **[The core module](../source/mha.md)** is sequence first and takes a bool mask
# `[q_len, k_len, 1]`, in which True means that the query *may* attend to the key. It
# keeps its weights in `attn`, with heads as the last axis.

# %%
outputs, weights = {}, {}
keep = masks.causal(length)

y = core(query=x, key=x, value=x, mask=keep)
outputs["core"] = y.transpose(0, 1)
weights["core"] = core.attn.permute(2, 3, 0, 1)

# %% [markdown]
# **[The causal class](../source/implementations/causal.md)** is batch first, as are the
# next two. It takes no mask, because it is always causal. It does not return its
# weights, but they pass through its dropout module, where a forward hook can record
# them.

# %%
x_batch_first = x.transpose(0, 1)
system = systems["causal"]
system.dropout.register_forward_hook(
    lambda module, inputs, output: weights.update(causal=output)
)
outputs["causal"] = system(x_batch_first)

# %% [markdown]
# **[Valid lengths](../source/implementations/valid_lens.md)** give the number of keys,
# from the first on, that each query may attend to: one for the first query, two for the
# second. The heads are flattened into the batch, and so are the weights.

# %%
lens = torch.arange(1, length + 1).expand(batch_size, length)
print(lens)

# %%
system = systems["valid_lens"]
outputs["valid_lens"] = system(x_batch_first, x_batch_first, x_batch_first, lens)
flat = system.attention.attention_weights
weights["valid_lens"] = flat.unflatten(0, (batch_size, heads))

# %% [markdown]
# **[Batch first](../source/implementations/batch_first.md)** takes a mask of zeros and
# ones, `[q_len, k_len]`, in which 1 means *may attend*. It returns its weights beside
# the output.

# %%
ones = torch.ones(length, length).int().tril()
system = systems["batch_first"]
outputs["batch_first"], weights["batch_first"] = system(
    x_batch_first, x_batch_first, x_batch_first, ones
)

# %% [markdown]
# **[`torch.nn.MultiheadAttention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html)**
# is sequence first unless it was built with `batch_first=True`. Its bool mask has the
# opposite polarity: True means *may not attend*. By default it averages the weights
# over the heads.

# %%
blocked = ~keep.squeeze(-1)
y, weights["torch"] = systems["torch"](
    x, x, x, attn_mask=blocked, average_attn_weights=False
)
outputs["torch"] = y.transpose(0, 1)

# %% [markdown]
# ## Compare outputs and attention weights
#
# For each of the ten pairs, the table shows the largest absolute difference: of outputs
# **above** the diagonal, of attention weights **below** it.


# %% fold="Code of the table"
def table(outputs, weights):
    """Largest differences: of outputs above the diagonal, of weights below."""
    rows = [["implementation", *outputs], ["---", *["---:"] * len(outputs)]]
    for i, a in enumerate(outputs):
        cells = []
        for j, b in enumerate(outputs):
            compared = outputs if i < j else weights
            difference = (compared[a] - compared[b]).abs().max().item()
            text = f"{difference:.0e}" if difference else "0"
            cells.append("·" if i == j else text)
        rows.append([f"**{a}**", *cells])
    return Markdown("\n".join("| " + " | ".join(row) + " |" for row in rows))


def worst(results):
    """The largest difference between any two of the results."""
    stacked = torch.stack(list(results.values()))
    return (stacked.amax(dim=0) - stacked.amin(dim=0)).max().item()


# %%
display(table(outputs, weights))

# %%
largest = max(y.abs().max().item() for y in outputs.values())
print(f"largest output: {largest:.1f}, largest difference: {worst(outputs):.0e}")
print(f"largest weight: 1, largest difference: {worst(weights):.0e}")
assert worst(outputs) <= 1e-14
assert worst(weights) <= 1e-14

# %% [markdown]
# All differences are at most $10^{-14}$, which is checked each time this page is built.
# They are rounding: a floating-point sum depends on the order of its terms, and the
# five classes call different kernels. A 0 in the table means that two classes agree bit
# for bit on the machine that built this page; on another CPU, they may differ in the
# last bits. The weights are the same in a plot as well:

# %% alt="Five heat maps of causal attention weights, one per implementation. They are the same in every cell: zero above the diagonal, and the first query has all of its weight on the first key."
maps = torch.stack([weights[name][0, 1] for name in systems], dim=-1)
_ = display_attention(words, words, maps, titles=list(systems), columns=3)

# %% [markdown]
# These are the weights of one head and one sequence in all five classes. They compute
# the same function; the names and layouts differ.
#
# ## Same seed, same initial weights
#
# With all biases, four of the five also *initialize* alike. They sample from the same
# uniform distribution in the same order: query, key, value, output. So the same seed
# gives the same weights, bit for bit.


# %% fold="Code that builds the five"
def new(name):
    """A new module with all biases, made from the same seed."""
    torch.manual_seed(5)
    if name == "core":
        return MultiHeadAttention(heads, d_model)
    if name == "causal":
        return causal.MultiHeadAttention(
            d_model, d_model, length, 0.1, heads, qkv_bias=True
        )
    if name == "valid_lens":
        lazy = valid_lens.MultiHeadAttention(d_model, heads, 0.1, bias=True)
        # Its first call initializes the weights. In training mode, dropout would
        # take random numbers too.
        lazy.eval()(*[torch.zeros(1, 1, d_model)] * 3, None)
        return lazy
    if name == "batch_first":
        return batch_first.MultiHeadAttention(d_model, heads)
    return nn.MultiheadAttention(d_model, heads)


# %%
def all_parameters(module):
    """All weights and biases in one vector, in the same order for each class."""
    parts = convert.extract(module)[1:]
    return torch.cat([t.flatten() for part in parts for t in part])


expected = all_parameters(new("core"))
for name in systems:
    same = torch.equal(all_parameters(new(name)), expected)
    print(f"{name:12}", "the same" if same else "other", "weights")
    assert same == (name != "torch")

# %% [markdown]
# `torch.nn.MultiheadAttention` initializes the output matrix first, then the other
# three as one matrix and from another interval, and its biases with zeros. Its *output*
# weights therefore equal the *query* weights of the others:

# %%
theirs, ours = convert.extract(new("torch")), convert.extract(new("core"))
assert torch.equal(theirs.output.weight, ours.query.weight)
assert all(not part.bias.any() for part in theirs[1:])

# %% [markdown]
# The four agree only if all of them have all biases. A class without some biases takes
# fewer random numbers, so all later weights differ.
#
# ## Common mistake: a mask of the opposite polarity
#
# Layout and mask are arguments of each call, so converting the weights does not convert
# them. Suppose we pass the core module's mask to PyTorch's module unchanged. Both masks
# are bool and have the right shape, so there is no error:

# %%
inverted = keep.squeeze(-1)
y, _ = systems["torch"](x, x, x, attn_mask=inverted, need_weights=False)
assert torch.equal(y[-1], systems["torch"].out_proj.bias.expand_as(y[-1]))
difference = (y.transpose(0, 1) - outputs["core"]).abs().max().item()
print(f"largest difference: {difference:.1f}")
assert difference > 0.1

# %% [markdown]
# Each token now attends only to the tokens after it, and the last row is fully masked:
# its output is the output bias. (With `need_weights=True` the row would be NaN, which
# is easier to notice.) A model with this mistake trains without an error, and its
# training loss looks good, because each position can see the token that it has to
# predict. So whenever you replace one class by another, do what this page does: convert
# the weights, call both with the same input, and look at the largest difference.
#
# ## Try it: permute the heads
#
# Permute the four heads of the core module: reorder the rows of its query, key and
# value weights by head. The output changes. What else has to be permuted so that it
# does not?

# %% fold="Answer"
order = torch.tensor([2, 0, 3, 1])
d_k = d_model // heads
rows = torch.arange(d_model).view(heads, d_k)[order].flatten()  # head by head
permuted = convert.to(core, "core")
for projection in (permuted.query, permuted.key, permuted.value):
    projection.linear.weight.copy_(projection.linear.weight[rows])
    projection.linear.bias.copy_(projection.linear.bias[rows])
before = core(query=x, key=x, value=x, mask=keep)
y = permuted(query=x, key=x, value=x, mask=keep)
print(f"query, key and value only:  {(y - before).abs().max():.1f}")
assert (y - before).abs().max() > 0.1

# The columns of the output weight that multiply a head must move with it.
permuted.output.weight.copy_(permuted.output.weight[:, rows])
y = permuted(query=x, key=x, value=x, mask=keep)
print(f"and the output's columns:   {(y - before).abs().max():.0e}")
# Up to rounding: whether it is bit-exact depends on the CPU's kernels.
assert (y - before).abs().max() <= 1e-14
assert (permuted.attn - core.attn[..., order]).abs().max() <= 1e-14

# %% [markdown]
# The columns of the output weight must be permuted like the heads; its rows and its
# bias stay. So the order of the heads has no meaning: "head 3" is a position in memory.
#
# ## In short
#
# - Five classes with the same weights compute the same function: outputs and attention
#   weights differ by at most $10^{-14}$ in float64.
# - Converting weights is bit-exact; computing with them is not, since the order of
#   floating-point sums differs between kernels and CPUs.
# - Layout, mask format and mask polarity are not part of the weights. An inverted mask
#   raises no error.
# - With all biases, the same seed initializes four of the five alike; PyTorch's module
#   uses another order and interval.
#
# [How implementations differ](../compare/differences.md) has all conventions side by
# side; the [equivalence matrix](../compare/equivalence.md) compares gradients too.
#
# Next: the five compute the same, but not equally fast. [Profiling the reference
# implementation](10_profiling_the_reference_implementation.md) shows why.
