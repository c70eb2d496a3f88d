# %% [markdown]
# # Position encodings compared
#
# Attention does not know the order of its tokens; a position encoding adds it. This
# lesson is for readers who want to choose one. It trains the same small model with five
# of them on one task that needs order, and then tests each on sequences of twice and four
# times the trained length. You need [embeddings and positional
# encoding](05_embeddings_and_positional_encoding.md). Reading time: 15 minutes.
#
# ## The encodings
#
# | encoding | what changes | learned | used by |
# |---|---|---|---|
# | none | nothing: only the causal mask tells positions apart | – | – |
# | [sinusoids](../source/positions.md) | the input: a vector of the position is added | no | the Transformer of 2017 |
# | [T5's relative bias](../source/variants/relative.md) | the scores: a number for each range of distances is added | yes | T5 |
# | [ALiBi](../source/variants/alibi.md) | the scores: a multiple of the distance is subtracted | no | MPT, BLOOM |
# | [rotary (RoPE)](../source/variants/rotary.md) | queries and keys: rotated in proportion to the position | no | Llama, Mistral, Qwen |
#
# The first two know the position of a token in the sequence, the others only the distance
# of query and key.
#
# ## The task: which token stood three places before?
#
# A sequence of random tokens of a vocabulary of 16; at each position, the model has to
# name the token three places before. Nothing in the tokens themselves helps, so a model
# without positions can only guess. The model has an embedding, one causal attention layer
# with four heads, and a linear layer; only the attention differs.

# %%
import torch
from IPython.display import Markdown, display
from torch import nn

from headnotes import MultiHeadAttention, masks
from headnotes.positions import sinusoids
from headnotes.variants.alibi import AlibiAttention
from headnotes.variants.relative import T5Attention
from headnotes.variants.rotary import RotaryAttention

torch.set_num_threads(1)
vocab_size, d_model, heads, back = 16, 32, 4, 3
trained_length = 24

ATTENTIONS = {
    "none": MultiHeadAttention,
    "sinusoids": MultiHeadAttention,
    "T5's bias": T5Attention,
    "ALiBi": AlibiAttention,
    "rotary": RotaryAttention,
}


class Model(nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.attention = ATTENTIONS[encoding](heads, d_model, dropout_prob=0.0)
        self.readout = nn.Linear(d_model, vocab_size)
        self.absolute = encoding == "sinusoids"

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.absolute:
            x = x + sinusoids(len(x), d_model).float().unsqueeze(1)
        mask = masks.causal(len(x))
        return self.readout(self.attention(query=x, key=x, value=x, mask=mask))


def sequences(length, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length, batch_size), generator=generator)


# %% [markdown]
# ## Training
#
# A hundred steps with the same sequences for all:


# %%
def train(encoding, steps=100):
    torch.manual_seed(12)
    model = Model(encoding)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(steps):
        tokens = sequences(trained_length, 16, seed=step)
        logits = model(tokens)[back:]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:-back].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


models = {encoding: train(encoding) for encoding in ATTENTIONS}

# %% [markdown]
# ## Accuracy at the trained length, and beyond
#
# The accuracy is measured on new sequences, over the second half of their positions.
# A guess is right once in 16, 6 %.


# %%
@torch.no_grad()
def accuracy(model, length):
    tokens = sequences(length, 100, seed=-1)
    right = model(tokens)[back:].argmax(dim=-1) == tokens[:-back]
    return right[length // 2 :].double().mean().item()


LENGTHS = [trained_length, 2 * trained_length, 4 * trained_length]
measured = {
    encoding: [accuracy(model, length) for length in LENGTHS]
    for encoding, model in models.items()
}
rows = ["|encoding|" + "|".join(f"length {length}" for length in LENGTHS) + "|"]
rows += ["|---|" + "--:|" * len(LENGTHS)]
for encoding, values in measured.items():
    rows.append(f"|{encoding}|" + "|".join(f"{value:.0%}" for value in values) + "|")
display(Markdown("\n".join(rows)))

# %% [markdown]
# Without positions, the model does little better than to guess: under the causal mask it
# can only tell how many tokens came before. Sinusoids, T5's bias and rotary positions
# solve the task, and none of them keeps its accuracy at four times the length. ALiBi never
# solves it: its scores fall with the distance, so a head cannot prefer the third token
# back to the second. But what it does, it does at each length.

# %%
at, _, four = (
    {name: values[column] for name, values in measured.items()} for column in range(3)
)
assert all(at[name] > 0.95 for name in ("sinusoids", "T5's bias", "rotary"))
assert all(at[name] < 0.5 for name in ("none", "ALiBi"))
assert all(four[name] < 0.75 for name in models)
assert abs(four["ALiBi"] - at["ALiBi"]) < 0.1

# %% [markdown]
# ## Why longer sequences fail
#
# In training, no key was more than 23 positions away. Here is the mean attention weight by
# distance, at four times the length, for the queries of the last quarter, in the head that
# gives the right key the most weight at the trained length. To the right of the dashed line
# are distances that the model has never seen:

# %% fold="Plotting code"
import matplotlib.pyplot as plt


@torch.no_grad()
def weight_by_distance(model, length):
    """The mean weight for each distance and head, over late queries and the batch."""
    model(sequences(length, 16, seed=-2))
    attn = model.attention.attn.mean(dim=2)  # [q_len, k_len, heads]
    late = range(3 * length // 4, length)
    rows = [attn[i, : i + 1].flip(0)[: 3 * length // 4] for i in late]
    return torch.stack(rows).mean(dim=0)  # [distances, heads]


profiles = {}
for name, model in models.items():
    short, long = (weight_by_distance(model, LENGTHS[n]) for n in (0, -1))
    head = short[back].argmax()
    profiles[name] = short[:, head], long[:, head]

# %% alt="Five curves of attention weight over distance. T5's bias has a small peak at distance 3 and a plateau of weight from distance 24 on; the weight of rotary and of sinusoids lies far to the right; ALiBi falls quickly to zero."
figure, axes = plt.subplots(5, 1, figsize=(5.6, 5.0), sharex=True)
for ax, (name, (_, profile)) in zip(axes, profiles.items(), strict=True):
    ax.plot(profile, color="#2f86d6")
    ax.axvline(trained_length - 0.5, linestyle="--", color="#a0a0a0", linewidth=0.8)
    ax.set(ylabel=name, ylim=(0, None), yticks=[])
    ax.yaxis.label.set(rotation=0, ha="right", va="center")
axes[-1].set(xlabel="distance of the key (positions before the query)")
plt.show()

# %%
print("weight:     right key, length 24   length 96   beyond distance 23")
for name, (short, long) in profiles.items():
    right, later, unseen = short[back], long[back], long[trained_length:].sum()
    print(f"{name:11}{right:21.0%}{later:12.0%}{unseen:21.0%}")
    assert unseen < 0.01 if name == "ALiBi" else unseen > 0.1

# %% [markdown]
# A softmax gives some weight to every key. Keys at unseen distances have scores that were
# never trained, and there are many of them: together they take the weight from the right
# key. Rotary scores are sums of waves of the distance, so a distance that was never seen
# can score higher than the right one. T5's biases of far distances still have their
# initial values.
#
# ALiBi's bias falls with the distance without bound. In its steepest head, distant keys get
# no weight, however many there are, and the weights are those of the trained length. That
# is its purpose: a language model that is trained on short texts and used on longer ones,
# where near tokens matter most ([Press et al. 2021](https://arxiv.org/abs/2108.12409)).
#
# Rotary models for long texts are therefore trained at the length at which they are used,
# or their angles are [scaled](../source/variants/rotary.md) so that all distances fall
# into the trained range, and they are then trained a little further.
#
# ## Try it: does the accuracy depend on where the sequence starts?
#
# Take the trained rotary model, and give all positions an offset of 1,000. What changes?


# %% fold="Answer"
@torch.no_grad()
def shifted(model, tokens, offset):
    x = model.embed(tokens)
    positions = offset + torch.arange(len(x)).unsqueeze(1)
    causal = masks.causal(len(x))
    output = model.attention(
        query=x, key=x, value=x, mask=causal, key_positions=positions
    )
    return model.readout(output)


tokens = sequences(trained_length, 16, seed=-3)
here, there = (shifted(models["rotary"], tokens, offset) for offset in (0, 1000))
print(f"largest difference: {(here - there).abs().max():.0e}")
assert torch.allclose(here, there, atol=1e-3)

# %% [markdown]
# Nothing: scores depend on distances only. With sinusoids, positions from 1,000 on were
# never seen in training.
#
# ## In short
#
# - Absolute encodings know positions; T5's bias, ALiBi and rotary know distances.
# - Whatever the encoding, a model knows the positions or distances that it was trained
#   on. Keys at other distances get scores that were never trained.
# - ALiBi's steep heads give distant keys no weight, so length does not matter to them. But
#   no bias prefers a distant position to a near one.
#
# Next: [sliding windows and attention sinks](13_sliding_windows_and_sinks.md).
