r"""# Translator: an encoder-decoder Transformer

This module is a complete sequence-to-sequence model: a Transformer with an encoder and
a decoder, built from the attention, the positional encoding and the masks of this
package. [dates](dates.md) is a task that it learns in minutes on a CPU, and
[training](training.md) trains it.

The **encoder** computes one vector per source token. The **decoder** generates the
target one token at a time; each of its layers attends to the target so far, and to the
encoder's output, the *memory*. So there are three kinds of attention:

| attention | queries | keys and values | mask |
|---|---|---|---|
| self-attention of the encoder | source | source | padding |
| causal self-attention of the decoder | target | target | causal |
| cross-attention of the decoder | target | memory | padding of the source |

Each attention, and each feed-forward layer, is one step of a *residual stream*: its
input is normalized, and its output is added to the stream,

$$x \leftarrow x + \operatorname{sublayer}(\operatorname{LayerNorm}(x))$$

The paper normalizes after the sum (*post-norm*). Normalizing before it (*pre-norm*)
leaves a path from the loss to every layer that passes no normalization; such a model
trains without a warm-up of the learning rate.

Token numbers are `[seq_len, batch_size]`, vectors `[seq_len, batch_size, d_model]`.
Source and target share one vocabulary, which begins with four special tokens.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3; [On Layer Normalization in the Transformer
Architecture](https://arxiv.org/abs/2002.04745), Xiong et al. 2020, for pre-norm.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headnotes import fast
from headnotes.checks import check_sizes
from headnotes.fast import KeyValueCache
from headnotes.masks.build import causal, padding
from headnotes.positions import Embeddings, PositionalEncoding

# The tokens that every vocabulary begins with: padding, unknown characters, and the
# start and the end of a target.
PAD, UNKNOWN, START, END = range(4)


# What makes an attention from `heads`, `d_model` and `dropout_prob`.
Attention = Callable[[int, int, float], Any]


class FeedForward(nn.Sequential):
    r"""Two linear layers with a ReLU between them, applied to each position alone.

    $$\operatorname{FFN}(x) = W_2 \max(0,\, W_1 x + b_1) + b_2$$

    Attention mixes positions, and its output is linear in its values; this layer is
    where a position is transformed by a nonlinear function of itself.
    Source: Vaswani et al. 2017, section 3.3.

    >>> FeedForward(d_model=6, d_ff=24)(torch.randn(7, 2, 6)).shape
    torch.Size([7, 2, 6])
    """

    def __init__(self, d_model: int, d_ff: int) -> None:
        check_sizes(d_model=d_model, d_ff=d_ff)
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    r"""Self-attention over the source, then a feed-forward layer; pre-norm.

    `attention` makes the attention from `heads`, `d_model` and `dropout_prob`: that of
    the core, of `headnotes.fast`, or a variant.

    >>> layer = EncoderLayer(heads=2, d_model=6, d_ff=24)
    >>> layer(torch.randn(7, 3, 6), padding(torch.tensor([7, 5, 1]), 7)).shape
    torch.Size([7, 3, 6])
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        d_ff: int,
        dropout_prob: float = 0.1,
        attention: Attention = fast.MultiHeadAttention,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = attention(heads, d_model, dropout_prob)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(
        self,
        x: Tensor,  # [source_len, batch_size, d_model]
        mask: Tensor,  # [1, source_len, batch_size]
    ) -> Tensor:
        """Transform the vectors of the source; padding is hidden by `mask`."""
        y: Tensor = self.attention_norm(x)  # [source_len, batch_size, d_model]
        y = self.attention(query=y, key=y, value=y, mask=mask)
        x = x + self.dropout(y)  # [source_len, batch_size, d_model]

        y = self.feed_forward(self.feed_forward_norm(x))
        x = x + self.dropout(y)  # [source_len, batch_size, d_model]
        return x


class LayerCache(NamedTuple):
    """What a decoder layer keeps between two tokens.

    The KV cache of the self-attention grows by one position per token. The keys and
    values of the memory, `[batch_size, heads, source_len, d_k]`, never change.
    """

    target: KeyValueCache
    keys: Tensor
    values: Tensor


class DecoderLayer(nn.Module):
    r"""Causal self-attention, cross-attention to the memory, feed-forward; pre-norm.

    `causal_attention` makes the self-attention, `attention` the cross-attention.

    >>> layer = DecoderLayer(heads=2, d_model=6, d_ff=24)
    >>> x, memory = torch.randn(5, 3, 6), torch.randn(7, 3, 6)
    >>> memory_mask = padding(torch.tensor([7, 5, 1]), 7)
    >>> layer(x, memory, causal(5), memory_mask).shape
    torch.Size([5, 3, 6])
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        d_ff: int,
        dropout_prob: float = 0.1,
        attention: Attention = fast.MultiHeadAttention,
        causal_attention: Attention | None = None,
    ) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(d_model)
        self.self_attention = (causal_attention or attention)(
            heads, d_model, dropout_prob
        )
        self.cross_attention_norm = nn.LayerNorm(d_model)
        self.cross_attention = attention(heads, d_model, dropout_prob)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(
        self,
        x: Tensor,  # [target_len, batch_size, d_model]
        memory: Tensor,  # [source_len, batch_size, d_model]
        mask: Tensor,  # [target_len, target_len, 1]
        memory_mask: Tensor,  # [1, source_len, batch_size]
    ) -> Tensor:
        """Transform the vectors of the whole target at once, as in training."""
        y: Tensor = self.self_attention_norm(x)  # [target_len, batch_size, d_model]
        y = self.self_attention(query=y, key=y, value=y, mask=mask)
        x = x + self.dropout(y)  # [target_len, batch_size, d_model]

        y = self.cross_attention_norm(x)  # [target_len, batch_size, d_model]
        y = self.cross_attention(query=y, key=memory, value=memory, mask=memory_mask)
        x = x + self.dropout(y)  # [target_len, batch_size, d_model]

        y = self.feed_forward(self.feed_forward_norm(x))
        x = x + self.dropout(y)  # [target_len, batch_size, d_model]
        return x

    def cache(self, memory: Tensor, max_len: int) -> LayerCache:
        """Project the memory once, and make room for `max_len` target positions."""
        batch_size = memory.shape[1]
        cross = self.cross_attention
        keys, values = (
            project(memory).permute(1, 2, 0, 3).contiguous()
            for project in (cross.key, cross.value)
        )  # [batch_size, ...]
        target = self.self_attention.cache(batch_size, max_len)
        return LayerCache(target, keys, values)

    def decode(
        self,
        x: Tensor,  # [1, batch_size, d_model]
        cache: LayerCache,
        memory_mask: Tensor,  # [1, ..., batch_size]
    ) -> Tensor:
        """Transform the vector of the next target token; the cache grows by it."""
        y: Tensor = self.self_attention_norm(x)  # [1, batch_size, d_model]
        y, _ = self.self_attention.decode(y, cache.target)
        x = x + y  # [1, batch_size, d_model]

        # The one query may attend to the whole memory, whose projections are cached.
        cross = self.cross_attention
        query = cross.query(self.cross_attention_norm(x))  # [1, batch_size, ...]
        context = cross.attend_to_all(
            query, cache.keys, cache.values, memory_mask, None
        )
        x = x + cross.output(context.flatten(-2))  # [1, batch_size, d_model]

        y = self.feed_forward(self.feed_forward_norm(x))
        return x + y  # [1, batch_size, d_model]


class Translator(nn.Module):
    r"""An encoder-decoder Transformer: from source tokens to target tokens.

    `attention` makes every attention from `heads`, `d_model` and `dropout_prob`;
    `causal_attention`, if given, makes the self-attention of the decoder, for example
    with grouped heads and rotary positions. With `tied`, the table of embeddings is
    also the weight of the output layer, as in the paper.

    Logits `[target_len, batch_size, vocab_size]` are for the token *after* each target
    position, so the target begins with `START`:

    >>> model = Translator(vocab_size=11, d_model=8, heads=2, d_ff=16).eval()
    >>> source, source_lens = torch.randint(4, 11, (7, 3)), torch.tensor([7, 5, 1])
    >>> target = torch.full((5, 3), START)
    >>> model(source, target, source_lens).shape
    torch.Size([5, 3, 11])

    Decoding with the KV cache gives the tokens that decoding without it gives:

    >>> tokens = model.greedy(source, source_lens, max_len=5)
    >>> model.greedy(source, source_lens, max_len=5, use_cache=False).equal(tokens)
    True

    The core module has the same parameters, and stores its attention weights:

    >>> from headnotes import MultiHeadAttention
    >>> twin = Translator(11, 8, 2, d_ff=16, attention=MultiHeadAttention).eval()
    >>> twin.load_state_dict(model.state_dict())
    <All keys matched successfully>
    >>> _ = twin(source, target, source_lens)
    >>> twin.decoder[0].cross_attention.attn.shape
    torch.Size([5, 7, 3, 2])
    """

    # A `ModuleList` does not tell the type of its items.
    encoder: Any
    decoder: Any

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 64,
        heads: int = 4,
        layers: int = 2,
        d_ff: int = 256,
        dropout_prob: float = 0.1,
        *,
        tied: bool = True,
        attention: Attention = fast.MultiHeadAttention,
        causal_attention: Attention | None = None,
    ) -> None:
        super().__init__()
        check_sizes(layers=layers)
        sizes = heads, d_model, d_ff, dropout_prob
        self.embeddings = Embeddings(vocab_size, d_model)
        self.positions = PositionalEncoding(d_model, dropout_prob)
        self.encoder = nn.ModuleList(
            EncoderLayer(*sizes, attention) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            DecoderLayer(*sizes, attention, causal_attention) for _ in range(layers)
        )
        # In a pre-norm model nothing has normalized the stream where it ends.
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder_norm = nn.LayerNorm(d_model)
        self.output = None if tied else nn.Linear(d_model, vocab_size, bias=False)

        # Glorot's initialization keeps the variance through a layer. It is larger than
        # PyTorch's default, and the model learns in fewer steps.
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

        # Embeddings are multiplied by $\sqrt{d_{model}}$: initialized like this, they
        # are as large as the positions, and tied logits begin with variance 1.
        nn.init.normal_(self.embeddings.table.weight, std=d_model**-0.5)

    def forward(
        self,
        source: Tensor,  # [..., batch_size]
        target: Tensor,  # [target_len, batch_size]
        source_lens: Tensor,  # [batch_size]
    ) -> Tensor:
        """Logits for the token after each target position, all at once.

        Padding follows the tokens of a target, so the causal mask hides it from them.
        """
        memory, memory_mask = self.encode(
            source, source_lens
        )  # [..., batch_size, d_model], [1, ..., batch_size]
        return self.decode(target, memory, memory_mask)  # [target_len, batch_size, ...]

    def encode(
        self,
        source: Tensor,  # [source_len, batch_size]
        source_lens: Tensor,  # [batch_size]
    ) -> tuple[Tensor, Tensor]:
        """The memory `[source_len, batch_size, d_model]`, and its padding mask."""
        mask = padding(source_lens, k_len=len(source))  # [1, source_len, batch_size]
        x = self.positions(self.embeddings(source))  # [source_len, batch_size, d_model]
        for layer in self.encoder:
            x = layer(x, mask)  # [source_len, batch_size, d_model]
        return self.encoder_norm(x), mask

    def decode(
        self,
        target: Tensor,  # [target_len, batch_size]
        memory: Tensor,  # [source_len, batch_size, d_model]
        memory_mask: Tensor,  # [1, source_len, batch_size]
    ) -> Tensor:
        """Logits for the token after each target position, given the memory."""
        mask = causal(len(target), device=target.device)  # [target_len, target_len, 1]
        x = self.positions(self.embeddings(target))  # [target_len, batch_size, d_model]
        for layer in self.decoder:
            x = layer(x, memory, mask, memory_mask)  # [target_len, batch_size, d_model]
        return self.logits(x)  # [target_len, batch_size, ...]

    def decode_next(
        self,
        tokens: Tensor,  # [1, batch_size]
        caches: list[LayerCache],
        memory_mask: Tensor,  # [1, ..., batch_size]
    ) -> Tensor:
        """Logits `[1, batch_size, vocab_size]` for the token after `tokens`."""
        position = len(caches[0].target)
        x = self.embeddings(tokens)  # [1, batch_size, d_model]
        x = x + self.positions.table[position].to(x.dtype)  # [1, batch_size, d_model]
        for layer, cache in zip(self.decoder, caches, strict=True):
            x = layer.decode(x, cache, memory_mask)  # [1, batch_size, d_model]
        return self.logits(x)  # [1, batch_size, ...]

    def logits(
        self,
        x: Tensor,  # [target_len, ..., d_model]
    ) -> Tensor:
        """The last normalization, and the output layer."""
        layer = self.embeddings.table if self.output is None else self.output
        x = self.decoder_norm(x)  # [target_len, ..., d_model]
        return F.linear(x, layer.weight)  # [target_len, ...]

    @torch.no_grad()
    def greedy(
        self,
        source: Tensor,  # [..., batch_size]
        source_lens: Tensor,  # [batch_size]
        max_len: int,
        use_cache: bool = True,
    ) -> Tensor:
        """Generate the most probable token at each step: `[target_len, batch_size]`.

        The result has at most `max_len` tokens; what follows an `END` is `PAD`. Without
        the cache, each step computes all positions again, of which it needs the last.
        """
        check_sizes(max_len=max_len)
        memory, memory_mask = self.encode(
            source, source_lens
        )  # [..., batch_size, d_model], [1, ..., batch_size]
        caches = [layer.cache(memory, max_len) for layer in self.decoder]
        tokens = torch.full_like(source[:1], START)  # [1, batch_size]
        ended = torch.zeros_like(tokens, dtype=torch.bool)  # [1, batch_size]
        while len(tokens) <= max_len and not ended.all():
            if use_cache:
                logits = self.decode_next(
                    tokens[-1:], caches, memory_mask
                )  # [1, batch_size, ...]
            else:
                # [1, batch_size, ...]
                logits = self.decode(tokens, memory, memory_mask)[-1:]
            best = logits.argmax(-1).masked_fill(ended, PAD)  # [1, batch_size]
            tokens = torch.cat([tokens, best])  # [..., batch_size]
            ended = ended | (best == END)  # [1, batch_size]
        return tokens[1:]  # [..., batch_size]

    @torch.no_grad()
    def beam_search(
        self,
        source: Tensor,  # [source_len, batch_size]
        source_lens: Tensor,  # [batch_size]
        max_len: int,
        beams: int = 4,
    ) -> tuple[Tensor, Tensor]:
        """Keep the `beams` most probable targets at each step, and return the best.

        The result is `[target_len, batch_size]`, with its log-probability,
        `[batch_size]`. Nothing corrects for length, so short targets are favored: a
        probability only shrinks with each token.

        >>> model = Translator(vocab_size=11, d_model=8, heads=2, d_ff=16).eval()
        >>> source, source_lens = torch.randint(4, 11, (7, 3)), torch.tensor([7, 5, 1])
        >>> tokens, _ = model.beam_search(source, source_lens, max_len=5, beams=1)
        >>> tokens.equal(model.greedy(source, source_lens, max_len=5))
        True
        >>> _, scores = model.beam_search(source, source_lens, max_len=5, beams=2)
        >>> scores.shape
        torch.Size([3])
        """
        check_sizes(max_len=max_len, beams=beams)
        # The beams of one item are neighbors in the batch, from the best down.
        source = source.repeat_interleave(beams, 1)  # [source_len, batch_size * beams]
        memory, memory_mask = self.encode(
            source, source_lens.repeat_interleave(beams)
        )  # [source_len, batch_size * beams, d_model], [1, source_len, ...]
        caches = [layer.cache(memory, max_len) for layer in self.decoder]
        tokens = torch.full_like(source[:1], START)  # [1, batch_size * beams]
        # [batch_size]
        first_row = torch.arange(0, source.shape[1], beams, device=source.device)
        # All beams begin alike; only the first of each item counts.
        scores = memory.new_full(
            (len(first_row), beams), -torch.inf
        )  # [batch_size, beams]
        scores[:, 0] = 0
        ended = torch.zeros_like(tokens[0], dtype=torch.bool)  # [batch_size * beams]
        while len(tokens) <= max_len and not ended.all():
            logits = self.decode_next(
                tokens[-1:], caches, memory_mask
            )  # [1, batch_size * beams, ...]
            steps = logits[0].log_softmax(-1)  # [batch_size * beams, ...]
            # A target that has ended is continued by padding, at no cost.
            steps[ended] = -torch.inf
            steps[ended, PAD] = 0
            # [batch_size, beams, ...]
            totals = scores.unsqueeze(-1) + steps.view(*scores.shape, -1)
            scores, best = totals.flatten(1).topk(beams)  # [batch_size, beams]
            # Which beam each winner continues: its tokens and its cache go with it.
            beam = best // steps.shape[1]  # [batch_size, beams]
            rows = (first_row.unsqueeze(1) + beam).flatten()  # [batch_size * beams]
            token = (best % steps.shape[1]).flatten()  # [batch_size * beams]
            # [..., batch_size * beams]
            tokens = torch.cat([tokens[:, rows], token.unsqueeze(0)])
            for cache in caches:
                # [2, batch_size * beams, ...]
                cache.target.buffer = cache.target.buffer[:, rows]
            ended = (token == END) | (token == PAD)  # [batch_size * beams]
        return tokens[1:, ::beams], scores[:, 0]  # [..., batch_size], [batch_size]
