# %% [markdown]
# # Cross-attention
#
# In *cross-attention*, the queries come from one sequence, the keys and values from
# another. The decoder of the original Transformer uses it to let each target token attend
# to the source sentence, in translation for example. This lesson shows the shapes, the
# mask that is needed and the masks that are wrong, and what is computed only once when
# text is generated. You need [queries, keys and values](02_queries_keys_and_values.md)
# and [padding masks](06_padding_masks.md). Reading time: 10 minutes.
#
# ## Source and target: two sequences of different lengths
#
# We translate two sentences from French to English. The French ones are the *source*,
# the English ones the *target*. Each batch has its own padding:

# %%
import textwrap

import torch

from headnotes import MultiHeadAttention, convert, masks
from headnotes.mha import masked_softmax
from headnotes.plots import display_attention
from headnotes.positions import Embeddings, PositionalEncoding, Vocabulary

source_texts = ["Nous avons mangé du pain et du fromage.", "Elle dort bien."]
target_texts = ["We ate bread and cheese.", "She is sleeping well."]
source_vocabulary = Vocabulary(source_texts)
target_vocabulary = Vocabulary(target_texts)
source, source_lens = source_vocabulary.encode_batch(source_texts)
target, target_lens = target_vocabulary.encode_batch(target_texts)
print("source:", list(source.shape), "valid lengths", source_lens.tolist())
print("target:", list(target.shape), "valid lengths", target_lens.tolist())

# %% [markdown]
# ## Encoder and decoder
#
# The **encoder** computes one vector per source token. Here it is a single layer of
# self-attention with a padding mask. Its output is called the *memory*. The **decoder**
# generates the target token by token, so its self-attention is causal. (In a real model,
# both also have residual connections, normalization and feed-forward layers. All weights
# here are random: nothing has been trained.)

# %%
torch.set_grad_enabled(False)  # nothing is trained on this page
torch.manual_seed(4)
d_model = 16
positions = PositionalEncoding(d_model).eval()
x_source = positions(Embeddings(len(source_vocabulary), d_model)(source))
x_target = positions(Embeddings(len(target_vocabulary), d_model)(target))

encoder, decoder, cross = (
    MultiHeadAttention(heads=2, d_model=d_model).eval() for _ in range(3)
)
source_mask = masks.padding(source_lens, k_len=len(source))  # [1, k_len, batch_size]
memory = encoder(query=x_source, key=x_source, value=x_source, mask=source_mask)

# Padding comes after all real tokens of the target, so the causal mask excludes it.
causal = masks.causal(len(target))
state = decoder(query=x_target, key=x_target, value=x_target, mask=causal)
print("memory: [source_len, batch_size, d_model] =", list(memory.shape))
print("state:  [target_len, batch_size, d_model] =", list(state.shape))

# %% [markdown]
# ## Cross-attention: queries from the decoder, keys and values from the encoder
#
# The layer is the same [`MultiHeadAttention`](../source/mha.md) as before. Only its
# arguments differ: `query` is the decoder's state, `key` and `value` are the memory.

# %%
y = cross(query=state, key=memory, value=memory, mask=source_mask)
print("output:  [q_len, batch_size, d_model]      =", list(y.shape))
print("weights: [q_len, k_len, batch_size, heads] =", list(cross.attn.shape))

# %% [markdown]
# `q_len` is the length of the target, `k_len` the length of the source. The output has
# the length of the queries: one context vector per target token, an average over the
# values of the source tokens.
#
# ## Attention weights between two sentences
#
# The maps are no longer square. A row is a target token, a column is a source token. In
# a trained translation model, a row shows which source tokens the decoder uses to predict
# the *next* target token. These weights are those of an untrained layer, and mean
# nothing.

# %% alt="Two heat maps of attention weights, one per head, with five rows for ‘we ate bread and cheese’ and eight columns for ‘nous avons mangé du pain et du fromage’. The weights are spread over several columns and show no alignment of words."
weights = cross.attn
targets = [target_vocabulary.decode(column) for column in target.T]
sources = [source_vocabulary.decode(column) for column in source.T]
_ = display_attention(targets[0], sources[0], weights[:, :, 0], columns=1)

# %% [markdown]
# The second source sentence ends in five tokens of padding. Their columns are zero:

# %% alt="Two heat maps of attention weights, one per head, with five rows for ‘she is sleeping well’ and one token of padding, and eight columns for ‘elle dort bien’ and five tokens of padding. The five columns of padding are zero."
_ = display_attention(targets[1], sources[1], weights[:, :, 1], columns=1)
assert (weights[:, 3:, 1] == 0).all()

# %% [markdown]
# ## Which mask: source padding, not causal
#
# A mask says which *keys* a query may attend to, and the keys are source tokens. So the
# mask of cross-attention is made from the lengths of the **source**. It has one row for
# all queries, `[1, k_len, batch_size]`.
#
# No causal mask is needed. The source is complete before the first target token is
# generated, so no part of it is in the future. Nor can later target tokens leak: an
# output of cross-attention depends on its own query and on the memory, and on no other
# query. Change the last target token, and only the last output changes:

# %%
x_changed = x_target.clone()
x_changed[-1] += 1
changed_state = decoder(query=x_changed, key=x_changed, value=x_changed, mask=causal)
y_changed = cross(query=changed_state, key=memory, value=memory, mask=source_mask)
depends = (y_changed - y).abs().amax(dim=(1, 2)) > 1e-5
print("outputs that change:", depends.tolist())
assert depends.tolist() == [False] * 4 + [True]

# %% [markdown]
# A causal mask would only hide source tokens that the decoder needs. These would be
# hidden from the first query:

# %%
is_hidden = ~masks.causal(len(target), len(source))[0, :, 0]
print([word for word, hidden in zip(sources[0], is_hidden, strict=True) if hidden])

# %% [markdown]
# ## A common mistake: the mask of the target
#
# It is easy to pass the padding mask of the decoder's own sequence. If it was made for
# keys of the target's length, the layer refuses it:

# %%
try:
    wrong_mask = masks.padding(target_lens, k_len=len(target))
    cross(query=state, key=memory, value=memory, mask=wrong_mask)
except ValueError as error:
    print(textwrap.fill(str(error), 80))

# %% [markdown]
# But if both batches happen to be padded to the same length, or if the mask is made from
# the target's lengths and the source's `k_len`, the shape is right and nothing is raised:

# %%
wrong_mask = masks.padding(target_lens, k_len=len(source))
y_wrong = cross(query=state, key=memory, value=memory, mask=wrong_mask)
print("sentence 0 cannot attend to:", *sources[0][target_lens[0] :])
print("sentence 1 attends to:      ", *sources[1][: target_lens[1]])
on_padding = cross.attn[:, 3, 1].mean()
print(f"mean weight on the padding:  {on_padding:.2f}")
difference = (y_wrong - y).abs().amax(dim=(0, 2))
print("largest difference:         ", *(f"{d:.2f}" for d in difference))
assert on_padding > 0.1
assert (difference > 0.1).all()

# %% [markdown]
# Both outputs are wrong, and there is no error. Two tests find the mistake: the output
# must depend on the last real token of each source sentence, and must not depend on its
# padding.


# %%
def depends_on(position, sentence, mask):
    """Whether the output for a sentence depends on this vector of its memory."""
    changed = memory.clone()
    changed[position, sentence] += 1
    before = cross(query=state, key=memory, value=memory, mask=mask)
    after = cross(query=state, key=changed, value=changed, mask=mask)
    return not torch.allclose(before[:, sentence], after[:, sentence], atol=1e-5)


print("the output depends on:  last token of 0  padding of 1")
for name, mask in (("source", source_mask), ("target", wrong_mask)):
    last_token, pad = depends_on(7, 0, mask), depends_on(3, 1, mask)
    print(f"lengths of the {name}:  {last_token!s:15}  {pad}")
    assert (last_token, pad) == (name == "source", name == "target")

# %% [markdown]
# ## Decoding: keys and values of the encoder are computed once
#
# In generation, the decoder runs once per target token, each time with one query per
# sentence. The memory is the same in every step, and so are its keys and values. They are
# computed once, before the first step, and stored: 8 source vectors are projected instead
# of 8 in each of 5 steps. Here is what the layer does, one query at a time:

# %%
key = cross.key(memory)  # [k_len, batch_size, heads, d_k], computed once
value = cross.value(memory)
mask = source_mask.unsqueeze(-1)  # the same for all heads

outputs = []
for t in range(len(target)):
    query = cross.query(state[t : t + 1]) * cross.scale  # [1, batch_size, heads, d_k]
    attn = masked_softmax(cross.get_scores(query, key), mask)
    context = cross.apply_weights(attn, value).flatten(-2)
    outputs.append(cross.output(context))
step_by_step = torch.cat(outputs)
print(f"largest difference: {(step_by_step - y).abs().max():.0e}")
assert torch.allclose(step_by_step, y, atol=1e-5)

# %% [markdown]
# This is the simpler of a decoder's two KV caches: it has a fixed size, `k_len`. The [KV
# cache of self-attention](../source/fast/module.md#KeyValueCache) grows by one key and
# one value with each generated token.
#
# ## In PyTorch: `memory_key_padding_mask`
#
# In `nn.TransformerDecoderLayer`, `tgt` gives the queries, `memory` gives keys and
# values, and `memory_key_padding_mask` is the source padding mask. In the
# `nn.MultiheadAttention` inside of it, this mask is called `key_padding_mask`. It is
# batch first, `[batch_size, k_len]`, and its True means *padding*, the opposite of ours:

# %%
key_padding_mask = masks.to_key_padding_mask(source_mask)
print(key_padding_mask.int())
torch_cross = convert.to(cross, "torch")
y_torch, _ = torch_cross(state, memory, memory, key_padding_mask=key_padding_mask)
print(f"largest difference: {(y_torch - y).abs().max():.0e}")
assert torch.allclose(y_torch, y, atol=1e-5)

# %% [markdown]
# ## Try it
#
# Shuffle the vectors of the memory, together with the mask. What happens to the output of
# cross-attention, and what to its weights? What follows for the input of the encoder?

# %% fold="Answer"
order = torch.tensor([3, 0, 7, 5, 1, 4, 2, 6])
shuffled, shuffled_mask = memory[order], source_mask[:, order]
y_shuffled = cross(query=state, key=shuffled, value=shuffled, mask=shuffled_mask)
assert torch.allclose(y_shuffled, y, atol=1e-5)
assert torch.allclose(cross.attn, weights[:, order], atol=1e-5)
print("the output is the same, the columns of the weights are shuffled")

# Cross-attention is invariant to the order of its keys: it averages over a set. The
# order of the source must be contained in the vectors of the memory, which is why the
# encoder adds positions to its embeddings.
unordered = Embeddings(len(source_vocabulary), d_model)(source)
no_positions = [
    encoder(query=x, key=x, value=x, mask=m)
    for x, m in ((unordered, source_mask), (unordered[order], shuffled_mask))
]
assert torch.allclose(no_positions[0][order], no_positions[1], atol=1e-5)
print("without positions, the encoder could not tell the two orders apart")

# %% [markdown]
# ## In short
#
# - Cross-attention takes queries from the target, keys and values from the source.
# - Weights are `[q_len, k_len]` with two different lengths; the output has the length of
#   the queries.
# - The mask is the padding mask of the source. It is not causal, and it never comes from
#   the lengths of the target.
# - In decoding, the encoder's keys and values are computed once and do not grow.
# - The output does not depend on the order of keys and values; positions must be in the
#   memory.
#
# Next: attention on [sequence-first tensors with
# `einsum`](08_sequence_first_with_einsum.md).
