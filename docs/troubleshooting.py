# %% [markdown]
# # Troubleshooting attention
#
# This page leads from a symptom of an attention module, yours or that of a library, to
# its usual causes. Each entry names the [laws](compare/laws.md) that test for it, real
# [bugs](compare/museum.md) with this symptom, and code that is right. If you do not know
# where to begin, run all laws ([installation](install.md)):
#
# ```console
# $ headnotes check my_model.py:MyAttention
# ```
#
# Below, a mask is True where a query may attend to a key, and its axes are
# `[q_len, k_len, batch_size]`. The [notation](notation.md) has the axes of other libraries.

# %% hide="true"
import math
import sys

sys.path.insert(0, "..")

import museum
import torch
from IPython.display import Markdown, display
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention_laws import LAWS
from headnotes import MultiHeadAttention, convert, masks


def link_to_law(name):
    """A link to the source of a law."""
    page = LAWS[name].test.__module__.removeprefix("attention_laws.")
    url = f"source/attention_laws/{page}.md#{name}"
    return f"[{name.replace('_', ' ')}]({url})"


def link_to_exhibit(name, laws):
    """A link to an exhibit, which must violate one of the laws of its entry."""
    exhibit = museum.read_exhibit(name)
    assert exhibit.law in laws, name
    return f"[{exhibit.title}](compare/museum.md#{name})"


def show(laws, exhibits, code):
    """The last lines of an entry: how to test for it, examples, and correct code."""
    lines = [f"- **Code**: {code}."]
    if exhibits:
        links = "; ".join(link_to_exhibit(name, laws) for name in exhibits)
        lines.insert(0, f"- **Examples**: {links}.")
    if laws:
        lines.insert(0, f"- **Laws**: {', '.join(map(link_to_law, laws))}.")
    display(Markdown("\n".join(lines)))


# %% [markdown]
# ## The output is NaN
#
# The usual cause is a fully masked row: the softmax of $-\infty$ in all places is
# $0 / 0$. Look for one with `~mask.any(dim=1)`. Padding that holds NaN is the second
# cause, since a weight of zero does not remove it; overflow [in
# float16](#float16-overflows) is the third. `torch.autograd.set_detect_anomaly(True)`
# makes the backward pass stop at the first operation whose gradient is NaN.

# %% hide="true"
assert torch.full((3,), -math.inf).softmax(dim=0).isnan().all()
assert (torch.zeros(1) * torch.nan).isnan().all()
full = nn.MultiheadAttention(6, 2)
x = torch.randn(3, 1, 6)
assert full(x, x, x, attn_mask=torch.ones(3, 3).bool())[0].isnan().all()
show(
    ["fully_masked_rows", "nonfinite_padding", "large_scores"],
    ["row_of_nan", "fill_beyond_half"],
    "[`masked_softmax`](source/mha.md#masked_softmax), explained in [padding "
    "masks](learn/06_padding_masks.md#fully-masked-rows-an-empty-sequence)",
)

# %% [markdown]
# ## The loss falls too fast (the model sees the future)
#
# The training loss is better than that of comparable models, and the generated text is
# bad. The causal mask is inverted, missing, or misplaced by a wrong merge of the heads;
# or the targets are not shifted by one token, so that each input is its own target. Change
# the last token of an input in evaluation: no earlier output may change.

# %% hide="true"
show(
    ["causality", "causal_gradient"],
    ["inverted_mask", "causal_in_training", "heads_not_put_back"],
    "[`masks.causal`](source/masks/build.md#causal), explained in [causal "
    "self-attention](learn/03_causal_self_attention.md)",
)

# %% [markdown]
# ## Shapes do not match
#
# The input is batch first where the module is sequence first, the mask has the axes of
# another library, or an axis of size 1 for the heads is missing. Compare the shapes in
# the error with the sheet [notation and shapes](notation.md). Use sizes that are all
# different: where two sizes are equal, the same mistake raises no error. [`pytest
# --shapes`](shapes.md) tests the shape comments in your code.

# %% hide="true"
show(
    ["batch_independence", "padding"],
    ["heads_by_coincidence", "batch_for_sequence"],
    "[`check_inputs`](source/mha.md#check_inputs) and "
    "[`check_mask`](source/mha.md#check_mask); [mask "
    "conventions](source/masks/conventions.md) converts masks",
)

# %% [markdown]
# ## Padding changes the output
#
# The mask must set the scores of padded *keys* to $-\infty$ before the softmax; a score of
# 0 is an ordinary score. Other causes are a mask that is repeated for the heads in the
# wrong order, and a normalization over padded positions. With padding in front, the
# positions of the tokens change, too. Compare the outputs of real tokens only: padded
# positions have outputs as well, which mean nothing.

# %% hide="true"
show(
    ["padding", "longer_padding"],
    ["zero_is_no_mask", "mask_repeated", "norm_over_padding"],
    "[`masks.padding`](source/masks/build.md#padding), explained in [padding "
    "masks](learn/06_padding_masks.md)",
)

# %% [markdown]
# ## Results differ between train and eval
#
# With dropout they must differ; with dropout 0 they must be equal. PyTorch's SDPA does
# not know the mode of a module: it drops whenever `dropout_p` is not 0, so pass
# `dropout_p=self.dropout_p if self.training else 0.0`. Otherwise, one of the two modes
# takes another path through the code, such as one without the mask.

# %% hide="true"
x = torch.randn(1, 1, 64, 16)
dropped = sdpa(x, x, x, dropout_p=0.5)
assert not torch.allclose(dropped, sdpa(x, x, x))
show(
    ["eval_matches_train", "causality"],
    ["dropout_in_eval", "mask_lost_in_eval", "causal_in_training"],
    "[`forward`](source/mha.md#MultiHeadAttention.forward) applies `nn.Dropout` to the "
    "weights, explained in [causal "
    "self-attention](learn/03_causal_self_attention.md#dropout-on-attention-weights)",
)

# %% [markdown]
# ## Results differ with batch size
#
# Differences of about $10^{-6}$ in float32 are rounding: another size selects another
# kernel, which adds in another order. Compare in float64 to tell. Larger differences mean
# that batch items influence each other: batch-first input in a sequence-first module, a
# mask that reaches the wrong item, or [padding](#padding-changes-the-output) to a length
# that depends on the batch.

# %% hide="true"
mha = MultiHeadAttention(heads=2, d_model=16).eval()
x = torch.randn(7, 33, 16)
together, alone = mha(query=x, key=x, value=x)[:, :1], x[:, :1]
alone = mha(query=alone, key=alone, value=alone)
assert torch.allclose(together, alone, atol=1e-6)
show(
    ["batch_independence", "padding"],
    ["batch_for_sequence", "heads_by_coincidence", "mask_repeated"],
    "[the core](source/mha.md) is sequence first, [`batch_first`]"
    "(source/implementations/batch_first.md) is not; explained in [batch-first input]"
    "(learn/08_sequence_first_with_einsum.md#common-mistake-batch-first-input)",
)

# %% [markdown]
# ## Decoding with a KV cache differs from the full pass
#
# With a cache there are fewer queries than keys, and the last query must attend to the
# last key. SDPA's `is_causal=True` aligns the *first* query with the *first* key instead:
# a single new token then attends to the oldest token only. Omit the mask for a single
# token, and give several tokens the mask `masks.causal(q_len, k_len)`. Also number the
# positions of new tokens from the length of the cache, not from 0.

# %% hide="true"
query, key, value = torch.randn(1, 1, 1, 4), *torch.randn(2, 1, 1, 5, 4)
assert torch.equal(sdpa(query, key, value, is_causal=True), value[:, :, :1])
assert masks.causal(1, 5).all()
show(
    ["incremental_decoding"],
    ["corner_of_the_cache"],
    "[`decode`](source/fast/module.md#MultiHeadAttention.decode) and "
    "[`KeyValueCache`](source/fast/module.md#KeyValueCache)",
)

# %% [markdown]
# ## float16 overflows
#
# float16 ends at 65,504. A fill value of $-10^9$ does not exist there, and
# `masked_fill` raises an error; use `-math.inf`. A sum of products can overflow as well:
# scale the query *before* the product, not the scores after it. bfloat16 has the range of
# float32, and needs neither.

# %% hide="true"
assert torch.finfo(torch.half).max == 65504
message = ""
try:
    torch.zeros(2, dtype=torch.half).masked_fill(torch.ones(2).bool(), -1e9)
except RuntimeError as error:
    message = str(error)
assert "without overflow" in message
assert torch.finfo(torch.bfloat16).max > 3e38
show(
    ["large_scores", "autocast", "dtype_and_device"],
    ["fill_beyond_half"],
    "[`masked_softmax`](source/mha.md#masked_softmax); [the fill values of "
    "others](compare/differences.md#fill-value-of-masked-scores-1e6-or-1e10)",
)

# %% [markdown]
# ## Attention is slow or runs out of memory
#
# The attention weights are `q_len × k_len × batch_size × heads` numbers: 16 GiB in float32
# for 4,096 tokens, 32 sequences and 8 heads. A fused kernel never stores them, so do not
# request them (`need_weights=False` in `nn.MultiheadAttention`); detach those that you
# store, or they keep the whole graph alive. To generate text, use a KV cache. No law tests
# speed: `headnotes bench` measures it.

# %% hide="true"
assert 4 * 4096**2 * 32 * 8 == 16 * 2**30
show(
    ["copy_after_call", "state_dict"],
    ["weights_with_their_graph"],
    "[fast](source/fast/module.md), explained in [profiling]"
    "(learn/10_profiling_the_reference_implementation.md); [online "
    "softmax](source/variants/online_softmax.md); [benchmarks](compare/benchmarks.md)",
)

# %% [markdown]
# ## Weights do not load from `nn.MultiheadAttention`
#
# It stacks the weights of query, key and value in one parameter, `in_proj_weight`,
# `[3 * d_model, d_model]`; `convert.to(module, "core")`, or `"fast"`, moves them to the
# three layers of Headnotes. Other modules stack the rows head by head: then a checkpoint of
# the right shape loads without an error into the wrong rows, so compare outputs afterwards,
# in evaluation. If you build a module yourself, `heads` comes before `d_model`.

# %% hide="true"
theirs = nn.MultiheadAttention(16, 2).eval()
assert theirs.in_proj_weight.shape == (3 * 16, 16)
x = torch.randn(3, 5, 16)
for target in ("core", "fast"):
    ours = convert.to(theirs, target).eval()
    output = ours(query=x, key=x, value=x)
    assert torch.allclose(output, theirs(x, x, x)[0], atol=1e-6)
show(
    ["formula"],
    ["fused_order", "grouped_by_tile"],
    "[`convert.to`](source/convert.md#to), explained in [equivalent "
    "implementations](learn/09_equivalent_implementations.md#convert-weights-between-"
    "implementations)",
)

# %% [markdown]
# ## The model trains, but worse than it should
#
# No error, no NaN, and a loss that falls prove little: training compensates for much.
# Common causes are a softmax over the wrong axis, a wrong scale, heads that are split by
# `view` without a transpose, and values that are projected but not used. A comparison with
# the formula in float64 finds them; training does not.

# %% hide="true"
show(
    ["formula", "rows_sum_to_one", "query_permutation", "parameter_gradients"],
    [
        "scaled_by_width",
        "softmax_over_queries",
        "softmax_over_heads",
        "heads_by_view",
        "forgotten_value",
    ],
    "[the core](source/mha.md#MultiHeadAttention.forward), explained in [splitting into "
    "heads](learn/04_multi_head_attention.md#what-a-wrong-split-breaks) and [softmax over "
    "the keys](learn/08_sequence_first_with_einsum.md"
    "#softmax-over-the-keys-dim1-not-over-dim-1)",
)
