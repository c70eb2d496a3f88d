# %% [markdown]
# # Sliding windows and attention sinks
#
# With a sliding window, each token attends to the last few tokens only, so that the work
# grows linearly with the length and the KV cache not at all. This lesson is for readers who
# want to know what a window saves, and why a model that was trained without one fails as
# soon as its first token leaves the window: that token is an attention sink. You need [the
# KV cache](11_kv_cache.md) and [padding masks](06_padding_masks.md). Reading time: 15
# minutes.
#
# ## What a window saves
#
# [The sliding-window module](../source/variants/sliding_window.md) computes the scores in
# blocks, so that scores outside the window are never computed. Its results are those of the
# core module with a mask; the operations are not:

# %%
import torch
from IPython.display import Markdown, display
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headnotes import MultiHeadAttention, fast, masks
from headnotes.variants.sinks import SinkAttention
from headnotes.variants.sliding_window import SlidingWindowAttention

torch.set_num_threads(1)
torch.manual_seed(13)
heads, d_model, window = 4, 64, 64
core = MultiHeadAttention(heads, d_model).eval()
windowed = SlidingWindowAttention(heads, d_model, window=window).eval()
windowed.load_state_dict(core.state_dict())


@torch.no_grad()
def operations(module, length, **options):
    """The output, and the operations of all matrix products, in millions."""
    x = torch.randn(length, 1, d_model, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        output = module(query=x, key=x, value=x, **options)
    return output, counter.get_total_flops() / 1e6


rows = ["|length|mask|window in blocks|", "|--:|--:|--:|"]
counts = []
for length in (256, 512, 1024):
    expected, all_pairs = operations(
        core, length, mask=masks.sliding_window(length, window=window)
    )
    output, band = operations(windowed, length)
    torch.testing.assert_close(output, expected)
    rows.append(f"|{length:,}|{all_pairs:.0f}|{band:.0f}|")
    counts.append((all_pairs, band))
display(Markdown("Millions of operations:\n\n" + "\n".join(rows)))
(_, shorter), (_, longer) = counts[1:]
assert 1.9 < longer / shorter < 2.1

# %% [markdown]
# In decoding, a token needs the last `window` keys only, so the cache is a ring: the new
# key and value overwrite the oldest. Its size does not depend on the length:

# %%
ring = windowed.cache(batch_size=1)
growing = fast.MultiHeadAttention(heads, d_model).eval().cache(1, capacity=1024)
tokens = torch.randn(1024, 1, d_model)
full = windowed(query=tokens, key=tokens, value=tokens)
pieces = []
with torch.no_grad():
    for piece in tokens.split(256):
        output, ring = windowed.decode(piece, ring)
        pieces.append(output)
torch.testing.assert_close(torch.cat(pieces), full)
print("positions stored after 1,024 tokens:", len(ring.keys), "of", growing.capacity)

# %% [markdown]
# Information still travels further than the window. In a stack of $n$ layers, a token
# depends on up to $n \cdot (w - 1)$ tokens before it, since each layer reaches $w - 1$
# positions further back. Many models alternate layers with and without a window.
#
# ## A task with "nothing found"
#
# The weights of a softmax sum to 1. So a query must attend to something, even where no key
# is relevant. To see where its weight then goes, we train a small model on a dictionary:
# each token is a letter with a digit, and in a sequence a letter always has the same digit.
# A query is a letter; the model is to name the digit of that letter, if the letter occurs
# among the earlier tokens, and "none" otherwise. Each sequence begins with a special first
# token, as in most language models.

# %%
letters, digits, length = 24, 6, 24
first_letter, first_digit, none = letters, digits, digits


def batch(length, batch_size, seed):
    """Letters and digits, `[length, batch_size]`, after the special first token."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(digits, (letters, batch_size), generator=generator)
    letter = torch.randint(letters, (length, batch_size), generator=generator)
    digit = table.gather(0, letter)
    letter[0], digit[0] = first_letter, first_digit
    return letter, digit


def right_answers(letter, digit, visible):
    """The digit of the same letter among the visible earlier tokens, or none."""
    same = visible & (letter.unsqueeze(1) == letter) & (letter < letters)
    found = torch.where(same, digit, -1).amax(dim=1)
    return found.where(same.any(dim=1), none)


def earlier(length, window):
    """Each token may attend to the tokens before it, within the window."""
    itself = torch.eye(length).bool().unsqueeze(-1)
    return masks.sliding_window(length, window=window) & ~itself


class Dictionary(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.letter = nn.Embedding(letters + 1, 32)
        self.digit = nn.Embedding(digits + 1, 32)
        self.attention = attention(1, 32, dropout_prob=0.0)
        self.readout = nn.Linear(32, digits + 1)

    def forward(self, letter, digit, mask):
        query = self.letter(letter)
        x = query + self.digit(digit)
        return self.readout(self.attention(query=query, key=x, value=x, mask=mask))


def train(attention, mask, steps=150):
    torch.manual_seed(0)
    model = Dictionary(attention)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(steps):
        letter, digit = batch(length, 16, seed=step)
        logits = model(letter, digit, mask)
        answers = right_answers(letter, digit, mask)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


all_earlier = earlier(length, length)
model = train(MultiHeadAttention, all_earlier)

# %% [markdown]
# ## Evict the first token
#
# The model was trained on 24 tokens. Now it runs on 96 with a window of 24, so that each
# query has as many keys as in training. The right answer is that of the window.


# %%
long = 96


@torch.no_grad()
def measure(model, mask):
    """Accuracy where the letter is in the window and where it is not; weight on token 0."""
    letter, digit = batch(long, 64, seed=-1)
    answers = right_answers(letter, digit, earlier(long, length))
    late = (torch.arange(long) > length).unsqueeze(1).expand_as(answers)
    right = model(letter, digit, mask).argmax(dim=-1) == answers
    sink = model.attention.attn[:, 0].mean(dim=-1)
    found, absent = late & (answers != none), late & (answers == none)
    return [
        values[rows].double().mean().item()
        for values, rows in (
            (right, found),
            (right, absent),
            (sink, found),
            (sink, absent),
        )
    ]


evicted = earlier(long, length)
kept = evicted.clone()
kept[1:, 0] = True
settings = {"window of 24": evicted, "window of 24 and the first token": kept}
rows = ["|keys|letter in the window|letter absent|weight on the first token, absent|"]
rows.append("|---|--:|--:|--:|")
results = {}
for name, mask in settings.items():
    found, absent, _, weight = results[name] = measure(model, mask)
    rows.append(f"|{name}|{found:.0%}|{absent:.0%}|{weight:.0%}|")
display(Markdown("Accuracy:\n\n" + "\n".join(rows)))
assert results["window of 24"][1] < 0.3
assert min(results["window of 24 and the first token"][:2]) > 0.95

# %% [markdown]
# Where the letter is in the window, the window is enough. Where it is absent, the trained
# model puts its weight on the first token, whose value means "none". When this token has
# left the window, the softmax distributes that weight over the other keys, and the model
# names some digit. The first token holds little information, but it takes the weight that
# no other key should get: it is an *attention sink* ([Xiao et al.
# 2023](https://arxiv.org/abs/2309.17453)). In language models it is the first token because
# it is the only one that all queries can attend to.
#
# So StreamingLLM keeps the first tokens in the cache, beside the window:
# `SlidingWindowAttention(heads, d_model, window=…, sink_tokens=4)`.
#
# ## A learned sink instead of a token
#
# The alternative is a softmax that need not distribute all of its weight. In [attention
# with sinks](../source/variants/sinks.md), each head has one learned logit that takes part
# in the softmax and has no value. We train the same model with it, without ever showing it
# the first token, and test it with the window alone:

# %%
without_first = all_earlier.clone()
without_first[:, 0] = False
with_sink = train(SinkAttention, without_first)
found, absent, _, _ = measure(with_sink, evicted)
print(f"letter in the window {found:.0%}, letter absent {absent:.0%}")
print(f"learned logit: {with_sink.attention.sinks.item():.1f}")
assert min(found, absent) > 0.95

# %% [markdown]
# No token has to be kept. gpt-oss has such sinks, in layers with a window of 128 and in
# those without.
#
# ## Try it: how much weight does the sink take?
#
# The weights that `attn` holds are those of the keys. From their sum, compute the weight of
# the sink for queries whose letter is in the window, and for those whose letter is absent.


# %% fold="Answer"
letter, digit = batch(long, 64, seed=-1)
answers = right_answers(letter, digit, earlier(long, length))
late = (torch.arange(long) > length).unsqueeze(1)
with torch.no_grad():
    with_sink(letter, digit, evicted)
sink = 1 - with_sink.attention.attn.sum(dim=1).squeeze(-1)  # [q_len, batch_size]
for name, rows in (("found", answers != none), ("absent", answers == none)):
    print(f"{name:6} {sink[late & rows].mean():4.0%}")
assert (
    sink[late & (answers != none)].mean()
    < 0.1
    < 0.9
    < sink[late & (answers == none)].mean()
)

# %% [markdown]
# ## In short
#
# - A window makes the work linear in the length and the size of the cache constant.
# - Evicting the first token breaks a model that was trained with it, because the token
#   takes the weight that no other key should get.
# - Keep the first tokens, or train with a learned sink per head.
#
# Next: [the Transformer block](14_transformer_block.md), what stands around attention in a
# model.
