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
# A model sees no words, only rows of a table. So each word gets a number; number 0 is
# kept for filler, which makes short sentences as long as their neighbours.

# %%
import math

import torch
from torch import nn

from headnotes import MultiHeadAttention, masks

sentences = ["the cat sat on the mat", "the dog slept"]
words = [sentence.split() for sentence in sentences]
vocabulary = ["·", *sorted({word for row in words for word in row})]
print(vocabulary)

# %% [markdown]
# ## Sentences become columns
#
# Everything here lies *sequence first*: `tokens[t]` holds the words at position `t` of
# all sentences. A sentence is therefore a column, read from top to bottom. The second
# one ends after three words; the rest of its column is filler.

# %%
valid_lens = torch.tensor([len(row) for row in words])
columns = [torch.tensor([vocabulary.index(word) for word in row]) for row in words]
tokens = nn.utils.rnn.pad_sequence(columns)
print(tokens)
print("[seq_len, batch_size] =", list(tokens.shape))

# %% [markdown]
# ## Numbers become vectors
#
# Each number picks its row of the table. The factor $\sqrt{d_{model}}$ is the paper's
# own (section 3.4). The table is random: nothing here has been trained, and that is on
# purpose. It lets us see what attention does before it has learned anything.

# %%
torch.manual_seed(3)
d_model = 8
table = nn.Embedding(len(vocabulary), d_model)
x = table(tokens) * math.sqrt(d_model)
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

# %% fold="How the maps are drawn"
import matplotlib.pyplot as plt


def draw(weights, words):
    """One heat map a head; `weights` is [q_len, k_len, heads]."""
    heads = weights.shape[-1]
    _, axes = plt.subplots(1, heads, figsize=(3.1 * heads, 2.9), sharey=True)
    for head, ax in enumerate(axes):
        ax.pcolormesh(weights[..., head], vmin=0, vmax=1)  # one scale for all heads
        for i, row in enumerate(weights[..., head].tolist()):
            for j, weight in enumerate(row):
                style = {"color": "white" if weight < 0.55 else "black", "size": 7}
                ax.text(
                    j + 0.5, i + 0.5, f"{weight:.2f}", style, ha="center", va="center"
                )
        ax.set(title=f"head {head}", xlabel="is read", aspect="equal")
        ax.set_xticks([j + 0.5 for j in range(len(words))], words, rotation=45)
        ax.set_yticks([i + 0.5 for i in range(len(words))], words)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("asks")
    axes[0].invert_yaxis()
    plt.show()


# %% alt="Two heat maps, one a head, of how much each word of ‘the cat sat on the mat’ reads from each. In both, the two rows and the two columns of ‘the’ are the same."
draw(weights[:, :, 0].detach(), words[0])

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
# position into the vector, and this is what positional encodings do.
#
# ## The short sentence
#
# Its filler has weight zero, so it cannot matter which numbers the filler holds, or how
# much of it there is. (The filler asks, too, but nobody needs its answers.)

# %% alt="Two heat maps, one a head, for ‘the dog slept’ with three filler words. The columns of the filler are zero throughout."
draw(weights[:, :, 1].detach(), [*words[1], "·", "·", "·"])

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
print(" ".join(words[0][i] for i in order))
sentence = x[:, :1]
shuffled = sentence[order]
y_sentence = mha(query=sentence, key=sentence, value=sentence)
y_shuffled = mha(query=shuffled, key=shuffled, value=shuffled)
assert torch.allclose(y_shuffled, y_sentence[order], atol=1e-5)
print("each word keeps its output, and only moves")

# %% [markdown]
# Now read how it is done: [multi-head attention, line by line](../source/mha.md), and
# [the masks](../source/masks.md).
