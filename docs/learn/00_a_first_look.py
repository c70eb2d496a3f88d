# %% [markdown]
# # From a sentence to its weights
#
# What does attention do to a sentence? We take two, turn them into a tensor, send it
# through [`MultiHeadAttention`](../source/mha.md) and look at the weights that come out.
# All that is printed or drawn on this page was produced by the code above it, when the
# page was built.
#
# ## Words become numbers
#
# A model sees no words, only rows of a table. So each word gets a number. Number 0 is
# kept for filler, which makes short sentences as long as their neighbours, and number 1
# for words that the [vocabulary](../source/positions.md) does not hold.

# %%
import torch

from headnotes import MultiHeadAttention, masks
from headnotes.plots import display_attention
from headnotes.positions import Embeddings, Vocabulary

sentences = ["The cat sat on the mat.", "The dog slept."]
vocabulary = Vocabulary(sentences)
print(vocabulary.words)

# %% [markdown]
# ## Sentences become columns
#
# Everything here lies *sequence first*: `tokens[t]` holds the words at position `t` of
# all sentences. A sentence is therefore a column, read from top to bottom. The second
# one ends after three words; the rest of its column is filler.

# %%
tokens, valid_lens = vocabulary.encode_batch(sentences)
print(tokens)
print("[seq_len, batch_size] =", list(tokens.shape))

# %% [markdown]
# ## Numbers become vectors
#
# Each number picks its row of the table. (The rows are multiplied by $\sqrt{d_{model}}$,
# as in section 3.4 of the paper.) The table is random: nothing here has been trained,
# and that is on purpose. It lets us see what attention does before it has learned
# anything.

# %%
torch.manual_seed(3)
d_model = 8
embeddings = Embeddings(len(vocabulary), d_model)
x = embeddings(tokens)
print("[seq_len, batch_size, d_model] =", list(x.shape))

# %% [markdown]
# ## Every word reads from every word
#
# In *self*-attention the same sequence asks, is compared and is read. The mask keeps
# all words from reading filler. Two heads do this side by side, each 4 wide.

# %%
mha = MultiHeadAttention(heads=2, d_model=d_model).eval()
mask = masks.padding(valid_lens, k_len=len(tokens))
y = mha(query=x, key=x, value=x, mask=mask)
weights = mha.attn
print("output:  [seq_len, batch_size, d_model]      =", list(y.shape))
print("weights: [q_len, k_len, batch_size, heads]   =", list(weights.shape))

# %% [markdown]
# The output has the shape of the input: each word is still a vector, but now a mixture.
# Of what, the weights tell. For each word, sentence and head they sum to 1:

# %%
print(weights.sum(dim=1)[..., 0])

# %% [markdown]
# ## The picture
#
# One map a head. A row is a word that asks, a column a word that is read; a row of
# numbers says how much of each word went into the mixture.

# %% alt="Two heat maps, one a head, of how much each word of ‘the cat sat on the mat’ reads from each. In both, the two rows and the two columns of ‘the’ are the same."
words = vocabulary.decode(tokens[:, 0])
figure = display_attention(words, words, weights[:, :, 0])

# %% [markdown]
# The two heads differ, since each has its own projections. But look at the two rows of
# *the*, and at its two columns: they are the same.

# %%
first, second = 0, 4
assert torch.allclose(weights[first, :, 0], weights[second, :, 0])
assert torch.allclose(weights[:, first, 0], weights[:, second, 0])
print("'the' asks and is read alike at positions", first, "and", second)

# %% [markdown]
# This is no accident, but what attention *is*. A score depends on two vectors and on
# nothing else, and softmax treats all keys alike; the same word is the same vector,
# wherever it stands. **Attention knows no order.** Whoever wants it to must write the
# position into the vector; [another lesson](05_embeddings_and_positional_encoding.md) does.
#
# ## The short sentence
#
# Its filler has weight zero, so it cannot matter which numbers the filler holds, or how
# much of it there is. (The filler asks, too, but nobody needs its answers.)

# %% alt="Two heat maps, one a head, for ‘the dog slept’ with three filler words. The columns of the filler are zero throughout."
short = vocabulary.decode(tokens[:, 1])
figure = display_attention(short, short, weights[:, :, 1])

# %%
alone = x[:3, 1:]  # the three words of the second sentence, and no filler
y_alone = mha(query=alone, key=alone, value=alone)
print("the same without filler:", torch.allclose(y_alone, y[:3, 1:], atol=1e-5))

# %% [markdown]
# ## Try it
#
# Shuffle the words of the first sentence. Before you run anything: what will happen to
# its output?

# %% fold="What happens"
order = torch.randperm(6)
print(" ".join(words[i] for i in order))
sentence = x[:, :1]
shuffled = sentence[order]
y_sentence = mha(query=sentence, key=sentence, value=sentence)
y_shuffled = mha(query=shuffled, key=shuffled, value=shuffled)
assert torch.allclose(y_shuffled, y_sentence[order], atol=1e-5)
print("each word keeps its output, and only moves")

# %% [markdown]
# Now read how it is done: [multi-head attention, line by line](../source/mha.md), and
# [the masks](../source/masks/build.md).
