# %% [markdown]
# # The Transformer block
#
# A Transformer is a stack of equal blocks. A block is an attention layer and a feed-forward
# layer, each with a residual connection and a normalization. This lesson is for readers who
# know attention and want to know what the other parts are for. It writes the block,
# measures what each part does to activations and gradients, and then trains a small model
# with each part removed once. You need [multi-head attention](04_multi_head_attention.md)
# and [embeddings and positional encoding](05_embeddings_and_positional_encoding.md).
# Reading time: 15 minutes.
#
# ## Two sublayers, two orders
#
# The block has two *sublayers*, attention and a feed-forward layer. Each adds its output to
# its input: this is the *residual connection*, and what runs through the whole stack is
# the *residual stream*. Layer normalization is either applied after the sum (*post-norm*,
# in the paper of 2017) or to the input of the sublayer only (*pre-norm*, in GPT-2 and
# nearly all models since):
#
# $$\text{post-norm:}\quad x \leftarrow \operatorname{LayerNorm}(x + f(x))
#   \qquad \text{pre-norm:}\quad x \leftarrow x + f(\operatorname{LayerNorm}(x))$$

# %% fold="Plotting code"
import matplotlib.pyplot as plt

INK = "#123456"
ORDERS = {
    "post-norm (2017)": ["attention", "+", "norm", "feed-forward", "+", "norm"],
    "pre-norm": ["norm", "attention", "+", "norm", "feed-forward", "+"],
}
COLORS = {"norm": "#e0a030", "attention": "#2f86d6", "feed-forward": "#3a9d5d"}


def draw_block(ax, title, parts):
    """The parts of a block from bottom to top, with the residual connections."""
    ax.set(title=title, xlim=(-1.7, 1.3), ylim=(-0.8, len(parts) + 0.2))
    ax.set_axis_off()
    start = -0.5  # where the current residual connection leaves the stream
    for y, part in enumerate(parts):
        arrow = {"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (0, y - 0.3), (0, y - 0.7), arrowprops=arrow)
        if part != "+":
            box = {"boxstyle": "round", "facecolor": "none", "edgecolor": COLORS[part]}
            ax.text(0, y, part, ha="center", va="center", bbox=box)
            if part == "norm" and parts[0] == "attention":
                start = y + 0.5
            continue
        circle = {"boxstyle": "circle", "facecolor": "none", "edgecolor": INK}
        ax.text(0, y, "+", ha="center", va="center", bbox=circle)
        ax.plot([0, -1.4, -1.4], [start, start, y], color=INK, linewidth=0.8)
        ax.annotate("", (-0.27, y), (-1.4, y), arrowprops=arrow)
        start = y + 0.5
    top = len(parts)
    ax.annotate("", (0, top), (0, top - 0.7), arrowprops=arrow)


# %% alt="Two diagrams of a block, from bottom to top. Post-norm: attention, plus, norm, feed-forward, plus, norm; a line leads from the input of each sublayer to its plus. Pre-norm: norm, attention, plus, norm, feed-forward, plus; the line leaves before the norm, so that a path from bottom to top passes only the two plus signs."
figure, axes = plt.subplots(1, 2, figsize=(5.2, 3.6))
for ax, (title, parts) in zip(axes, ORDERS.items(), strict=True):
    draw_block(ax, title, parts)
plt.show()

# %% [markdown]
# In code, the parts are arguments, so that each can be removed. The feed-forward layer is two
# linear layers with a ReLU between them; the inner one is four times as wide as the model.

# %%
import torch
from IPython.display import Markdown, display
from torch import nn

from headnotes import fast
from headnotes.positions import sinusoids

torch.set_num_threads(1)
d_model, heads = 32, 4


class Block(nn.Module):
    def __init__(self, norm="before", residual=True, without=None):
        super().__init__()
        self.norm, self.residual, self.without = norm, residual, without
        self.attention = fast.MultiHeadAttention(heads, d_model, dropout_prob=0.0)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, d_model)
        )
        self.attention_norm = nn.LayerNorm(d_model)
        self.feed_forward_norm = nn.LayerNorm(d_model)

    def attend(self, x):
        return self.attention(query=x, key=x, value=x, is_causal=True)

    def add(self, x, sublayer, norm):
        y = sublayer(norm(x) if self.norm == "before" else x)
        if self.residual:
            y = x + y
        return norm(y) if self.norm == "after" else y

    def forward(self, x):
        if self.without != "attention":
            x = self.add(x, self.attend, self.attention_norm)
        if self.without != "feed-forward":
            x = self.add(x, self.feed_forward, self.feed_forward_norm)
        return x


# %% [markdown]
# ## The feed-forward layer: each position by itself
#
# Attention is the only part of the block that moves information between positions. The
# feed-forward layer, like the normalization, computes each position from itself alone. A
# change of position 2 changes nothing else:

# %%
torch.manual_seed(14)
block = Block().eval()
x = torch.randn(5, 1, d_model)
changed = x.clone()
changed[2] += 1
difference = block.feed_forward(changed) - block.feed_forward(x)
print("feed-forward:", *(difference.abs().amax(dim=(1, 2)) > 0).int().tolist())
difference = block.attend(changed) - block.attend(x)
print("attention:   ", *(difference.abs().amax(dim=(1, 2)) > 0).int().tolist())

# %% [markdown]
# What it adds is a nonlinear function of the position. Attention chooses *where* its values
# come from by a softmax, but its output is a weighted mean of linear maps of the inputs.
# And it is where most of the parameters are: $8\,d^2$ of the weights, against $4\,d^2$ in the
# attention layer.

# %%
for name, part in block.named_children():
    print(f"{name:17} {sum(p.numel() for p in part.parameters()):6,}")
weights = [p.numel() for p in block.feed_forward.parameters() if p.dim() == 2]
assert sum(weights) == 8 * d_model**2

# %% [markdown]
# ## Deep stacks: what residuals and norms preserve
#
# We stack 24 blocks, at initialization, and follow random inputs through them. How much of the
# residual stream differs between positions? And how large is the gradient that arrives at each
# block, if that at the output has norm 1?

# %%
depth = 24
KINDS = {
    "pre-norm": {},
    "post-norm": {"norm": "after"},
    "no norm": {"norm": None},
    "no residual": {"residual": False},
    "neither": {"norm": None, "residual": False},
}


def follow(**options):
    """After each block: share that differs, deviation, norm of the gradient."""
    torch.manual_seed(3)
    x = torch.randn(16, 4, d_model)
    states = []
    for _ in range(depth):
        x = Block(**options)(x.requires_grad_())
        x.retain_grad()
        states.append(x)
    gradient = torch.randn(x.shape)
    x.backward(gradient / gradient.norm())
    shares = [((x - x.mean(dim=0)).norm() / x.norm()).item() for x in states]
    deviations = [x.std().item() for x in states]
    return shares, deviations, [x.grad.norm().item() for x in states]


measured = {kind: follow(**options) for kind, options in KINDS.items()}

# %% alt="Two panels over the number of the block, on logarithmic axes. Left, the share of the stream that differs between positions: near 1 with residuals; without them it falls to a millionth, in 24 blocks with norms and in five without. Right, the norm of the gradient: between 0.01 and 5 in all kinds but one; without residuals and norms it falls below a billionth within ten blocks."
figure, axes = plt.subplots(1, 2, figsize=(6.6, 2.8))
for kind, (shares, _, gradients) in measured.items():
    for ax, values in zip(axes, (shares, gradients), strict=True):
        ax.semilogy(range(1, depth + 1), values, label=kind)
axes[0].set(xlabel="after block", ylabel="share that differs", ylim=(1e-8, 10))
axes[1].set(xlabel="after block", ylabel="norm of the gradient", ylim=(1e-12, 100))
figure.legend(
    *axes[0].get_legend_handles_labels(),
    loc="outside upper center",
    ncols=5,
    frameon=False,
)
plt.show()

# %%
print("             share that differs     deviation   gradient")
print("               block 6  block 24     block 24    block 1")
for kind, (shares, deviations, gradients) in measured.items():
    print(
        f"{kind:12}{shares[5]:10.1g}{shares[-1]:10.1g}"
        f"{deviations[-1]:13.2f}{gradients[0]:11.1g}"
    )
last = {kind: shares[-1] for kind, (shares, *_) in measured.items()}
assert all(last[kind] > 0.4 for kind in ("pre-norm", "post-norm", "no norm"))
assert last["no residual"] < 1e-5
assert measured["neither"][2][0] < 1e-20
assert measured["no norm"][1][-1] > 2 * measured["pre-norm"][1][-1]

# %% [markdown]
# **Residuals keep tokens apart.** The output of attention is a mean, and a mean of means of
# means is the same for all positions: without residuals, the stream forgets which token is
# where ([Dong et al. 2021](https://arxiv.org/abs/2103.03404)). With them, the token itself is
# one term of the sum.
#
# **Residuals carry the gradient.** The derivative of $x + f(x)$ is $1 + f'(x)$, so that a path
# leads from the output to each block whatever $f$ does. Without residuals and norms the gradient
# is a product of 48 small factors. Norms alone scale it up again, but what they amplify has
# little left that differs.
#
# **Norms bound the stream.** Without a norm, each sublayer scales with its input, and the sum
# grows exponentially with the depth. Pre-norm gives each sublayer an input of variance 1, so
# that the stream grows slowly; post-norm sets its variance to 1 after each sum.
#
# ## A task for both sublayers
#
# A fixed table holds a random answer for each pair of the 8 tokens. At each position, the model
# is to give the answer for the token before it and the token itself. Attention has to fetch the
# token before, and a nonlinear function has to look up one of 64 answers. A random guess among
# 8 has a loss of $\ln 8 \approx 2.08$.

# %%
vocab_size, length, layers = 8, 16, 2
generator = torch.Generator().manual_seed(5)
answers = torch.randint(vocab_size, (vocab_size, vocab_size), generator=generator)
positions = sinusoids(length, d_model).float().unsqueeze(1)  # [length, 1, d_model]


class Model(nn.Module):
    def __init__(self, norm="before", **options):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.Sequential(*(Block(norm, **options) for _ in range(layers)))
        # In pre-norm, nothing else normalizes the end of the stream.
        self.norm = nn.LayerNorm(d_model) if norm == "before" else nn.Identity()
        self.readout = nn.Linear(d_model, vocab_size)

    def forward(self, tokens):
        x = self.blocks(self.embed(tokens) + positions)
        return self.readout(self.norm(x))


def sequences(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length, batch_size), generator=generator)


def loss_on(model, tokens):
    right = answers[tokens[:-1], tokens[1:]]  # the first token has none before it
    return nn.functional.cross_entropy(model(tokens)[1:].flatten(0, 1), right.flatten())


# %% [markdown]
# ## Each part removed once
#
# Six models of two blocks are trained on the same sequences for 100 steps. Adam starts with its
# full learning rate. The losses are those on 200 new sequences.


# %%
def train(lr, warmup=0, steps=100, **options):
    torch.manual_seed(1)
    model = Model(**options)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    losses = []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lr * min(1, step / (warmup + 1))
        loss = loss_on(model, sequences(16, seed=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, loss_on(model, sequences(200, seed=0)).item()


REMOVED = {
    "pre-norm": {},
    "post-norm": {"norm": "after"},
    "no norm": {"norm": None},
    "no residual": {"residual": False},
    "no feed-forward": {"without": "feed-forward"},
    "no attention": {"without": "attention"},
}
trained = {name: train(0.01, **options) for name, options in REMOVED.items()}
faster = {name: train(0.03, **REMOVED[name]) for name in list(REMOVED)[:3]}

rows = ["|model|loss, learning rate 0.01|loss, learning rate 0.03|", "|---|--:|--:|"]
for name, (_, loss) in trained.items():
    other = f"{faster[name][1]:.2f}" if name in faster else ""
    rows.append(f"|{name}|{loss:.2f}|{other}|")
display(Markdown("\n".join(rows)))

# %% alt="Two panels of training losses over 100 steps. Left, learning rate 0.01: pre-norm, post-norm and no norm fall together to about 0.2; no feed-forward falls more slowly; no attention stays near 1.65 and no residual near 2.05. Right, learning rate 0.03: only pre-norm falls, to about 0.4; the others stay above 1."
figure, axes = plt.subplots(1, 2, figsize=(6.6, 3.0), sharey=True)
for ax, runs, lr in zip(axes, (trained, faster), (0.01, 0.03), strict=True):
    for name, (losses, _) in runs.items():
        curve = torch.tensor(losses).unfold(0, 10, 1).mean(dim=1)
        ax.plot(range(10, 101), curve, label=name)
    ax.set(title=f"learning rate {lr}", xlabel="step", ylim=(0, 2.5))
axes[0].set(ylabel="loss (mean of 10 steps)")
handles = axes[0].get_legend_handles_labels()
figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False)
plt.show()

# %% [markdown]
# - **Attention** removed: the model knows its own token only. The loss stays where the best
#   guess from one token is.
# - **Residual connections** removed: nothing is learned, in two blocks already.
# - **Feed-forward** removed: the loss falls more slowly. The softmax of the second attention
#   layer is a nonlinear function, too, and can look up answers, but with fewer parameters.
# - **Norms** removed: at the lower rate, no difference in a stack of two blocks. At the higher
#   rate only pre-norm learns the task.

# %%
loss = {name: value for name, (_, value) in trained.items()}
loss_faster = {name: value for name, (_, value) in faster.items()}
assert max(loss[name] for name in ("pre-norm", "post-norm", "no norm")) < 0.25
assert 1.4 * loss["pre-norm"] < loss["no feed-forward"] < 0.8
assert 1.5 < loss["no attention"] < 1.8
assert loss["no residual"] > 2
assert loss_faster["pre-norm"] < 0.6
assert min(loss_faster[name] for name in ("post-norm", "no norm")) > 1

# %% [markdown]
# This is why pre-norm has replaced post-norm: it allows higher learning rates and deeper stacks
# ([Xiong et al. 2020](https://arxiv.org/abs/2002.04745)). Since then parts were exchanged, but
# the block has stayed the same. Llama and most models after it normalize with
# [RMSNorm](https://arxiv.org/abs/1910.07467), which does not subtract the mean, and their
# feed-forward layer is a gated one, [SwiGLU](https://arxiv.org/abs/2002.05202).
#
# ## Try it: warm-up
#
# The paper of 2017 trains its post-norm model with a *warm-up*: the learning rate rises
# linearly from almost 0. Train the post-norm model at a rate of 0.03 with a warm-up of 60 of
# its 100 steps. Does it learn the task?

# %% fold="Answer"
_, warm = train(0.03, warmup=60, norm="after")
print(f"without warm-up {loss_faster['post-norm']:.2f}, with warm-up {warm:.2f}")
assert warm < 0.7 * loss_faster["post-norm"]

# %% [markdown]
# It learns most of it. Pre-norm reaches a lower loss without a warm-up.
#
# ## In short
#
# - A block is attention and a feed-forward layer, each with a residual connection and a norm.
# - Attention moves information between positions; the feed-forward layer transforms each
#   position by itself, and has two thirds of the weights.
# - Residual connections keep the positions apart, and carry the gradient to every block.
# - Norms give each sublayer inputs of one size. Before the sublayer (pre-norm), they allow
#   higher learning rates than after the sum (post-norm).
#
# Next: [a trained translation model](15_translation.md), built of such blocks.
