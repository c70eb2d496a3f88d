"""Attention in the styles of public code is called without options, and passes.

Each class is one way in which an attention takes more, or other, arguments than its
inputs; the fields of the adapter tell what was inferred.
"""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_laws import LAWS, checker, infer
from attention_laws.adapter import Adapter, CallError, MaskArgument, Options
from attention_laws.calling import CallProbe
from attention_laws.checker import (
    build_by_function,
    check_law,
    with_context,
    with_masked_context,
)
from attention_laws.infer import infer_adapter
from specimens.base import Correct, MaskedSelfAttention, Rotary
from specimens.masking import BlockWithContext


class OfOneInput(Correct):
    """Self-attention with one input, for the classes below."""

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return Correct.forward(self, x, x, x, mask)


class TakesHeightAndWidth(OfOneInput):
    def forward(self, x: Tensor, H: int, W: int) -> Any:  # type: ignore[override]  # noqa: N803
        image = x.unflatten(1, (H, W))
        return self.attend(image.flatten(1, 2))


class TakesResidual(OfOneInput):
    def forward(self, x: Tensor, residual: Tensor, alibi: Tensor) -> Any:  # type: ignore[override]
        heads = alibi.unflatten(0, (len(x), self.heads))
        return residual + self.attend(x) + heads.sum()


class TakesCondition(OfOneInput):
    def forward(self, x: Tensor, c: Tensor) -> Any:  # type: ignore[override]
        return c[:, None] * self.attend(x)


class TakesCoordinates(OfOneInput):
    def forward(self, x: Tensor, coords: Tensor) -> Any:  # type: ignore[override]
        distance = coords[:, :, None] - coords[:, None]
        return self.attend(x) + 0.1 * distance.square().sum((-1, -2))[..., None]


class ReturnsCoordinates(TakesCoordinates):
    def forward(self, x: Tensor, coords: Tensor) -> Any:  # type: ignore[override]
        return coords, super().forward(x, coords)


class TakesTypes(OfOneInput):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.types = nn.Embedding(5, d_model)

    def forward(self, x: Tensor, atom_types: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x + self.types(atom_types))


class TakesEdges(OfOneInput):
    def forward(self, x: Tensor, edges: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x, edges.expand(-1, x.shape[1], x.shape[1]) == 0)


class TakesDocumentedEdges(OfOneInput):
    """x: [..., n, d_model], edges: [..., n, n, d_edge]; returns both."""

    def __init__(self, d_model: int, heads: int, d_edge: int = 6) -> None:
        super().__init__(d_model, heads)
        self.bias, self.update = nn.Linear(d_edge, heads), nn.Linear(heads, d_edge)

    def forward(self, x: Tensor, edges: Tensor) -> Any:  # type: ignore[override]
        self.edges = edges
        return self.attend(x), edges + self.update(self.scores.movedim(1, -1))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.scores = super().score(q, k) + self.bias(self.edges).movedim(-1, 1)
        return self.scores


class TakesPairsOfFrequencies(OfOneInput):
    """A cosine and a sine for each pair of features."""

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Any:  # type: ignore[override]
        self.pairs = freqs_cis.view(x.shape[1], -1, 2)
        return self.attend(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.rotate(q), self.rotate(k))

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.pairs.unbind(-1)
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class TakesRotations(TakesPairsOfFrequencies):
    """A matrix for each pair of features."""

    def forward(self, x: Tensor, pe: Tensor) -> Any:  # type: ignore[override]
        self.matrices = pe
        return self.attend(x)

    def rotate(self, x: Tensor) -> Tensor:
        return (self.matrices @ x.unflatten(-1, (-1, 2))[..., None]).flatten(-3)


class TakesCosinesAndSines(OfOneInput):
    """Of halves of features, before an axis of heads: both [1, n, 1, d_k / 2]."""

    def forward(self, x: Tensor, cos_sin: Any) -> Any:  # type: ignore[override]
        cos, sin = cos_sin
        if cos.shape != (1, x.shape[1], 1, x.shape[2] // self.heads // 2):
            raise ValueError("cos_sin")
        self.cos, self.sin = cos[:, :, 0], sin[:, :, 0]
        return self.attend(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(self.rotate(q), self.rotate(k))

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)


class TakesTables(TakesCosinesAndSines):
    """Of halves of features, as two arguments without an axis of batch items."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:  # type: ignore[override]
        self.cos, self.sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
        return self.attend(x)


class UnpacksPair(OfOneInput):
    """Two unknown arguments, for which two items of a batch are no other name."""

    def forward(self, x: Tensor, tables: Any) -> Any:  # type: ignore[override]
        one, other = tables
        return self.attend(x) + one.sum() + other.sum()


class OfFiveLabels(Correct):
    """Learned queries, as many as the tokens of the first calls."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.labels = nn.Parameter(torch.randn(5, d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.labels.expand(len(x), -1, -1), x, x)


class TakesPackedLengths(OfOneInput):
    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Any:  # type: ignore[override]
        assert cu_seqlens[-1] == max_seqlen == len(x)
        return self.attend(x[None])[0]


class NeedsMemory(Correct):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:  # type: ignore[override]
        assert memory is not None
        return super().forward(x, memory, memory)


class NeedsRegions(NeedsMemory):
    """x: (batch, words, d_model), regions: (batch, regions, d_model), of an image."""

    def forward(self, x: Tensor, regions: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, regions)


class QueryVector(Correct):
    """One query for each batch item, as in a decoder with a recurrent state."""

    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> Any:  # type: ignore[override]
        query = hidden.unsqueeze(1)
        assert query.dim() == 3
        return super().forward(query, encoder_outputs, encoder_outputs)[:, 0]


class IgnoresKeys(OfOneInput):
    """The mask is required, and True hides a key."""

    def forward(self, x: Tensor, key_padding: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x, ~key_padding[:, None])


class TakesState(OfOneInput):
    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Any:  # type: ignore[override]
        state["x"] = x
        return self.attend(x)


class OfFrames(OfOneInput):
    def forward(self, video: Tensor) -> Any:  # type: ignore[override]
        _, _, _, height, width = video.shape
        x = video.permute(0, 3, 4, 2, 1).flatten(0, 2)
        y = self.attend(x).unflatten(0, (-1, height, width))
        return y.permute(0, 4, 3, 1, 2)


class OfPixels(OfOneInput):
    """Any number of axes after the channels; two groups of channels."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if x.shape[1] % 6:
            raise ValueError("channels")
        flat = x.reshape(len(x), x.shape[1], -1)
        return self.attend(flat.mT).mT.reshape(x.shape)


class DecoderLayer(nn.Module):
    """Self-attention with a mask, then attention to the memory."""

    def __init__(self, d_model: int, heads: int, d_ff: int) -> None:
        super().__init__()
        self.own, self.other = Correct(d_model, heads), Correct(d_model, heads)
        self.ff = nn.Linear(d_model, d_ff)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Any:
        y = tgt + self.own(tgt, tgt, tgt, tgt_mask)
        return self.ff(y + self.other(y, memory, memory, memory_mask))


class CausalDecoderLayer(DecoderLayer):
    def forward(self, tgt: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
        ones = torch.ones(1, tgt.shape[1], tgt.shape[1], dtype=torch.bool)
        return super().forward(tgt, memory, ones.tril())


class LocalRotary(Rotary):
    """A sliding window of three keys, which the constructor does not take."""

    sliding_window = 3

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        window = torch.ones_like(mask).triu(1 - self.sliding_window)
        return super().weigh(scores, mask & window)


class AddsItsInput(OfOneInput):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return x + self.attend(x)


class OverFeatures(OfOneInput):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q.mT @ k

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return v @ weights


class Guessed(OfOneInput):
    def __init__(
        self, d_model: int, heads: int, mlp_ratio: float, kernel_size: int, flag: bool
    ) -> None:
        super().__init__(d_model, heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


def with_weights(
    x: Tensor, w_qkv: Tensor, b_qkv: Tensor, w_out: Tensor, n_head: int
) -> Tensor:
    parts = (x @ w_qkv + b_qkv).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ w_out


def with_params(params: dict[str, Any], x: Tensor) -> Tensor:
    fused = x @ params["w_qkv"]
    bias = torch.zeros(fused.shape[-1])
    return with_weights(x, params["w_qkv"], bias, params["wo"], params["heads"])


class AddsToEdges(OfOneInput):
    """The required edges hide no key; the optional mask does."""

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        self.edges = 0.1 * (adj != 0)[:, None]
        return self.attend(x, mask)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.edges


class MixesWithEdges(Correct):
    """The weights are the mean of those of a softmax and the edges of a graph."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        adj_matrix: Tensor,
        mask: Tensor | None = None,
    ) -> Any:
        self.edges = adj_matrix[:, None] / adj_matrix.shape[-1]
        mask = mask if mask is None else mask[:, None]
        return super().forward(query, key, value, mask)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = (super().weigh(scores, mask) + self.edges) / 2
        return weights if mask is None else weights * mask[:, None]


class OfTwoStreams(Correct):
    """Names that tell nothing; the queries of both streams attend to both."""

    def __init__(self, embed_dim: int, heads: int, l_dim: int = 48) -> None:
        super().__init__(embed_dim, heads)
        self.other = nn.Linear(l_dim, embed_dim)

    def forward(self, v: Tensor, l: Tensor, pad: Tensor | None = None) -> Any:  # type: ignore[override]  # noqa: E741
        both = torch.cat([v, self.other(l)], dim=1)
        mask = torch.ones(len(v), 1, both.shape[1], dtype=torch.bool)
        if pad is not None:
            mask[:, 0, v.shape[1] :] = ~pad
        return super().forward(both, both, both, mask)[:, : v.shape[1]]


class OfAnyName(OfOneInput):
    def forward(self, x: Tensor, banned: Tensor | None = None) -> Any:  # type: ignore[override]
        return self.attend(x, None if banned is None else ~banned[:, None])


class OfQueriesAndKeys(Correct):
    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Any:
        mask = None if key_mask is None else key_mask[:, None]
        output = super().forward(query, key, value, mask)
        return output if query_mask is None else output * query_mask[..., None]


class OfRowOfMask(OfOneInput):
    """One mask of keys, of four axes."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        return self.attend(x, None if mask is None else mask[:, 0, :1].bool())


class OfMaskInKwargs(OfOneInput):
    def forward(self, x: Tensor, **others: Any) -> Any:  # type: ignore[override]
        pad = others.get("pad")
        return self.attend(x, None if pad is None else ~pad[:, None])


class OfProjections(nn.Module):
    """Takes queries, keys and values in one input."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def forward(self, qkv: Tensor) -> Any:
        parts = qkv.unflatten(1, (self.n_heads, -1)).chunk(3, dim=2)
        return features_first(*parts).flatten(1, 2)


def features_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhdq,bhdk->bhqk", q, k) / q.shape[2] ** 0.5
    return torch.einsum("bhqk,bhdk->bhdq", scores.softmax(-1), v)


def quiet_features_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhdq,bhdk->bhqk", q, k) / q.shape[2] ** 0.5
    scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1)
    weights = scores.softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bhdk->bhdq", weights, v)


class OfLayers(OfOneInput):
    """Stores its weights in each of several layers."""

    class Layer(OfOneInput):
        def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            self.attn = super().weigh(scores, mask)
            return self.attn

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.layers = nn.ModuleList([self.Layer(d_model, heads)])

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(self.layers[0].attend(x))  # type: ignore[operator]


class OfFramesAlone(OfOneInput):
    """Attention along one of two axes of positions."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        columns = x.transpose(1, 2)
        y = self.attend(columns.flatten(0, 1)).reshape(columns.shape)
        return y.transpose(1, 2)


class OfSizePerHead(OfOneInput):
    def __init__(self, width: int, nb_head: int, size_per_head: int) -> None:
        super().__init__(width, nb_head)
        assert width == nb_head * size_per_head

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


class OfOffset(OfOneInput):
    """A cache, and the position of the first new token."""

    def forward(  # type: ignore[override]
        self, x: Tensor, past: Any = None, offset: int = 0
    ) -> Any:
        x = x + torch.arange(offset, offset + x.shape[1])[:, None].cos()
        past = x if past is None else torch.cat([past, x], dim=1)
        ones = torch.ones(1, x.shape[1], past.shape[1], dtype=torch.bool)
        mask = ones.tril(past.shape[1] - x.shape[1])
        return Correct.forward(self, x, past, past, mask), past


class OfOtherContext(Correct):
    """A module of two widths, which is given as it is built."""

    def __init__(self) -> None:
        super().__init__(12, 3)
        self.of_context = nn.Linear(7, 12)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        context = self.of_context(x if context is None else context)
        return super().forward(x, context, context)


def of_example(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ v


def of_eight_heads(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, num_heads: int = 8
) -> Tensor:
    parts = (x @ weight for weight in (w_q, w_k, w_v))
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def sequence_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v)


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    part = torch.bucketize(torch.arange(len(q)), cu_seqlens[1:], right=True)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(part[:, None] != part, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


EDGES = "torch.ones({batch_size}, {length}, {k_len}){dtype}"


class ReadsMemory(nn.Module):
    """One query for each item; query: [B, D]; keys, values: [B, N, D]."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_model, d_model)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Any:
        weights = torch.einsum("bnd,bd->bn", keys, self.query(query)).softmax(1)
        return torch.einsum("bn,bnd->bd", weights, values)


class ReadsMemoryOfAnyShape(ReadsMemory):
    """The same, without a documented shape."""


class ReadsTimeFirst(ReadsMemory):
    """dec_state: [batch, d]; enc_states: [time, batch, d]; seen: [batch, time]."""

    def forward(  # type: ignore[override]
        self, dec_state: Tensor, enc_states: Tensor, seen: Tensor | None = None
    ) -> Any:
        values = enc_states.transpose(0, 1)
        seen = values.new_zeros(values.shape[:2]) if seen is None else seen
        return super().forward(dec_state, values + seen[..., None], values)


class MovesOn(nn.Module):
    """Weights move on by one token. query: [B, D]; memory: [B, N, D].

    keys: project(memory), for all steps. At first `state = attention.start(memory)`.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def project(self, memory: Tensor) -> Tensor:
        keys: Tensor = self.key(memory)
        return keys

    @staticmethod
    def start(memory: Tensor) -> Tensor:
        return torch.zeros_like(memory[..., 0]).index_fill_(
            1, torch.zeros(1, dtype=torch.long, device=memory.device), 1.0
        )

    def forward(
        self, query: Tensor, memory: Tensor, keys: Tensor, state: Tensor
    ) -> Any:
        weights = torch.einsum("bnd,bd->bn", keys, self.query(query)).softmax(1)
        weights = weights * (state + F.pad(state, (1, -1)))
        weights = weights / weights.sum(1, keepdim=True)
        return torch.einsum("bn,bnd->bd", weights, memory), weights


def of_tree(q: Tensor, k: Tensor, v: Tensor, parent: Tensor) -> Tensor:
    """q, k, v: (B, N, H, D); parent: (B, N), -1 for that of a first token."""
    near = F.one_hot(parent + 1, q.shape[1] + 1)[..., 1:].float()
    seen = torch.eye(q.shape[1]) + near
    for _ in range(q.shape[1]):
        seen = (seen + seen @ near).clamp(max=1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(seen[:, None] == 0, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


class OfBags(nn.Module):
    """Tokens of several bags in one sequence; each bag has one output."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.score, self.out = nn.Linear(d_model, 1), nn.Linear(d_model, 2)

    def forward(self, x: Tensor, bag_id: Tensor) -> Any:
        bags = F.one_hot(bag_id).T == 1
        scores = self.score(x).t().masked_fill(~bags, -torch.inf)
        weights = scores.softmax(1)
        return {"weights": weights.sum(0)[:, None], "logits": self.out(weights @ x)}


class StepOfDecoder(nn.Module):
    """One step, whose state is zero if it is left out.

    previous: [B, 1, E]; outputs: [B, N, 2H]; src_mask: [B, 1, N]; hidden: [1, B, H]
    """

    def __init__(self, emb_size: int, hidden_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(2 * hidden_size, hidden_size)
        self.out = nn.Linear(emb_size + 2 * hidden_size, hidden_size)

    def forward(
        self,
        previous: Tensor,
        outputs: Tensor,
        src_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Any:
        if hidden is None:
            hidden = outputs.new_zeros(1, len(outputs), self.key.out_features)
        scores = (self.key(outputs) @ hidden[0][..., None]).mT
        if src_mask is not None:
            scores = scores.masked_fill(src_mask == 0, -torch.inf)
        return self.out(torch.cat([previous, scores.softmax(-1) @ outputs], -1))


def decode_one(
    x: Tensor, past_k: Tensor, past_v: Tensor, to_q: Tensor, out: Tensor
) -> Tensor:
    """One token: x: [b, d]; past_k, past_v: [b, m, k]; to_q, out: [h, d, k]."""
    q = torch.einsum("bd,hdk->bhk", x, to_q)
    weights = torch.einsum("bhk,bmk->bhm", q, past_k).softmax(-1)
    return torch.einsum("bhm,bmk,hdk->bd", weights, past_v, out)


def decode_heads(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor
) -> Tensor:
    # q: [B, H, D]; k_cache, v_cache: [B, S, H, D]
    scores = torch.einsum("bhd,bshd->bhs", q, k_cache)
    hidden = torch.arange(k_cache.shape[1]) >= seq_lens[:, None]
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhs,bshd->bhd", weights, v_cache)


def of_weights(x: Tensor, w_q: Tensor, w_k: Tensor, w_o: Tensor) -> Tensor:
    """x: (batch, seq, width); w_q, w_k, w_o: (heads, width, d_head)"""
    q, k = (torch.einsum("bld,hde->bhle", x, w) for w in (w_q, w_k))
    context = F.scaled_dot_product_attention(q, k, k)
    return torch.einsum("bhle,hde->bld", context, w_o)


def of_heads_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
) -> Any:
    """Heads first in, positions first out, and the weights."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    last = sinks[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, last], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2), weights


def of_packed(qkv: Tensor, causal: bool = False) -> Tensor:
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def of_packed_context(q: Tensor, kv: Tensor) -> Tensor:
    k, v = kv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)


def of_list(qkv: list[Tensor], num_heads: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in qkv)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def of_other_lengths(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Tensor:
    assert cu_seqlens_q[-1] == len(q)
    assert cu_seqlens_k[-1] == len(k)
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first).transpose(0, 1)


class PoolsWithClass(OfOneInput):
    """An image whose mean is one token more, with a table of positions for all."""

    def __init__(self, dim: int, heads: int, spacial_dim: int = 7) -> None:
        super().__init__(dim, heads)
        self.positions = nn.Parameter(torch.randn(spacial_dim**2 + 1, dim))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        tokens = x.flatten(2).mT
        tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + self.positions
        return self.attend(tokens)[:, 0]


class OfSides(OfOneInput):
    """A table for the rows and columns of an image, of a size that is a pair."""

    def __init__(self, dim: int, heads: int, input_size: Any) -> None:
        super().__init__(dim, heads)
        self.table = nn.Parameter(torch.randn(input_size[0], input_size[1], dim))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if x.dim() != 4:
            raise ValueError("takes images")
        tokens = (x + self.table).flatten(1, 2)
        return self.attend(tokens).reshape(x.shape)


class OfPoints(OfOneInput):
    """The coordinates come first; the nearest tokens are attended to."""

    def forward(self, xyz: Tensor, features: Tensor) -> Any:  # type: ignore[override]
        distances = (xyz[:, :, None] - xyz[:, None]).square().sum(-1)
        k = min(9, xyz.shape[1])
        topk = distances.topk(k, largest=False).indices
        mask = torch.zeros_like(distances).scatter(2, topk, 1.0)
        return self.attend(features, mask.bool())


class OfDistances(OfOneInput):
    """A row of a table for each distance of two tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.table = nn.Embedding(8, heads)

    def forward(self, x: Tensor, hops: Tensor) -> Any:  # type: ignore[override]
        self.bias = self.table(hops).permute(0, 3, 1, 2)
        return self.attend(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias


class OfGraph(OfOneInput):
    def forward(self, x: Tensor, edge_index: Tensor) -> Any:  # type: ignore[override]
        mask = torch.zeros(len(x), len(x), dtype=torch.bool)
        mask[edge_index[0], edge_index[1]] = True
        return self.attend(x[None], mask[None])[0]


class OfPos(OfOneInput):
    """Positions are points."""

    def forward(self, x: Tensor, pos: Tensor) -> Any:  # type: ignore[override]
        distances = (pos[:, :, None] - pos[:, None]) @ torch.ones(3)
        return self.attend(x + distances.mean(-1, keepdim=True))


class OfPastWeights(nn.Module):
    """Scores depend on the weights of the steps before; some inputs are projected."""

    def __init__(self, rnn_dim: int, embed_dim: int, location_n_filters: int) -> None:
        super().__init__()
        self.query = nn.Linear(rnn_dim, embed_dim)
        self.conv = nn.Conv1d(2, location_n_filters, 3, padding=1)

    def forward(
        self,
        query: Tensor,
        memory: Tensor,
        processed_memory: Tensor,
        attention_weights_cat: Tensor,
    ) -> Any:
        q = self.query(query)[:, None]
        past = self.conv(attention_weights_cat).sum(1)
        weights = ((q + processed_memory).tanh().sum(-1) + past).softmax(1)
        return weights[:, None].bmm(memory)[:, 0]


class OfChoice(OfOneInput):
    def __init__(self, method: str, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        if method not in ("dot", "general"):
            raise ValueError("method")

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


@dataclass
class FullConfig:
    dim: int
    n_heads: int
    head_dim: int
    n_layers: int
    eps: float
    name: Any


class OfFullConfig(OfOneInput):
    def __init__(self, config: FullConfig) -> None:
        super().__init__(config.dim, config.n_heads)
        assert config.head_dim * config.n_heads == config.dim

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


@dataclass
class WidthConfig:
    descriptors: int = 20


class OfPairsAndPoints(OfOneInput):
    """Pairs of tokens have a vector, of which each head takes a bias."""

    def __init__(self, d_model: int, heads: int, pair_width: int = 16) -> None:
        super().__init__(d_model, heads)
        self.bias = nn.Linear(pair_width, 1)

    def forward(self, x: Tensor, pairwise: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x + self.bias(pairwise).mean(2))


class OfGridWithClass(OfOneInput):
    """The tokens of a grid, behind one for the class."""

    def forward(self, x: Tensor, thw: tuple[int, ...]) -> Any:  # type: ignore[override]
        grid = x[:, 1:].unflatten(1, thw)
        return self.attend(torch.cat([x[:, :1], grid.flatten(1, 3)], 1))


class OfSeveralMedia(OfOneInput):
    """Each item has several images, each with tokens of its own."""

    def forward(self, x: Tensor, media: Tensor) -> Any:  # type: ignore[override]
        _batch_size, _count, _length, _width = media.shape
        keys = media.flatten(1, 2)
        return Correct.forward(self, x, keys, keys)


class OfFixedWidth(OfOneInput):
    """Its width is a default of the config, and no argument of a known name."""

    def __init__(self, config: WidthConfig) -> None:
        super().__init__(config.descriptors, 2)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


class OfOptionalMedia(OfSeveralMedia):
    def forward(self, x: Tensor, media: Tensor | None = None) -> Any:  # type: ignore[override]
        assert media is not None
        return super().forward(x, media)


class OfVariates(OfOneInput):
    """Features come first, and are as many as a default; its name tells no width."""

    def __init__(self, steps_back: int = 24, d_model: int = 8, heads: int = 2) -> None:
        super().__init__(d_model, heads)
        self.embed = nn.Linear(steps_back, d_model)
        self.back = nn.Linear(d_model, steps_back)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.back(self.attend(self.embed(x.mT))).mT


class StepWithCoverage(ReadsMemory):
    """One step. query: B x D, values: B x N x D, coverage: B x N, in the past."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.past = nn.Linear(1, d_model)

    def forward(  # type: ignore[override]
        self, query: Tensor, values: Tensor, coverage: Tensor | None = None
    ) -> Any:
        if query.dim() != 2:
            raise ValueError("query")
        past = values.new_zeros(values.shape[:2]) if coverage is None else coverage
        return super().forward(query, values + self.past(past[..., None]), values)


class OfHeadCount(OfOneInput):
    def __init__(self, num_channels: int, head_count: int = 5) -> None:
        super().__init__(num_channels, head_count)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


class OfLayerOfKind(OfOneInput):
    """Without its index, a layer is of no kind, and cannot be built."""

    def __init__(self, d_model: int, heads: int, layer_idx: Any = None) -> None:
        super().__init__(d_model, heads)
        self.kind = ["full", "sliding"][layer_idx]

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


class OfStatedSide(OfOneInput):
    def __init__(self, d_model: int, heads: int, reso: int = 5) -> None:
        super().__init__(d_model, heads)
        self.reso = reso

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        image = x.unflatten(1, (self.reso, self.reso))
        return self.attend(image.flatten(1, 2))


class OfStatedShape(OfOneInput):
    """Images of the rows and columns that the constructor has by default only."""

    def __init__(
        self, d_model: int, heads: int, in_shape: tuple[int, int] = (2, 6)
    ) -> None:
        super().__init__(d_model, heads)
        self.in_shape = in_shape

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if x.shape[2:] != self.in_shape:
            raise ValueError(f"images of {x.shape[2:]}")
        return self.attend(x.flatten(2).mT).mT.unflatten(2, self.in_shape)


class OfSegments(OfOneInput):
    """x: [batch_size, series, segments, d_model]; each series attends to itself."""

    def __init__(self, d_model: int, heads: int, segments: int = 6) -> None:
        super().__init__(d_model, heads)
        self.places = nn.Parameter(torch.zeros(segments, d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if x.shape[2:] != self.places.shape:
            raise ValueError(f"segments of {x.shape}")
        return self.attend((x + self.places).flatten(0, 1)).view(x.shape)


class OfResolution(OfOneInput):
    """There is one bias for each pair of pixels."""

    def __init__(
        self, dim: int, heads: int, resolution: tuple[int, int] = (14, 14)
    ) -> None:
        super().__init__(dim, heads)
        self.pairs = nn.Parameter(torch.zeros(resolution[0] * resolution[1]))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x + self.pairs[:, None])


class OfPackedPositions(OfOneInput):
    """Positions are optional by its signature only; sequences are packed into one."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, position_ids: Any = None) -> Any:  # type: ignore[override]
        parts = x.split(cu_seqlens.diff().tolist())
        return torch.cat([self.attend(part[None])[0] for part in parts]) + (
            0.1 * position_ids[:, None]
        )


class OfTwoBiases(OfOneInput):
    """Distances in the text and on the page; the signature has None for both."""

    def forward(self, x: Tensor, rel_pos: Any = None, rel_2d_pos: Any = None) -> Any:  # type: ignore[override]
        self.bias = rel_pos + rel_2d_pos
        return self.attend(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) + self.bias


class OfTimeSteps(OfOneInput):
    """A block of a diffusion model: pixels, an embedded time, and a text."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.before = nn.Conv2d(d_model, d_model, 3, padding=1)

    def forward(  # type: ignore[override]
        self, x: Tensor, temb: Any = None, mask: Tensor | None = None
    ) -> Any:
        image = self.before(x) + temb[:, :, None, None]
        tokens = image.flatten(2).transpose(1, 2)
        return self.attend(tokens, mask).transpose(1, 2).reshape(x.shape)


class UpdatesContext(Correct):
    """The context attends, too, and its output is the first of two."""

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        both = torch.cat([x, context], 1)
        one, other = (Correct.forward(self, y, both, both) for y in (x, context))
        return other, one


class TwoWays(UpdatesContext):
    """Queries and keys have positions, which are required."""

    def forward(self, x: Tensor, keys: Tensor, query_pe: Tensor, key_pe: Tensor) -> Any:  # type: ignore[override]
        if x.shape != query_pe.shape or keys.shape != key_pe.shape:
            raise ValueError("positions")
        return super().forward(x + query_pe, keys + key_pe)


@dataclass
class SharedKeyConfig:
    d_model: int
    num_heads: int
    num_kv_heads: int | None = None
    shares_one_key: bool = True


class OfSharedKey(OfOneInput):
    """One head of keys and values, whatever their number in the config is."""

    def __init__(self, config: SharedKeyConfig) -> None:
        super().__init__(config.d_model, config.num_heads)
        self.num_kv_heads = 1 if config.shares_one_key else config.num_kv_heads
        width = config.d_model // config.num_heads
        self.key, self.value = (nn.Linear(config.d_model, width) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        width = self.key.out_features
        return x.unflatten(2, (-1, width)).transpose(1, 2)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


class OfNamedAxes(OfOneInput):
    """Rows that have one map of weights; only the code names the axes."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        rows, _columns, batch_size, _width = x.shape
        output = self.attend(x.mean(0).transpose(0, 1)).transpose(0, 1)
        return output.expand(rows, -1, batch_size, -1)


class OfAlignedRows(OfOneInput):
    """x: [rows, columns, batch, d_model]; the rows have one map of weights."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        if x.dim() != 4:
            raise ValueError(f"x has {x.dim()} axes")
        if mask is None:
            return self.attend(x.mean(0).transpose(0, 1)).transpose(0, 1) + x
        if mask.shape != (x.shape[2], *x.shape[:2]):
            raise ValueError("its axes are not those of items, rows and columns")
        allowed = mask.bool().any(1)[:, None]
        return self.attend(x.mean(0).transpose(0, 1), allowed).transpose(0, 1) + x


class OfAllDistances(OfOneInput):
    """`r` are all relative positions, of which there are more than tokens."""

    def forward(self, x: Tensor, r: Tensor) -> Any:  # type: ignore[override]
        if len(r) <= x.shape[1]:
            raise ValueError("too few positions")
        return self.attend(x) + r[: x.shape[1]].transpose(0, 1)


class OfKindsBehindFirst(OfOneInput):
    """The kinds of pairs of all tokens but the first one, as in Graphormer."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.kinds = nn.Embedding(10, d_model)

    def forward(self, x: Tensor, spatial: Tensor) -> Any:  # type: ignore[override]
        rest = x[:, 1:] + self.kinds(spatial).sum(dim=1)
        return self.attend(torch.cat([x[:, :1], rest], dim=1))


class OfPoses(Correct):
    """Agents attend to what is around them.

    agents: (B, A, D), agent_pose: (B, A, 3)
    seen: (B, M, D), seen_pose: (B, M, 3)
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pose = nn.Linear(3, d_model)

    def forward(  # type: ignore[override]
        self, agents: Tensor, agent_pose: Tensor, seen: Tensor, seen_pose: Tensor
    ) -> Any:
        known = seen + self.pose(seen_pose)
        return super().forward(agents + self.pose(agent_pose), known, known)


class StepOfTable(ReadsMemory):
    """One step, whose mask is no option.

    query     B x D, the state
    values    B x N x D
    seen      B x N, of former steps
    """

    def forward(  # type: ignore[override]
        self, query: Tensor, values: Tensor, value_mask: Tensor, seen: Tensor
    ) -> Any:
        scores = torch.einsum("bnd,bd->bn", values, self.query(query)) + 0 * seen
        weights = scores.softmax(1) * value_mask
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-4)
        return torch.einsum("bn,bnd->bd", weights, values)


class OfPlanes(OfOneInput):
    """Images whose rows and columns are attributes, and widths of another name."""

    def __init__(self, inp: int, out_planes: int, n_layer: int, image_size: Any):
        super().__init__(inp, 1)
        self.rows, self.columns = image_size
        self.last = nn.Linear(out_planes, out_planes)
        assert n_layer == 1

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        tokens = x.view(len(x), self.rows * self.columns, x.shape[3])
        return self.last(self.attend(tokens)).reshape(x.shape)


VECTOR = (
    "(seeded_randn(566, 1, {d_model}){dtype} * {d_model} ** -0.5)"
    ".expand({batch_size}, -1)"
)
OF_MEMORY = {
    "query": VECTOR,
    "keys": "attention.project({query})",
    "state": "torch.ones_like(attention.start({query}))",
}

PACKED = "torch.tensor([0, {length}])"
BIAS = "torch.zeros({batch_size}, {heads}, {length}, {length}){dtype}"
ITEM = "torch.ones({batch_size}, {d_model}){dtype}"


class OfFiveFeatures(OfOneInput):
    """A set of elements of five features, as many as the tokens of the first call."""

    def __init__(
        self, dim_input: int = 5, dim_hidden: int = 32, heads: int = 4
    ) -> None:
        super().__init__(dim_hidden, heads)
        self.enter = nn.Linear(dim_input, dim_hidden)
        self.queries = nn.Parameter(torch.randn(2, dim_hidden))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = self.enter(x)
        return super().forward(self.queries.expand(len(x), -1, -1), x, x)


def of_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    places = torch.arange(q.shape[2])
    is_near = (places[:, None] - places).abs() < window
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~is_near, -torch.inf)
    return scores.softmax(dim=-1) @ v


class OfMemoryLength(OfOneInput):
    """As long as a segment and the memory before it, for a table of distances."""

    def __init__(self, d_model: int, tgt_len: int) -> None:
        super().__init__(d_model, 1)
        self.table = torch.arange(tgt_len)[:, None]

    def forward(self, x: Tensor) -> Any:
        return self.attend(x + self.table[: x.shape[1]] / 100)


CASES: list[tuple[Any, dict[str, Any]]] = [
    (TakesHeightAndWidth, {"extra_args": {"H": "{rows}", "W": "{columns}"}}),
    (TakesResidual, {"inputs": ("x",), "positions": "none"}),
    (TakesCondition, {"inputs": ("x",), "layout": "bld"}),
    (TakesCoordinates, {"positions": "unknown"}),
    (ReturnsCoordinates, {"layout": "bld", "output_index": "[1]"}),
    (TakesEdges, {"inputs": ("x",)}),
    (TakesTypes, {"inputs": ("x",), "positions": "none"}),
    (TakesPackedLengths, {"layout": "ld"}),
    (NeedsMemory, {"inputs": ("x", "memory"), "cross_attention": True}),
    (NeedsRegions, {"inputs": ("x", "regions"), "cross_attention": True}),
    (QueryVector, {"inputs": ("encoder_outputs",), "is_pooled": True}),
    (TakesState, {"extra_args": {"state": "{{}}"}}),
    (OfFrames, {"image": "frames", "layout": "bdl"}),
    (OfPixels, {"image": "image", "layout": "bdl"}),
    (CausalDecoderLayer, {"inputs": ("tgt", "memory"), "mixes_queries": True}),
    (LocalRotary, {"window": 3}),
    (AddsToEdges, {"required_mask": None, "extra_args": {"adj": EDGES}}),
    (MixesWithEdges, {"required_mask": None, "extra_args": {"adj_matrix": EDGES}}),
    (with_weights, {"inputs": ("x",)}),
    (with_params, {"inputs": ("x",)}),
    (OfTwoStreams, {"inputs": ("v", "l"), "mixes_queries": True}),
    (OfAnyName, {"masks": (MaskArgument("banned", "ignore", "bk"),)}),
    (OfQueriesAndKeys, {"masks": (MaskArgument("key_mask", "attend", "bk"),)}),
    (OfRowOfMask, {"masks": (MaskArgument("mask", "attend", "b11k"),)}),
    (OfMaskInKwargs, {"masks": (MaskArgument("pad", "ignore", "bk"),)}),
    (OfOtherContext(), {"inputs": ("x", "context"), "context_width": 7}),
    (OfProjections, {"layout": "bdl", "d_model": 36}),
    (features_first, {"layout": "bhdl"}),
    (quiet_features_first, {"layout": "bhdl"}),
    (OfLayers, {"weights_source": "", "inputs": ("x",)}),
    (OfFramesAlone, {"image": "image_channels_last", "image_height": 0}),
    (OfSizePerHead, {"heads": 3, "d_k": 4}),
    (OfOffset, {"cache_args": {"offset": "{start}"}}),
    (of_example, {"layout": "ld", "heads": 1}),
    (of_eight_heads, {"layout": "bld", "heads": 3}),
    (sequence_first, {"layout": "lbhd"}),
    (packed, {"layout": "lhd"}),
    (ReadsMemory, {"inputs": ("values",), "is_pooled": True}),
    (ReadsMemoryOfAnyShape, {"inputs": ("values",), "is_pooled": True}),
    (ReadsTimeFirst, {"inputs": ("enc_states",), "layout": "lbd", "is_pooled": True}),
    (MovesOn, {"extra_args": OF_MEMORY, "positions": "unknown"}),
    (of_tree, {"layout": "blhd", "causal": True}),
    (OfBags, {"layout": "ld", "is_pooled": True, "output_index": "['logits']"}),
    (StepOfDecoder, {"masks": (MaskArgument("src_mask", "attend", "b1k"),)}),
    (decode_one, {"inputs": ("past_v",), "is_pooled": True}),
    (decode_heads, {"layout": "blhd", "is_pooled": True}),
    (of_weights, {"inputs": ("x",), "layout": "bld"}),
    (of_heads_with_sinks, {"layout": "bhld", "output_index": "[0].transpose(1, 2)"}),
    (of_packed, {"layout": "blhd", "packing": "torch.stack([{0}] * 3, 2)"}),
    (of_packed_context, {"layout": "blhd", "packing": "torch.stack([{0}] * 2, 2)"}),
    (of_list, {"layout": "bld", "packing": "[{0}] * 3"}),
    (of_other_lengths, {"layout": "lhd", "cross_attention": True}),
    (PoolsWithClass, {"image": "image", "fixed_length": 9, "is_pooled": True}),
    (OfSides, {"image": "image_channels_last", "fixed_length": 9}),
    (OfPoints, {"inputs": ("features",), "window": None}),
    (OfDistances, {"inputs": ("x",), "layout": "bld"}),
    (OfGraph, {"inputs": ("x",), "layout": "ld"}),
    (OfPos, {"inputs": ("x",), "layout": "bld"}),
    (OfPastWeights, {"inputs": ("memory",), "is_pooled": True}),
    (OfChoice, {"inputs": ("x",), "layout": "bld"}),
    (OfFullConfig, {"inputs": ("x",), "heads": 3}),
    (OfPairsAndPoints, {"inputs": ("x",), "layout": "bld"}),
    (OfGridWithClass, {"extra_args": {"thw": "(1, 1, {length} - 1)"}}),
    (OfSeveralMedia, {"inputs": ("x", "media"), "packing": "{0}[:, None]"}),
    (OfOptionalMedia, {"inputs": ("x", "media"), "packing": "{0}[:, None]"}),
    (OfFixedWidth, {"layout": "bld", "d_model": 20}),
    (OfVariates, {"layout": "bdl", "d_model": 24}),
    (StepWithCoverage, {"inputs": ("values",), "extra_args": {"query": VECTOR}}),
    (OfHeadCount, {"heads": 3}),
    (OfLayerOfKind, {"heads": 3}),
    (OfResolution, {"fixed_length": 9}),
    (OfStatedSide, {"fixed_length": 25}),
    (OfStatedSide(12, 3), {"fixed_length": 25}),
    (OfStatedShape, {"fixed_length": 12, "image_height": 2, "image": "image"}),
    (OfSegments, {"fixed_length": 18, "image_height": 3}),
    (OfTwoBiases, {"extra_args": {"rel_pos": BIAS, "rel_2d_pos": BIAS}}),
    (UpdatesContext, {"output_index": "[1]"}),
    (TwoWays, {"inputs": ("x", "keys")}),
    (OfSharedKey, {"heads": 4, "group_size": 4}),
    (OfPackedPositions, {"layout": "ld", "extra_args": {"cu_seqlens": PACKED}}),
    (OfTimeSteps, {"image": "image", "extra_args": {"temb": ITEM}, "masks": ()}),
    (TakesPairsOfFrequencies, {"positions": "rotary"}),
    (TakesRotations, {"positions": "rotary"}),
    (TakesCosinesAndSines, {"positions": "rotary"}),
    (OfFiveLabels, {"is_pooled": True, "output_index": "[:, :1]"}),
    (OfNamedAxes, {"image": "image_rows_first", "layout": "lbd"}),
    (OfAlignedRows, {"masks": (MaskArgument("mask", "attend", "b1k"),)}),
    (OfAllDistances, {"inputs": ("x",), "layout": "bld"}),
    (StepOfTable, {"inputs": ("values",), "is_pooled": True}),
    (OfKindsBehindFirst, {"inputs": ("x",), "layout": "bld"}),
    (OfPoses, {"inputs": ("agents", "seen"), "layout": "bld"}),
    (OfPlanes, {"fixed_length": 9}),
    (OfFiveFeatures, {"layout": "bld", "is_pooled": True}),
    (of_window, {"extra_args": {"window": "4"}}),
    (OfMemoryLength, {"init_args": {"d_model": "{d_model}", "tgt_len": "320"}}),
]


@functools.cache
def found(attention: Any) -> Adapter:
    name = getattr(attention, "__name__", "built")
    return infer_adapter(attention, name, "", Options())


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "fields"), CASES, ids=lambda case: "")
def test_arguments_beside_the_inputs_are_filled(
    attention: Any, fields: dict[str, Any]
) -> None:
    adapter = found(attention)
    assert {name: getattr(adapter, name) for name in fields} == fields


class OfIds(OfOneInput):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.embedding = nn.Embedding(10, d_model)

    def forward(self, tokens: Tensor) -> Any:  # type: ignore[override]
        return self.attend(self.embedding(tokens))


class OfVocabularies(OfIds):
    def __init__(self, src_vocab: int, tgt_vocab: int, d_model: int) -> None:
        super().__init__(d_model, 1)
        self.source = nn.Embedding(src_vocab, d_model)
        self.target = nn.Embedding(tgt_vocab, d_model)

    def forward(self, src: Tensor, tgt: Tensor) -> Any:  # type: ignore[override]
        return self.attend(self.source(src)) + self.attend(self.target(tgt))


class SameForAll(OfOneInput):
    def forward(self, x: Tensor) -> Any:
        return torch.zeros_like(x)


class OfNested(OfOneInput):
    def forward(self, x: Tensor) -> Any:
        return torch.nested.nested_tensor([*self.attend(x)])


class OfBlocks(OfOneInput):
    def forward(self, x: Tensor, block_tables: Any) -> Any:  # type: ignore[override]
        return self.attend(x + block_tables["first"]["rows"])


class OfOptionalBlocks(OfOneInput):
    def forward(self, x: Tensor, tables: Any = None) -> Any:  # type: ignore[override]
        return self.attend(x + tables["first"]["rows"])


class ProjectsBesideContext(OfOneInput):
    """The last projection and its dropout are of calls with a context."""

    def __init__(
        self, d_model: int, heads: int, dropout: float = 0.0, pre_only: bool = False
    ) -> None:
        super().__init__(d_model, heads, 0.0)
        self.dropout_rate = dropout
        if pre_only:
            del self.out

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        self.has_context = context is not None
        return self.attend(x)

    def join(self, context: Tensor) -> Tensor:
        if self.has_context:
            raise ValueError("no context")
        return context.transpose(1, 2).flatten(2)


@pytest.mark.slow
def test_a_flag_leaves_out_the_layers_that_no_call_needs() -> None:
    adapter = found(ProjectsBesideContext)
    assert adapter.init_args["pre_only"] == "True"
    assert "pre_only=True" in adapter.facts[0].value
    for law in ("parameter_gradients", "dropout", "formula"):
        assert check_law(LAWS[law], adapter, Options(), False).status != "fail"


class Glimpses(nn.Module):
    def glimpse(self, x: Tensor) -> Tensor:
        return x


class OfCloud(OfOneInput):
    def forward(self, cloud: Any) -> Any:  # type: ignore[override]
        points, x, ends = cloud
        return self.attend(x[ends] + points)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (OfCloud, "it unpacks `cloud` into `points`, `x`, `ends`: write a function of"),
        (OfIds, "takes token ids, which it embeds.*`--inside`"),
        (OfVocabularies, "takes token ids, which it embeds.*`--inside`"),
        (SameForAll, "it gives the same output for all inputs"),
        (OfNested, "could not be called with random inputs .* it raises"),
        (OfBlocks, "requires `block_tables`, too: write a function that passes it"),
        (Glimpses, "has no `forward`; write a subclass whose `forward` calls one"),
        (UnpacksPair, "requires `tables`, too: write a function that passes it"),
        (OfOptionalBlocks, "may require `tables`, too: write a function that passes"),
    ],
)
def test_what_is_not_called_is_named(attention: Any, message: str) -> None:
    with pytest.raises(CallError, match=message):
        found(attention)


def test_weights_of_as_many_heads_as_items_are_those_of_all_items() -> None:
    law = LAWS["batch_independence"]
    assert check_law(law, found(decode_one), Options(), False).status == "pass"


class PointsToNodes(nn.Module):
    """Points to a node: context: (batch, d); nodes: (batch, n, d)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, context: Tensor, nodes: Tensor) -> Any:
        q, k = self.query(context), self.key(nodes)
        weights = (q[:, None] @ k.mT).softmax(-1)
        return (q[:, None] * (weights @ k).tanh() @ k.mT).log_softmax(-1)[:, 0]


@pytest.mark.parametrize("law", ["allowed_keys_attended", "long_sequences"])
def test_a_vector_of_an_item_is_no_sequence(law: str) -> None:
    result = check_law(LAWS[law], found(PointsToNodes), Options(), False)
    assert result.status != "fail"


def test_a_missing_state_is_given() -> None:
    texts = found(StepOfDecoder).extra_args
    assert set(texts) == {"previous", "hidden"}
    assert "{d_model} // 2" in texts["previous"]


def test_a_required_mask_is_the_one_that_hides_keys() -> None:
    adapter = found(IgnoresKeys)
    assert adapter.required_mask == adapter.masks[0]
    assert adapter.masks[0].kind == "ignore"


def test_a_mask_of_the_queries_makes_the_context_a_constant() -> None:
    adapter = found(DecoderLayer)
    assert adapter.inputs == ("tgt",)
    assert {mask.name for mask in adapter.masks} == {"tgt_mask"}


@pytest.mark.parametrize(
    ("attention", "design"),
    [(AddsItsInput, "residual"), (OverFeatures, "channels")],
)
def test_what_the_output_shows_is_a_design(attention: Any, design: str) -> None:
    adapter = found(attention)
    assert design in adapter.designs
    assert check_law(LAWS["formula"], adapter, Options(), False).status != "fail"


def test_arguments_of_a_constructor_are_guessed() -> None:
    built = {fact.name: fact.value for fact in found(Guessed).facts}["built as"]
    assert built.endswith("mlp_ratio=1.0, kernel_size=3, flag=False)")


def make_attention(d_model: int, n_heads: int, *, causal: bool = False) -> nn.Module:
    kind = MaskedSelfAttention if causal else Correct
    return kind(d_model, n_heads)


def make_by_default(dim: int = 64, heads: int = 4, scale: float = 1.0) -> nn.Module:
    return Correct(dim, heads)


def make_heads_of_its_own(dim: int = 32) -> nn.Module:
    return Correct(dim, dim // 8)


def make_from_config(cfg: Any) -> nn.Module:
    short = cfg
    return Correct(short.hidden_size, cfg.num_heads)


def make_from_dict(config: dict[str, int]) -> nn.Module:
    return Correct(config["dim"], config["heads"])


@pytest.mark.parametrize(
    ("build", "options", "expected"),
    [
        (make_attention, {}, "built = make_attention(d_model=12, n_heads=3)\n"),
        (make_by_default, {}, "built = make_by_default(dim=12, heads=3)\n"),
        (
            make_by_default,
            {"heads": 2, "d_model": 10, "init_args": {"scale": 0.5}},
            "built = make_by_default(scale=0.5, dim=10, heads=2)\n",
        ),
        (
            make_from_config,
            {},
            "from types import SimpleNamespace\nbuilt = make_from_config("
            "cfg=SimpleNamespace(hidden_size=12, num_heads=3))\n",
        ),
        (
            make_from_dict,
            {},
            'built = make_from_dict(config={"dim": 12, "heads": 3})\n',
        ),
        (make_heads_of_its_own, {}, "built = make_heads_of_its_own()\n"),
        (lambda: Correct(6, 2), {}, "built = <lambda>()\n"),
        (lambda **sizes: Correct(6, 2, **sizes), {}, "built = <lambda>()\n"),
    ],
)
def test_a_function_of_sizes_is_called_for_the_module_that_it_builds(
    build: Any, options: dict[str, Any], expected: str
) -> None:
    built = build_by_function(build, Options(**options))
    assert built is not None
    module, lines = built
    assert isinstance(module, Correct)
    assert lines == expected


def test_a_function_of_inputs_builds_nothing() -> None:
    assert build_by_function(with_weights, Options()) is None


class NormOverTokens(OfOneInput):
    """A group norm of channels and time."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__(channels, heads)
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(self.norm(x).mT).mT


class ValuesHavePositions(Correct):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.relative_values = nn.Parameter(torch.zeros(320, d_model))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(
            query, key, value + self.relative_values[: value.shape[1]]
        )


class OfOneGraph(OfOneInput):
    """A node without edges gives NaN: each has an edge to itself."""

    def forward(self, x: Tensor, adj: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x[None], (adj != 0)[None])[0]

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return scores.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)


class BiasOfKeys(OfOneInput):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.b_K = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k + self.split(self.b_K[None, None]))


class DropsInTable(OfOneInput):
    """The dropout of a network for a bias of positions does not see the batch."""

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        drop = nn.Dropout(0.1)
        self.meta = nn.Sequential(nn.Linear(1, 5), drop, nn.Linear(5, heads))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(k.shape[2], dtype=k.dtype)[:, None] - k.shape[2] / 2
        return super().score(q, k) + self.meta(place).mT[:, None]


class DropsByDefault(OfOneInput):
    """Not told of the dropout of its inner class."""

    class Weights(nn.Module):
        def __init__(self, attn_dropout: float = 0.1) -> None:
            super().__init__()
            self.drop = nn.Dropout(attn_dropout)

        def forward(self, weights: Tensor) -> Any:
            return self.drop(weights)

    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.weights = self.Weights()

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)

    def read(self, weights: Tensor, v: Tensor) -> Tensor:
        return super().read(self.weights(weights), v)


class EndsInActivation(OfOneInput):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return F.elu(self.attend(x))


class MaskAndPositions(OfOneInput):
    """A mask is required in each call, and each item may have its own positions."""

    def forward(  # type: ignore[override]
        self, x: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])
        x = x + 0.1 * position_ids[..., None]
        return self.attend(x, attention_mask.expand(len(x), x.shape[1], -1))


class ReflectsEdges(OfOneInput):
    """A convolution in front, whose padding reflects the last three tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.conv = nn.Conv1d(d_model, d_model, 7)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(self.conv(F.pad(x.mT, (3, 3), mode="reflect")).mT)


class NormBeforeOut(OfOneInput):
    def __init__(self, d_model: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(d_model, heads, dropout)
        self.norm = nn.LayerNorm(d_model)

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.out(self.norm(context.transpose(1, 2).flatten(2)))
        return joined

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.attend(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "law"),
    [
        (NormOverTokens, "score_independence"),
        (ValuesHavePositions, "rows_sum_to_one"),
        (OfOneGraph, "fully_masked_rows"),
        (CausalDecoderLayer, "query_permutation"),
        (CausalDecoderLayer, "query_independence"),
        (CausalDecoderLayer, "parameter_gradients"),
        (BiasOfKeys, "parameter_gradients"),
        (TakesDocumentedEdges, "parameter_gradients"),
        (TakesDocumentedEdges, "key_permutation"),
        (TakesPairsOfFrequencies, "relative_positions"),
        (TakesRotations, "relative_positions"),
        (DropsInTable, "dropout"),
        (DropsByDefault, "dropout"),
        (EndsInActivation, "dropout"),
        (MaskAndPositions, "batch_independence"),
        (ReflectsEdges, "deterministic"),
        (NormBeforeOut, "dropout"),
        (NormBeforeOut, "linear_in_value"),
        (TakesTables, "batch_independence"),
        (MixesWithEdges, "formula"),
        (MixesWithEdges, "padding"),
    ],
)
def test_a_law_that_does_not_apply_does_not_fail(attention: Any, law: str) -> None:
    result = check_law(LAWS[law], found(attention), Options(), False)
    assert result.status != "fail", result.counterexample


class RotatesItself(Rotary):
    """Only the tokens of self-attention are rotated."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        self.is_rotated = context is None
        keys = x if context is None else context
        return Correct.forward(self, x, keys, keys)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        rotated = Rotary.score if self.is_rotated else Correct.score
        return rotated(self, q, k)


def test_a_context_may_be_without_the_positions_of_self_attention() -> None:
    context = with_context(found(RotatesItself), Options())
    assert context is not None
    assert (found(RotatesItself).positions, context.positions) == ("rotary", "none")


@pytest.mark.slow
def test_a_mask_of_a_context_that_is_refused_is_no_mask_of_the_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = found(BlockWithContext)
    assert adapter.masked_context == ("context", "context_mask")
    assert len(with_masked_context(adapter, Options()).inputs) == 2

    def refuse(*args: Any) -> Adapter:
        raise CallError("of another width")

    monkeypatch.setattr(checker, "infer_with_inputs", refuse)
    assert adapter.masks
    assert not with_masked_context(adapter, Options()).masks


def test_masks_with_which_no_call_succeeds_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def misunderstand(probe: CallProbe) -> None:
        probe.update(call_args={"musk": 1})

    monkeypatch.setattr(infer, "infer_masks", misunderstand)
    with pytest.raises(CallError, match="with the masks that were inferred: it raises"):
        found.__wrapped__(OfHeadCount)
