"""Modules that violate the laws of decoding, or come near to it."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specimens.base import (
    CACHE,
    CAUSAL,
    MASK,
    MEMORY,
    Correct,
    CroppedTokens,
    DecoderOfMemory,
    Excuses,
    MakesCroppedCache,
    MaskedSelfAttention,
    MemoryInFront,
    Passes,
    RelativeTable,
    Rotary,
    SelfAttention,
    StoresDistances,
    StoresDistancesByKeys,
    Violations,
    Window,
    WithCache,
    packed_first,
)


class CacheTopLeft(WithCache):
    def corner(self, ones: Tensor) -> int:
        return 0


class CacheForgetsPadding(WithCache):
    """The padding mask of a call with a cache hides none of the past keys."""

    def forward(
        self, x: Tensor, past: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        allowed = ones.tril(seen.shape[1] - x.shape[1])
        if mask is not None:
            is_past = (
                torch.arange(seen.shape[1], device=x.device)
                < seen.shape[1] - x.shape[1]
            )
            allowed = allowed & (mask | is_past)[:, None]
        return Correct.forward(self, x, seen, seen, allowed), seen


class CacheInDict(Correct):
    """Self-attention whose cache is a dict that the caller passes and it modifies."""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, cache: Any = None
    ) -> Any:
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        past = cache or {"x": x[:, :0], "mask": mask[:, :0]}
        seen, allowed = torch.cat([past["x"], x], dim=1), self.join_masks(past, mask)
        if cache is not None:
            cache.update(x=seen, mask=allowed)
        ones = torch.ones(x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device)
        causal = ones.tril(seen.shape[1] - x.shape[1])
        return super().forward(x, seen, seen, causal & allowed[:, None])

    def join_masks(self, past: Any, mask: Tensor) -> Tensor:
        return torch.cat([past["mask"], mask], dim=1)


class DictForgetsPadding(CacheInDict):
    def join_masks(self, past: Any, mask: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(past["mask"]), mask], dim=1)


class StoresCache(CacheInDict):
    """The module itself stores the cache, if a flag is given."""

    stored: dict[str, Tensor]

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.stored = {}

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, incremental: bool = False
    ) -> Any:
        return super().forward(x, mask, self.stored if incremental else None)

    def reorder(self, order: Tensor) -> None:
        self.stored = {name: x[order] for name, x in self.stored.items()}


class ReordersTokensOnly(StoresCache):
    def reorder(self, order: Tensor) -> None:
        self.stored["x"] = self.stored["x"][order]


class TopLeftCorner(Correct):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and not mask.all():
            # Replaces every mask by a causal one.
            mask = torch.ones_like(mask).tril()
        return super().weigh(scores, mask)


class WithMemory(SelfAttention):
    """Adds positions; the tokens before the first one may be given as memory."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if mems is None else torch.cat([mems, x], dim=1)
        places = torch.arange(seen.shape[1], device=x.device, dtype=x.dtype)[:, None]
        first = self.first(seen.shape[1] - x.shape[1])
        placed = seen + places
        return Correct.forward(self, placed[:, first:][:, : x.shape[1]], placed, seen)

    def first(self, past: int) -> int:
        return past


class MemoryWithoutOffset(WithMemory):
    def first(self, past: int) -> int:
        return 0


class DetachesMemory(WithMemory):
    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, None if mems is None else mems.detach())


class DetachesTokensWithMemory(WithMemory):
    """The memory and the new tokens are detached as a whole."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x if mems is None else x.detach(), mems)


class CacheOnRequest(WithCache):
    """Returns the keys and values only if they are asked for."""

    def forward(  # type: ignore[override]
        self, x: Tensor, past: Tensor | None = None, return_cache: bool = False
    ) -> Any:
        y, seen = super().forward(x, past)
        return (y, seen) if return_cache else y


class TopLeftOnRequest(CacheOnRequest, CacheTopLeft):
    pass


class CachesContext(Correct):
    """Stores the last context, and its projection, in a dict of the caller."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, cache: Any = None
    ) -> Any:
        if cache is None:
            return super().forward(x, context, context)
        if not (cache and self.is_same(cache["context"], context)):
            cache["context"] = context
        return super().forward(x, cache["context"], cache["context"])

    def is_same(self, one: Tensor, other: Tensor) -> bool:
        return one is other


class CachesContextOfOneShape(CachesContext):
    def is_same(self, one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape


class CachesMaskOfContext(Correct):
    """Stores the context and its mask in a dict of the caller, at the first step."""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, key_mask: Any = None, cache: Any = None
    ) -> Any:
        """While decoding, give one `cache`: the context is stored at the first step."""
        if cache:
            context, key_mask = cache["context"], self.cached_mask(cache)
        elif cache is not None:
            cache.update(context=context, mask=key_mask)
        mask = None if key_mask is None else key_mask[:, None]
        return super().forward(x, context, context, mask)

    def cached_mask(self, cache: Any) -> Any:
        return cache["mask"]


class DropsMaskOfCachedContext(CachesMaskOfContext):
    def cached_mask(self, cache: Any) -> Any:
        return None


class CachesContextOnce(CachesContextOfOneShape):
    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, cache: Any = None
    ) -> Any:
        """While decoding, give one `cache`: the context is stored at the first step."""
        return super().forward(x, context, cache)


class CachesContextOfCaller(CachesContextOfOneShape):
    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, cache: Any = None
    ) -> Any:
        """Attend to the context; `cache` is a new dict for each context."""
        return super().forward(x, context, cache)


class Store:
    """A cache of tokens."""

    def __init__(self, max_batch_size: int, max_len: int) -> None:
        self.seen = [torch.zeros(max_batch_size, 0)]

    def append(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return torch.cat(self.seen[1:], dim=1)


class CacheOfClass(CacheTopLeft):
    def forward(self, x: Tensor, cache: Store | None = None) -> Any:  # type: ignore[override]
        seen = x if cache is None else cache.append(x)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        return Correct.forward(self, x, seen, seen, ones.tril(self.corner(ones)))


class Slots:
    """A cache with a place for each token, of a dtype that the caller gives."""

    def __init__(
        self, batch_size: int, max_len: int, d_model: int, dtype: Any = torch.float32
    ) -> None:
        self.kept = torch.zeros(batch_size, max_len, d_model, dtype=dtype)
        self.count = 0

    def append(self, x: Tensor) -> Tensor:
        start, self.count = self.count, self.count + x.shape[1]
        self.kept = self.kept.clone()
        self.kept[:, torch.arange(start, self.count, device=x.device)] = x
        return self.kept[:, : self.count]


class SlotsOfFloats(Slots):
    def __init__(self, batch_size: int, max_len: int, d_model: int) -> None:
        super().__init__(batch_size, max_len, d_model)


class CacheOfSlots(WithCache):
    def forward(self, x: Tensor, cache: Slots | None = None) -> Any:  # type: ignore[override]
        seen = x if cache is None else cache.append(x)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        mask = ones.tril(seen.shape[1] - x.shape[1])
        return Correct.forward(self, x, seen, seen, mask)


class CacheOfFloats(CacheOfSlots):
    def forward(self, x: Tensor, cache: SlotsOfFloats | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, cache)


class Drafts:
    """A cache whose last tokens can be removed."""

    def __init__(self) -> None:
        self.tokens = torch.empty(0, 0, 0)
        self.count = self.longest = 0

    def append(self, x: Tensor) -> Tensor:
        past = self.tokens[:, : self.count] if self.longest else x[:, :0]
        rest = self.tokens[:, self.count + x.shape[1] :] if self.longest else x[:, :0]
        self.tokens = torch.cat([past, x, rest], dim=1)
        self.count += x.shape[1]
        self.longest = max(self.longest, self.count)
        return self.tokens[:, : self.count]

    def crop(self, length: int) -> None:
        self.count = length


class DraftsRemain(Drafts):
    def append(self, x: Tensor) -> Tensor:
        super().append(x)
        return self.tokens


class CacheOfDrafts(CacheOfSlots):
    def forward(self, x: Tensor, cache: Drafts | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, cache)  # type: ignore[arg-type]


class CacheOfRemainingDrafts(CacheOfSlots):
    def forward(self, x: Tensor, cache: DraftsRemain | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, cache)  # type: ignore[arg-type]


class StateOfMethod(CacheOfSlots):
    """A method makes the state, and another one reorders it."""

    empty_state: Any = None  # no method

    def init_state(self, rows: int, max_len: int, dtype: Any = None) -> Any:
        return Slots(rows, max_len, self.query.weight.shape[1], dtype)

    def reorder_state(self, state: Any, order: Tensor) -> None:
        state.kept = state.kept[order]

    def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        return super().forward(x, state)


class StateReorderedInPlace(StateOfMethod):
    """A row may be overwritten before it is read."""

    def reorder_state(self, state: Any, order: Tensor) -> None:
        for row, source in enumerate(order.tolist()):
            state.kept[row] = state.kept[source]


class BlocksOfQueries(WithCache):
    """Queries in blocks of 16, each with the keys before its end."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        past, scores = self.past(q, k), super().score(q, k)
        for start in range(0, q.shape[2], 16):
            scores[:, :, start : start + 16, past + start + 16 :] = -torch.inf
        return scores

    def past(self, q: Tensor, k: Tensor) -> int:
        return k.shape[2] - q.shape[2]


class BlocksWithoutPast(BlocksOfQueries):
    def past(self, q: Tensor, k: Tensor) -> int:
        return super().past(q, k) if q.shape[2] <= 16 else 0


class DraftsByRow(Drafts):
    def crop(self, first: int, last: int) -> None:  # type: ignore[override]
        self.tokens = self.tokens[first:last]


class BlocksWithDraftsByRow(BlocksWithoutPast, CacheOfSlots):
    """What its cache can remove is not tested, and the rest is."""

    def forward(self, x: Tensor, cache: DraftsByRow | None = None) -> Any:  # type: ignore[override]
        return CacheOfSlots.forward(self, x, cache)  # type: ignore[arg-type]


class CacheInOrder(WithCache):
    """The cache is overwritten if a piece has more than one token."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        if past is not None and x.shape[1] > 1:
            past = past[:, -1:]
        return super().forward(x, past)


class UnpaddedIfOneToken(CacheInDict):
    """A single new token attends to all tokens before it, and to padding."""

    def join_masks(self, past: Any, mask: Tensor) -> Tensor:
        joined = super().join_masks(past, mask)
        return joined | True if mask.shape[1] == 1 else joined


class ReordersDict(CacheInDict):
    """The cache has a method for its order, which also moves the masks."""

    def reorder_cache(self, cache: Any, new_order: Tensor) -> None:
        for name in ("x", "mask"):
            cache[name] = cache[name][new_order]


class ReordersTensorOnly(ReordersDict):
    def reorder_cache(self, cache: Any, new_order: Tensor) -> None:
        cache["x"] = cache["x"][new_order]


class WritesToCache(WithCache):
    """The tokens of the cache are negated, so that a second call finds others."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        output, seen = super().forward(x, past)
        if past is not None:
            past.neg_()
        return output, seen


class CacheOfWindow(SelfAttention):
    """Only the last 3 tokens are stored, and the number of tokens so far."""

    def forward(self, x: Tensor, past: Any = None) -> Any:  # type: ignore[override]
        before, count = (x[:, :0], 0) if past is None else past
        seen = torch.cat([before, x], dim=1)
        self.first = self.position_of_first(count, before.shape[1])
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        corner = before.shape[1]
        near = ones.tril(corner).triu(corner - 3)
        y = Correct.forward(self, x, seen, seen, near)
        return y, (seen[:, -3:], count + x.shape[1])

    def position_of_first(self, count: int, stored: int) -> int:
        return count - stored

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        # A bias by the absolute position of a key.
        position = self.first + torch.arange(k.shape[2], device=k.device)
        return super().score(q, k) + torch.sin(position)


class CacheOfWindowFromZero(CacheOfWindow):
    def position_of_first(self, count: int, stored: int) -> int:
        return 0


class RingOfTokens(Correct):
    """Causal in a window of 4, whose tokens are in a ring buffer, or an empty one."""

    def forward(self, x: Tensor, past: Any = None) -> Any:  # type: ignore[override]
        empty = (
            x.new_zeros(len(x), 4, x.shape[2]),
            torch.full((4,), -4, device=x.device),
            0,
        )
        tokens, places, count = past or empty
        now = torch.arange(count, count + x.shape[1], device=x.device)
        seen = torch.cat([tokens, x], dim=1)
        ago = now[:, None] - torch.cat([places, now])
        y = super().forward(x, seen, seen, ((ago >= 0) & (ago < 4))[None].to(x.device))
        slots = self.slots(now[-4:], count)
        tokens, places = tokens.clone(), places.clone()
        tokens[:, slots], places[slots] = x[:, -4:], now[-4:]
        return y, (tokens, places, count + x.shape[1])

    def slots(self, now: Tensor, count: int) -> Tensor:
        return now % 4


class RingLosesKeys(RingOfTokens):
    """A later piece is in the buffer before its queries attend."""

    def forward(self, x: Tensor, past: Any = None) -> Any:  # type: ignore[override]
        if past is None:
            return super().forward(x)
        tokens, places, count = past
        now = torch.arange(count, count + x.shape[1], device=x.device)
        slots = self.slots(now[-4:], count)
        tokens, places = tokens.clone(), places.clone()
        tokens[:, slots], places[slots] = x[:, -4:], now[-4:]
        ago = now[:, None] - places
        allowed = ((ago >= 0) & (ago < 4))[None].to(x.device)
        y = Correct.forward(self, x, tokens, tokens, allowed)
        return y, (tokens, places, count + x.shape[1])


class RingFromFirstSlot(RingOfTokens):
    """The first piece, however long it is, fills the buffer from its start."""

    def slots(self, now: Tensor, count: int) -> Tensor:
        return now % 4 if count else torch.arange(len(now), device=now.device)


class StoresDistancesWithCache(StoresDistances, WithCache):
    pass


class StoresDistancesByKeysWithCache(StoresDistancesByKeys, WithCache):
    pass


class DecodesWithState(Correct):
    """Not causal: in each step, a dict has the keys, values and padding so far."""

    reordered: tuple[str, ...] = ("key", "value", "mask")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        state: Any = None,
    ) -> Any:
        if mask is None:
            mask = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
        parts = {"key": key, "value": value, "mask": mask}
        if state:
            parts = {n: torch.cat([state[n], x], dim=1) for n, x in parts.items()}
        if state is not None:
            state.update(parts)
        mask = parts["mask"][:, None]
        return super().forward(query, parts["key"], parts["value"], mask)

    def reorder_state(self, state: Any, order: Tensor) -> Any:
        return {n: x[order] if n in self.reordered else x for n, x in state.items()}


class ReordersKeysOnly(DecodesWithState):
    reordered = ("key", "value")


class DecodesWithEitherMask(DecodesWithState):
    """The mask of the new keys, or of all so far."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        state: Any = None,
    ) -> Any:
        if mask is not None and state:
            past, new = mask.split([mask.shape[1] - key.shape[1], key.shape[1]], dim=1)
            mask, state["mask"] = new, past if past.numel() else state["mask"]
        return super().forward(query, key, value, mask, state)


class ReordersKeysOfEitherMask(DecodesWithEitherMask):
    reordered = ("key", "value")


class SlotsOfMemory(SelfAttention):
    """Keys are slots and tokens; the slots are learned, unless others are given."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.slots = nn.Parameter(torch.zeros(1, 2, d_model))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        slots = self.slots.expand(len(x), -1, -1) if memory is None else memory
        seen = torch.cat([slots, x], dim=1)
        return Correct.forward(self, x, seen, seen)


class DecoderAlignsFirst(DecoderOfMemory):
    """The first new token sees the first key only, whatever is in the cache."""

    def align(self, ones: Tensor, past: int) -> Tensor:
        return ones.tril()


class StateOfDecoder:
    """Tokens, a memory and its mask; each has the batch items first."""

    kept: tuple[str, ...] = ("tokens", "memory")

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}

    def reorder(self, order: Tensor) -> None:
        for name in self.kept:
            self.parts[name] = self.parts[name][order]


class WholeStateOfDecoder(StateOfDecoder):
    kept = ("tokens", "memory", "mask")


class TokensOfDecoder(StateOfDecoder):
    """Hypotheses of one source have one memory."""

    kept = ("tokens",)


class DecoderWithState(nn.Module):
    """The memory and its mask are those of the first call; the mask is reordered."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.of_tokens = Correct(d_model, heads)
        self.of_memory = Correct(d_model, heads)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        state: WholeStateOfDecoder | None = None,
    ) -> Tensor:
        return self.decode(x, memory, memory_mask, state)

    def decode(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        state: StateOfDecoder | None,
    ) -> Tensor:
        parts = {} if state is None else state.parts
        mask = torch.ones_like(memory[..., 0]).bool() if mask is None else mask
        tokens = torch.cat([parts["tokens"], x], dim=1) if parts else x
        parts |= {"memory": memory, "mask": mask, **parts, "tokens": tokens}
        ones = torch.ones(1, x.shape[1], tokens.shape[1], device=x.device).bool()
        causal = ones.tril(tokens.shape[1] - x.shape[1])
        y = x + self.of_tokens(x, tokens, tokens, causal)
        memory, mask = parts["memory"], parts["mask"]
        both: Tensor = y + self.of_memory(y, memory, memory, mask[:, None])
        return both


class DecoderReordersMemory(DecoderWithState):
    """The mask of the memory is not reordered."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        state: StateOfDecoder | None = None,
    ) -> Tensor:
        return self.decode(x, memory, memory_mask, state)


class DecoderReordersTokens(DecoderWithState):
    """Neither is reordered, by intention."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        state: TokensOfDecoder | None = None,
    ) -> Tensor:
        return self.decode(x, memory, memory_mask, state)


class DecoderForgetsMask(DecoderOfMemory):
    """The mask of the memory is only used before the memory is in the cache."""

    def mask_with(self, mask: Tensor | None, past: Any) -> Tensor | None:
        return mask if past is None else None


class ConvolvesWithState(WithCache):
    """A causal convolution of width 3, whose state is in the cache."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.conv = nn.Conv1d(d_model, d_model, 3)

    def forward(self, x: Tensor, past: Any = None) -> Any:
        seen, before = (None, x[:, :1].expand(-1, 2, -1) * 0) if past is None else past
        padded = torch.cat([before, x], dim=1)
        y, seen = super().forward(self.conv(padded.mT).mT, seen)
        return y, (seen, self.keep(padded, x)[:, -2:])

    def keep(self, padded: Tensor, x: Tensor) -> Tensor:
        return padded


class ConvolvesLastPieceOnly(ConvolvesWithState):
    def keep(self, padded: Tensor, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 2, 0))


class ConvolvesWithoutState(ConvolvesWithState):
    """By intention: its pieces are convolved each on its own."""

    def keep(self, padded: Tensor, x: Tensor) -> Tensor:
        return padded[:, :2] * 0


class ConvolvesInPlace(ConvolvesWithState):
    """The state of the convolution is overwritten, also for who continues it again."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        y, (seen, state) = super().forward(x, past)
        if past is not None:
            past[1].data.copy_(state)
        return y, (seen, state)


class TopLeftUnderNoGrad(WithCache):
    def corner(self, ones: Tensor) -> int:
        return super().corner(ones) if torch.is_grad_enabled() else 0


class DropsWithCache(WithCache):
    """With a cache, weights are dropped in evaluation, too."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        self.dropout.train(self.training or past is not None)
        return super().forward(x, past)


class PaddingInCache(WithCache):
    """The padding mask is of the new tokens; that of the others is in the cache."""

    def forward(self, x: Tensor, past: Any = None, mask: Tensor | None = None) -> Any:
        count = 0 if past is None else past[0].shape[1]
        new = (
            torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            if mask is None
            else mask
        )
        valid = new if past is None else torch.cat([past[1], new], dim=1)
        if mask is None:
            valid = self.without_mask(valid)
        seen = x if past is None else torch.cat([past[0], x], dim=1)
        causal = torch.ones(
            x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        ).tril(count)
        return Correct.forward(self, x, seen, seen, causal & valid[:, None]), (
            seen,
            valid,
        )

    def without_mask(self, valid: Tensor) -> Tensor:
        return valid


class ForgetsPaddingWithoutMask(PaddingInCache):
    def without_mask(self, valid: Tensor) -> Tensor:
        return torch.ones_like(valid)


class StoresPadding(WithCache):
    """The padding of past keys is that of the last call, whichever it was of."""

    def forward(
        self, x: Tensor, past: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        new = (
            torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            if mask is None
            else mask
        )
        count = 0 if past is None else past.shape[1]
        self.padding = torch.cat([self.padding[:, :count], new], 1) if count else new
        seen = x if past is None else torch.cat([past, x], dim=1)
        causal = torch.ones(
            x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        ).tril(count)
        allowed = causal & self.padding[:, None]
        return Correct.forward(self, x, seen, seen, allowed), seen


class StoresPrompt(WithCache):
    """The first token, which is added to all, is that of the last prompt."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        if past is None:
            self.first = x[:, :1]
        return super().forward(x + self.first, past)


class MemoryOfSegments(SelfAttention):
    """The tokens before are a memory, which passes no gradient on."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if mems is None else self.append(mems, x)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        mask = ones.tril(seen.shape[1] - x.shape[1])
        return Correct.forward(self, x, seen, seen, mask), seen.detach()

    def append(self, mems: Tensor, x: Tensor) -> Tensor:
        return torch.cat([mems.detach(), x], dim=1)


class MemoryOfSomeSegments(MemoryOfSegments):
    """The memory keeps the last tokens."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:
        output, seen = super().forward(x, mems)
        return output, seen[:, -12:]


class SegmentsTopLeftInTraining(MemoryOfSegments):
    def append(self, mems: Tensor, x: Tensor) -> Tensor:
        return super().append(mems[:, 1:] if self.training else mems, x)


class MaskOfSegment(MemoryOfSegments):
    """The mask is of the new tokens, and hides nothing of the memory."""

    hides_memory = False

    def forward(
        self, x: Tensor, mems: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        seen = x if mems is None else self.append(mems, x)
        past = seen.shape[1] - x.shape[1]
        allowed = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        ).tril(past)
        if mask is not None:
            more = seen.shape[1] - mask.shape[1]
            of_all = nn.functional.pad(mask, (more, 0), value=not self.hides_memory)
            allowed = allowed & of_all[:, None]
        return Correct.forward(self, x, seen, seen, allowed), seen.detach()


class MaskHidesMemory(MaskOfSegment):
    hides_memory = True


class SegmentsWithoutGradient(MemoryOfSegments):
    def append(self, mems: Tensor, x: Tensor) -> Tensor:
        return torch.cat([mems, x], dim=1).detach()


class CacheCutTooEarly(CacheOfWindow):
    """Of the keys of a piece and those before it, only the last ones are seen."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        if past is not None and x.shape[1] < 4:
            # Of 3 stored tokens, those that would be too far for the last query.
            past = (past[0][:, x.shape[1] - 1 :], past[1])
        return super().forward(x, past)


class SumsOfDecays(nn.Module):
    """Differences of sums, behind a norm of few features, round to large errors."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.gate, self.value = (nn.Linear(d_model, d_model) for _ in range(2))
        self.norm = nn.LayerNorm(d_model, eps=1e-12)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        total = nn.functional.logsigmoid(self.gate(x)).cumsum(dim=1)
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        fading = (total[:, :, None] - total[:, None]).masked_fill(
            ~ones.tril()[..., None], -torch.inf
        )
        y = torch.einsum("bijd,bjd->bid", fading.exp(), self.value(x))
        if state is not None:
            y = y + total.exp() * state[:, None]
        return self.norm(self.norm(y)), y[:, -1]


class StoredTokens:
    def __init__(self) -> None:
        self.tokens: Tensor | None = None


class CacheOfLayers(WithCache):
    """A list of caches, one for each layer, that are objects."""

    def make_cache(self) -> list[StoredTokens]:
        return [StoredTokens()]

    def forward(self, x: Tensor, cache: list[StoredTokens] | None = None) -> Any:  # type: ignore[override]
        (store,) = self.make_cache() if cache is None else cache
        past = x[:, :0] if store.tokens is None else store.tokens
        store.tokens = torch.cat([past, x], dim=1)
        return super().forward(x, past)[0]


class PlaceOfFirst(WithCache):
    """Positions are counted from that of the first token."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.table = nn.Embedding(600, d_model)

    def forward(self, x: Tensor, past: Tensor | None, position: int) -> Any:  # type: ignore[override]
        places = torch.arange(x.shape[1], device=x.device) + position
        return super().forward(x + self.table(places), past)


class RollingWindow:
    """The last 8 tokens, the oldest first; tokens that do not exist yet are zero."""

    def __init__(self, batch_size: int, d_model: int) -> None:
        self.tokens = torch.zeros(batch_size, 8, d_model)

    def append(self, x: Tensor, position: int) -> Tensor:
        if self.is_full(position):
            self.tokens = self.tokens.roll(-1, dims=1)
        self.tokens[:, min(position, 7)] = x[:, 0]
        return self.tokens.to(x)

    def is_full(self, position: int) -> bool:
        return position > 7


class RollsTooEarlyWindow(RollingWindow):
    def is_full(self, position: int) -> bool:
        return position >= 7


class CachePositions(Window):
    """With a cache, it takes one token, whose position the caller gives."""

    reach = 7
    window = 8
    kind: type[RollingWindow] = RollingWindow

    def new_cache(self, batch_size: int) -> RollingWindow:
        return self.kind(batch_size, self.query.in_features)

    def forward(  # type: ignore[override]
        self, x: Tensor, cache: Any = None, cache_position: Tensor | None = None
    ) -> Any:
        if cache is None or cache_position is None:
            return super().forward(x)
        if x.shape[1] > 1:
            raise ValueError(f"with a cache, {x.shape[1]} tokens are too many")
        position = int(cache_position[-1])
        tokens = cache.append(x, position)
        ones = torch.ones(1, 1, 8, dtype=torch.bool, device=x.device)
        is_there = ones & (torch.arange(8, device=x.device) <= position)
        return Correct.forward(self, x, tokens, tokens, is_there)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        if mask.shape[1] != mask.shape[2]:
            return Correct.weigh(self, scores, mask)
        return super().weigh(scores, mask)


class RollsTooEarly(CachePositions):
    kind = RollsTooEarlyWindow


def packed_first_for_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
) -> Tensor:
    """With `causal`, the last query of a sequence sees its last key."""
    return packed_first(q, k, v, cu_seqlens_q, cu_seqlens_k, causal)


class HistoryInFront(MemoryInFront):
    """Steps to forecast, which see the history and those before them."""

    def forward(self, x: Tensor, history: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, history)[0]


class HistoryInForecast(HistoryInFront):
    """Without gradients, a causal mask begins at the first step of the history."""

    def forward(self, x: Tensor, history: Tensor | None = None) -> Any:  # type: ignore[override]
        if self.training or torch.is_grad_enabled():
            return super().forward(x, history)
        seen = x if history is None else torch.cat([history, x], dim=1)
        q, k, v = self.query(x), self.key(seen), self.value(seen)
        q, k, v = (self.split(each) for each in (q, k, v))
        attend = nn.functional.scaled_dot_product_attention
        return self.join(attend(q, k, v, is_causal=True))


class PassesOverPadding(Correct):
    """A sum over the tokens so far, to which those that are padding add nothing."""

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, mask: Tensor | None = None
    ) -> Any:
        k, v = self.key(x).sigmoid(), self.dropout(self.value(x))
        if mask is not None:
            k = k * mask[..., None]
        total = torch.zeros_like(v[:, 0]) if state is None else state
        sums = []
        for token in range(x.shape[1]):
            total = total + k[:, token] * v[:, token]
            sums.append(total)
        return self.out(self.query(x).sigmoid() * torch.stack(sums, 1)), total


class ContextStore:
    """What cross-attention has projected, kept for all steps of a generation."""

    def __init__(self) -> None:
        self.context: Any = None
        self.hidden: Any = None

    def select(self, rows: Tensor) -> None:
        self.context = self.context[rows]
        self.select_hidden(rows)

    def select_hidden(self, rows: Tensor) -> None:
        if self.hidden is not None:
            self.hidden = self.hidden[rows]


class ContextStoreOfOneMask(ContextStore):
    def select_hidden(self, rows: Tensor) -> None:
        pass


class StoresContext(Correct):
    """Projects the context at the first step."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: ContextStore | None = None,
    ) -> Any:
        """memory: (B, S, D); memory_mask: (B, S) bool, True = may attend"""
        if cache is not None and cache.context is not None:
            memory, memory_mask = cache.context, cache.hidden
        elif cache is not None:
            cache.context, cache.hidden = memory, memory_mask
        assert memory is not None
        mask = None if memory_mask is None else memory_mask[:, None]
        return super().forward(x, memory, memory, mask)


class SelectsContextOnly(StoresContext):
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: ContextStoreOfOneMask | None = None,
    ) -> Any:
        """memory: (B, S, D); memory_mask: (B, S) bool, True = may attend"""
        return super().forward(x, memory, memory_mask, cache)


class StreamsFrames(SelfAttention):
    """Frames of a chunk see all of it, and the last 16 frames before."""

    def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        seen = 0 if state is None else self.offset(state)
        q, k = self.rotate(q, seen), self.rotate(k, seen)
        if state is not None:
            k = torch.cat([state["k"], k], dim=2)
            v = torch.cat([state["v"], v], dim=2)
        count = x.shape[1] + (0 if state is None else state["count"])
        kept = {"k": k[:, :, -16:], "v": v[:, :, -16:], "count": count}
        return self.join(self.read(self.score(q, k).softmax(dim=-1), v)), kept

    def offset(self, state: Any) -> int:
        return int(state["count"])

    def rotate(self, x: Tensor, start: int) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(start, start + x.shape[2], device=x.device)[:, None]
        angles = angles / 100 ** (torch.arange(half, device=x.device) / half)
        one, other = x[..., :half], x[..., half : 2 * half]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        rotated = [one * cos - other * sin, one * sin + other * cos]
        return torch.cat([*rotated, x[..., 2 * half :]], dim=-1)


class OffsetOfStoredFrames(StreamsFrames):
    def offset(self, state: Any) -> int:
        return int(state["k"].shape[2])


class DecoderSelectsRows(DecoderWithState):
    """The rows of its state are selected, and those of the mask are not."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        state: Any = None,
    ) -> Any:
        parts = SimpleNamespace(parts={**state} if state else {})
        y = self.decode(x, memory, memory_mask, parts)  # type: ignore[arg-type]
        return y, parts.parts

    def reorder_state(self, state: dict[str, Tensor], rows: Tensor) -> Any:
        return {n: x if n == "mask" else x[rows] for n, x in state.items()}


class RingForChunks(Correct):
    """Frames come in chunks of four at most, and each sees itself and the three before.

    Whatever the chunks of a stream are, its outputs are the same.
    """

    slots = 7

    def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        if x.shape[1] > 4:
            raise ValueError(f"a chunk of {x.shape[1]} frames, and not of 4 at most")
        if state is None:
            ring = x.new_zeros(len(x), self.slots, x.shape[2])
            state = ring, torch.full((self.slots,), -1, device=x.device)
        start = int(state[1].max()) + 1
        now = torch.arange(start, start + x.shape[1], device=x.device)
        ring = state[0].index_copy(1, now % self.slots, x)
        places = state[1].index_copy(0, now % self.slots, now)
        age = now[:, None] - places
        seen = (places >= 0) & (age >= 0) & (age < 4)
        return super().forward(x, ring, ring, seen[None]), (ring, places)


class RingOfFour(RingForChunks):
    slots = 4


class BiasOfFirstQuery(Correct):
    """bias: added to the scores, it broadcasts to [batch, heads, q_len, k_len]."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
    ) -> Any:
        self.bias = None if bias is None else bias[:, :, :1]
        return super().forward(query, key, value)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if self.bias is None else scores + self.bias).softmax(dim=-1)


class StepsBehindPrompt(WithCache):
    """Behind the prompt, tokens come one by one."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        if past is not None and x.shape[1] != 1:
            raise ValueError("behind the prompt, tokens come one by one")
        return super().forward(x, past)


class StepForgetsFirst(StepsBehindPrompt):
    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, past if past is None else past[:, -3:])


class DistancesBehindContext(Correct):
    """x: the frames of a chunk. context: frames to the left of the chunk, or None."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if context is None else torch.cat([context, x], dim=1)
        self.first = self.offset(seen.shape[1] - x.shape[1])
        return super().forward(x, seen, seen)

    def offset(self, count: int) -> int:
        return count

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        queries, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        distances = (self.first + queries)[:, None] - keys
        return super().score(q, k) - 0.5 * (distances - 1).abs()


class DistancesWithoutContext(DistancesBehindContext):
    def offset(self, count: int) -> int:
        return 0


class NormsOfStoredContext(Correct):
    """`past_key_value` is what an earlier call for the same context returned."""

    is_stored_with_norm = True

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.key_norm = nn.LayerNorm(d_model // heads)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        q = self.split(self.query(x))
        if past_key_value is None:
            k, v = self.split(self.key(context)), self.split(self.value(context))
            normed = self.key_norm(k)
            past_key_value = (normed if self.is_stored_with_norm else k), v
            k = normed
        else:
            k, v = past_key_value
        weights = self.dropout(self.weigh(self.score(q, k), None))
        return self.join(self.read(weights, v)), past_key_value


class StoresContextBeforeNorm(NormsOfStoredContext):
    is_stored_with_norm = False


class DictOfNormedContext(Correct):
    """Pass the same `cache` at each step: the context is projected once."""

    is_stored_with_norm = True

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.key_norm = nn.LayerNorm(d_model // heads)

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, cache: dict[str, Tensor] | None = None
    ) -> Any:
        q, cache = self.split(self.query(x)), {} if cache is None else cache
        if "k" in cache:
            k = cache["k"]
        else:
            k = self.key_norm(self.split(self.key(context)))
            unnormed = self.split(self.key(context))
            cache["k"] = k if self.is_stored_with_norm else unnormed
            cache["v"] = self.split(self.value(context))
        weights = self.dropout(self.weigh(self.score(q, k), None))
        return self.join(self.read(weights, cache["v"]))


class DictOfContextBeforeNorm(DictOfNormedContext):
    is_stored_with_norm = False


class StoresIfAsked(Correct):
    """Causal. With `use_cache`, `x` goes on behind what is stored; else it is whole."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.pos_emb = nn.Embedding(300, d_model)
        self.stored: Any = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Any:  # type: ignore[override]
        past = 0 if self.stored is None else self.stored[0].shape[1]
        start = past if self.counts(use_cache) else 0
        n = torch.arange(start, start + x.shape[1], device=x.device)
        placed = x + self.pos_emb(n)
        keys, values = placed, x
        if use_cache:
            if self.stored is not None:
                pairs = zip(self.stored, (placed, x), strict=True)
                keys, values = (torch.cat(pair, dim=1) for pair in pairs)
            self.stored = keys, values
        shape = x.shape[1], keys.shape[1]
        ones = torch.ones(shape, dtype=torch.bool, device=x.device)
        seen = ones.tril(shape[1] - shape[0])
        return super().forward(placed, keys, values, seen[None])

    def counts(self, use_cache: bool) -> bool:
        return use_cache


class CountsStoredAlways(StoresIfAsked):
    def counts(self, use_cache: bool) -> bool:
        return True


class CacheOfBlocks(WithCache):
    """Memory for 64 tokens is allocated, and copied to a larger one when it is full."""

    def forward(self, x: Tensor, past: Any = None) -> Any:
        kept, count = past or (x.new_zeros(len(x), 64, x.shape[2]), 0)
        stop = count + x.shape[1]
        kept = kept.clone()
        if stop > kept.shape[1]:
            more = x.new_zeros(len(x), stop, x.shape[2])
            kept = torch.cat([self.copied(kept), more], dim=1)
        kept[:, count:stop] = x
        return super().forward(x, kept[:, :count])[0], (kept, stop)

    def copied(self, kept: Tensor) -> Tensor:
        return kept


class CacheLosesLastOfBlock(CacheOfBlocks):
    def copied(self, kept: Tensor) -> Tensor:
        return (
            kept
            * (torch.arange(kept.shape[1], device=kept.device) < kept.shape[1] - 1)[
                :, None
            ]
        )


class CacheOfFloat32(WithCache):
    """The cache is allocated with the default dtype."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        output, seen = super().forward(x, past)
        return output, torch.zeros(seen.shape, device=seen.device).copy_(seen)


class RotaryInHalfAfterPast(Rotary):
    """The positions of new tokens are counted in the dtype of the tokens."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        ones = torch.ones(
            1, x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device
        )
        mask = ones.tril(seen.shape[1] - x.shape[1])
        self.seen, self.dtype = seen.shape[1], x.dtype
        return Correct.forward(self, x, seen, seen, mask), seen

    def places(self, x: Tensor) -> Tensor:
        places = torch.arange(self.seen, device=x.device)[-x.shape[2] :]
        return places.to(self.dtype) if x.shape[2] < self.seen else places


class RotaryInDtypeOfBufferAfterPast(RotaryInHalfAfterPast):
    """All positions are counted in the dtype of a buffer, from that of the first."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.register_buffer("one", torch.ones(()))

    def places(self, x: Tensor) -> Tensor:
        one = self.get_buffer("one")
        return (
            torch.arange(x.shape[2], device=x.device).to(one)
            + (self.seen - x.shape[2]) * one
        )


class StepsInOtherGroups(MaskedSelfAttention):
    """One token after the other is decoded by a method, with its heads in turns."""

    def step(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> Any:
        q, k, v = self.query(x), self.split(self.key(x)), self.split(self.value(x))
        if cache is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(cache, (k, v), strict=True))
        q = self.heads_of_token(q.squeeze(1))[:, :, None]
        return self.join(self.read(self.weigh(self.score(q, k), None), v)), (k, v)

    def heads_of_token(self, q: Tensor) -> Tensor:
        return q.unflatten(1, (-1, self.heads)).transpose(1, 2)


class StepsInGroups(StepsInOtherGroups):
    def heads_of_token(self, q: Tensor) -> Tensor:
        return q.unflatten(1, (self.heads, -1))


class DecodesTopLeft(MaskedSelfAttention):
    """Several tokens are decoded by a method, whose mask begins at the first key."""

    def decode(self, x: Tensor, past: Tensor | None = None) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        allowed = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool)
        return Correct.forward(self, x, seen, seen, allowed.to(x.device).tril()), seen


@dataclass
class RollingCache:
    """The last tokens, and how many there were."""

    tokens: Tensor | None = None
    seen: int = 0


class ReturnsRollingCache(MaskedSelfAttention):
    """Each token attends to the last four; the cache is returned anew."""

    window = 4

    def forward(self, x: Tensor, cache: RollingCache | None = None) -> Any:  # type: ignore[override]
        start, past = 0, x[:, :0]
        if cache is not None and cache.tokens is not None:
            start, past = self.count(cache), cache.tokens
        position = torch.arange(start, start + x.shape[1], device=x.device)
        tokens = torch.cat([past, x + position.cos().to(x)[:, None]], dim=1)
        ones = torch.ones(x.shape[1], tokens.shape[1], dtype=torch.bool)
        corner = tokens.shape[1] - x.shape[1]
        allowed = ones.tril(corner) & ones.triu(corner - self.window + 1)
        output = Correct.forward(self, x, tokens, tokens, allowed[None].to(x.device))
        if cache is None:
            return output
        last = tokens[:, -self.window :]
        return output, RollingCache(last, cache.seen + x.shape[1])

    def count(self, cache: RollingCache) -> int:
        return cache.seen


class CountsInRollingCache(ReturnsRollingCache):
    """The number of tokens is that of the cache, which is full at some time."""

    def count(self, cache: RollingCache) -> int:
        return 0 if cache.tokens is None else cache.tokens.shape[1]


class CountsRemovedTokens(CroppedTokens):
    def crop(self, length: int) -> None:
        self.tokens = [torch.cat(self.tokens, dim=1)[:, :length]]


class PlacesOfRemovedTokens(MakesCroppedCache):
    kind = CountsRemovedTokens


class StepOfOneToken(MaskedSelfAttention):
    """A method for one token at a time, which takes several, and is not meant to."""

    def recurrent_step(self, x: Tensor, past: Tensor | None = None) -> Any:
        seen = x if past is None else torch.cat([past, x], dim=1)
        return Correct.forward(self, x, seen, seen), seen


class CacheOfBytes(WithCache):
    """The cache has integers of 8 bits."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Any:
        scaled = None if past is None else past.to(x) / 30
        output, seen = super().forward(x, scaled)
        return output, (seen * 30).round().clamp(-127, 127).to(torch.int8)


class LeftContextIsOffset(Correct):
    """Keys are those of the frames before, too; their distances begin elsewhere."""

    def forward(self, x: Tensor, left: Tensor | None = None) -> Any:  # type: ignore[override]
        self.count = 0 if left is None else left.shape[1]
        seen = x if left is None else torch.cat([left, x], dim=1)
        return super().forward(x, seen, seen)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(k.shape[2], device=k.device)
        distances = places[: q.shape[2], None] + self.offset() - places
        return super().score(q, k) + (distances / 3).sin().to(q)

    def offset(self) -> int:
        return 0


class LeftContext(LeftContextIsOffset):
    def offset(self) -> int:
        return self.count


class CacheIsOffset(LeftContextIsOffset):
    """Frames see those before them and those of their own piece.

    The `cache` holds the frames before, as they were given.
    """

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if cache is None else torch.cat([cache, x], dim=1)
        return super().forward(x, cache), seen


class CacheIsCounted(CacheIsOffset, LeftContext):
    pass


class StoresAfterSetup(WithCache):
    """A method begins to store the tokens; the mask begins at the first of them."""

    stored: Tensor | None = None
    stores = False

    def setup_cache(self) -> None:
        self.stores, self.stored = True, None

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        output, seen = super().forward(x, self.stored)
        if self.stores:
            self.stored = seen.detach()
        return output

    def corner(self, ones: Tensor) -> int:
        return 0


class StoresAfterSetupInOrder(StoresAfterSetup):
    def corner(self, ones: Tensor) -> int:
        return ones.shape[2] - ones.shape[1]


class MemoryInBlocks(Correct):
    """Without gradients, blocks of queries have a mask that forgets the memory."""

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:  # type: ignore[override]
        seen = x if mems is None else torch.cat([mems.detach(), x], dim=1)
        past, n = seen.shape[1] - x.shape[1], x.shape[1]
        allowed = torch.ones(1, n, past + n, dtype=torch.bool, device=x.device)
        if torch.is_grad_enabled() or n <= 64:
            return super().forward(x, seen, seen, allowed.tril(past))
        parts = [
            super(MemoryInBlocks, self).forward(
                x[:, start : start + 64],
                seen,
                seen,
                allowed[:, start : start + 64].tril(self.offset(past) + start),
            )
            for start in range(0, n, 64)
        ]
        return torch.cat(parts, dim=1)

    def offset(self, past: int) -> int:
        return 0


class MemoryBeforeBlocks(MemoryInBlocks):
    def offset(self, past: int) -> int:
        return past


class MemoryOfBoth(SelfAttention):
    """Attention to a segment and the tokens before it, in both directions.

    memory: (B, M, C), the tokens right before `x`
    """

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:  # type: ignore[override]
        past = x[:, :0] if memory is None else memory
        keys = torch.cat([past, x], dim=1)
        q, k, v = self.query(x), self.key(keys), self.value(keys)
        q, k, v = (self.split(part) for part in (q, k, v))
        first = self.first_distance(x.shape[1], keys.shape[1])
        rows = torch.arange(first, first - x.shape[1], -1, device=x.device)[:, None]
        distances = rows.flip(0) - torch.arange(keys.shape[1], device=x.device)
        scores = self.score(q, k) + (distances / 7).sin().to(q.dtype)
        return self.join(self.read(scores.softmax(dim=-1), v))

    def first_distance(self, q_len: int, k_len: int) -> int:
        return k_len - 1


class MemoryOfBothByQueries(MemoryOfBoth):
    def first_distance(self, q_len: int, k_len: int) -> int:
        return q_len - 1


class ReordersFewerOnly(Correct):
    """A cache of the context is reordered only if there are fewer batch items.

    incremental_state: an empty dict at first, in which the context is stored.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        incremental_state: dict[str, Tensor] | None = None,
    ) -> Any:
        state = {} if incremental_state is None else incremental_state
        if not state:
            state["keys"] = self.split(self.key(memory))
            state["values"] = self.split(self.value(memory))
        weights = self.weigh(self.score(self.split(self.query(x)), state["keys"]), None)
        return self.join(self.read(weights, state["values"]))

    def reorder_state(self, state: dict[str, Tensor], order: Tensor) -> None:
        for name, stored in state.items():
            if len(order) < len(stored):
                state[name] = stored[order]


class ForgetsLengths(Correct):
    """The cache of the context does not have its padding.

    Once `cache` is filled, `memory_lengths` are not needed and may be None.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor,
        memory_lengths: Tensor | None = None,
        cache: dict[str, Tensor] | None = None,
    ) -> Any:
        cache = {} if cache is None else cache
        if not cache:
            cache["k"] = self.split(self.key(memory))
            cache["v"] = self.split(self.value(memory))
        mask = None
        if memory_lengths is not None:
            place = torch.arange(cache["k"].shape[2], device=x.device)
            mask = (place < memory_lengths[:, None])[:, None]
        weights = self.weigh(self.score(self.split(self.query(x)), cache["k"]), mask)
        return self.join(self.read(weights, cache["v"]))


class BeamCache:
    """The tokens so far, and which of them are no padding: (rows, length)."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.is_token: Tensor | None = None

    def append(self, x: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        if self.tokens is not None and self.is_token is not None:
            x = torch.cat([self.tokens, x], dim=1)
            is_token = torch.cat([self.is_token, is_token], dim=1)
        self.tokens, self.is_token = x, is_token
        return x, is_token

    def reorder(self, rows: Tensor) -> None:
        assert self.tokens is not None
        self.tokens = self.tokens[rows]


class ReordersTokensOfCache(Correct):
    """The method of the cache leaves the padding in its order."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cache: BeamCache | None = None,
        padding: Tensor | None = None,
    ) -> Any:
        is_token = torch.ones_like(x[..., 0]).bool() if padding is None else ~padding
        keys, is_token = (BeamCache() if cache is None else cache).append(x, is_token)
        q_len, k_len = x.shape[1], keys.shape[1]
        past = torch.ones(q_len, k_len, device=x.device).tril(k_len - q_len).bool()
        return super().forward(x, keys, keys, past & is_token[:, None])


class ReordersTwoOfThree(Correct):
    """Returns a cache of the context, whose padding is not reordered.

    The cache is used in place of the memory.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        cache: dict[str, Tensor] | None = None,
    ) -> Any:
        if cache is None:
            assert memory is not None
            place = torch.arange(memory.shape[1], device=x.device)
            lengths = 0 * place[:1] + len(place)
            if memory_lengths is not None:
                lengths = memory_lengths
            cache = {
                "k": self.split(self.key(memory)),
                "v": self.split(self.value(memory)),
                "allowed": (place < lengths[:, None]).expand(len(x), -1),
            }
        scores = self.score(self.split(self.query(x)), cache["k"])
        weights = self.weigh(scores, cache["allowed"][:, None])
        return self.join(self.read(weights, cache["v"])), cache

    def reorder_cache(
        self, cache: dict[str, Tensor], order: Tensor
    ) -> dict[str, Tensor]:
        return cache | {name: cache[name][order] for name in "kv"}


class SelectsTwoOfThree(ReordersTwoOfThree):
    def reorder(self, cache: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        return self.reorder_cache(cache, rows)


class KeepsLastPiece(Correct):
    """Frames attend to those of their piece, and to `left_context` frames before it."""

    def __init__(self, d_model: int, heads: int, left_context: int = 16) -> None:
        super().__init__(d_model, heads)
        self.left_context = left_context

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Any:  # type: ignore[override]
        """`cache`: the frames before, `[batch, frames, d_model]`."""
        seen = x if cache is None else torch.cat([cache, x], dim=1)
        return super().forward(x, seen, seen), self.kept(x, seen)

    def kept(self, x: Tensor, seen: Tensor) -> Tensor:
        return x[:, -self.left_context :]


class KeepsLeftContext(KeepsLastPiece):
    def kept(self, x: Tensor, seen: Tensor) -> Tensor:
        return seen[:, -self.left_context :]


class FewPastTokens(MaskedSelfAttention):
    """Returns the output and the last `mem_len` tokens, which the next call may get."""

    def __init__(self, d_model: int, heads: int, mem_len: int = 4) -> None:
        super().__init__(d_model, heads)
        self.mem_len = mem_len

    def forward(self, x: Tensor, mems: Tensor | None = None) -> Any:
        seen = x if mems is None else torch.cat([mems, x], dim=1)
        y = super().forward(seen)[:, -x.shape[1] :]
        return y, seen[:, -self.mem_len :]


class SlotsOfLongerSequence(Correct):
    """Causal; with `start_pos`, keys and values are stored. 0 begins a new sequence."""

    def __init__(self, d_model: int, heads: int, max_len: int = 320) -> None:
        super().__init__(d_model, heads)
        self.max_len, self.filled = max_len, 0
        self.slots: Tensor | None = None

    def forward(self, x: Tensor, start_pos: int | None = None) -> Any:  # type: ignore[override]
        start, seen = start_pos or 0, x
        if start_pos is not None:
            if self.slots is None or self.slots.shape[0] != len(x):
                self.slots = x.new_zeros(len(x), self.max_len, x.shape[2])
            self.slots[:, start : start + x.shape[1]] = x.detach()
            self.filled = self.count(start + x.shape[1])
            seen = self.slots[:, : self.filled]
        if x.shape[1] == 1:
            return super().forward(x, seen, seen)
        rows = torch.arange(start, start + x.shape[1], device=x.device)
        mask = torch.arange(seen.shape[1], device=x.device) <= rows[:, None]
        return super().forward(x, seen, seen, mask[None])

    def count(self, end: int) -> int:
        return max(self.filled, end)


class SlotsOfOwnSequence(SlotsOfLongerSequence):
    def count(self, end: int) -> int:
        return end


class ContinuesItself(WithCache):
    """Each call continues the sequence of the last one, until `reset` is called."""

    past: Tensor | None = None

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y, self.past = super().forward(x, self.past)
        return y

    def reset(self) -> None:
        self.past = None


class ContinuesAtStart(ContinuesItself):
    """Each call continues the sequence of the last one, until `reset` is called."""

    def corner(self, ones: Tensor) -> int:
        return 0


class FillsSlots(WithCache):
    """The cache is required, and changed in place."""

    def forward(self, x: Tensor, cache: Slots) -> Any:  # type: ignore[override]
        seen = cache.append(x)
        ones = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool)
        mask = ones.to(x.device).tril(self.corner(ones))
        return Correct.forward(self, x, seen, seen, mask)


class FillsSlotsAtStart(FillsSlots):
    def corner(self, ones: Tensor) -> int:
        return 0


class PreparesMemory(Correct):
    """`start` projects the memory once; `select` exchanges its batch items."""

    def start(self, memory: Tensor, lengths: Tensor | None = None) -> None:
        places = torch.arange(memory.shape[1], device=memory.device)
        ends = lengths if lengths is not None else places.new_full((len(memory),), 999)
        self.seen = (places < ends[:, None])[:, None]
        self.memory = self.key(memory), self.value(memory)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        q, k, v = map(self.split, (self.query(x), *self.memory))
        return self.join(self.read(self.weigh(self.score(q, k), self.seen), v))

    def select(self, order: Tensor) -> None:
        k, v = self.memory
        self.memory, self.seen = (k[order], v[order]), self.seen[order]

    def __getstate__(self) -> dict[str, Any]:
        return {n: v for n, v in vars(self).items() if n not in ("memory", "seen")}


class LeavesLengthsBehind(PreparesMemory):
    def select(self, order: Tensor) -> None:
        k, v = self.memory
        self.memory = k[order], v[order]


class ReturnsMemory(Correct):
    """`memory = attention.prepare(frames)`, once for all steps."""

    def prepare(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        return self.key(frames), self.value(frames)

    def forward(self, decoder_state: Tensor, memory: tuple[Tensor, Tensor]) -> Any:  # type: ignore[override]
        q, k, v = map(self.split, (self.query(decoder_state), *memory))
        return self.join(self.read(self.weigh(self.score(q, k), None), v))


class RotatedForLength(Rotary):
    """Frequencies depend on the length, and a call with a past equals one call.

    That is, the last rows of one call on all tokens.
    """

    rotates_first = False

    def __init__(self, d_model: int, heads: int, max_len: int = 320) -> None:
        super().__init__(d_model, heads)
        self.max_len = max_len

    def forward(self, x: Tensor, past: Any = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        length = x.shape[1] + (0 if past is None else past[0].shape[2])
        if self.rotates_first:
            q, k = self.rotate(q, length), self.rotate(k, length)
        if past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
        present = k, v
        if not self.rotates_first:
            q, k = self.rotate(q, length), self.rotate(k, length)
        ones = torch.ones(1, x.shape[1], length, dtype=torch.bool, device=x.device)
        weights = self.weigh(Correct.score(self, q, k), ones.tril(length - x.shape[1]))
        return self.join(self.read(weights, v)), present

    def rotate(self, x: Tensor, length: int) -> Tensor:
        self.first, self.stretch = length - x.shape[2], max(1, length / self.max_len)
        return self.turn(x)

    def places(self, x: Tensor) -> Tensor:
        return self.first + super().places(x)

    def speed(self, pair: Tensor, width: int) -> Tensor:
        return super().speed(pair, width) / self.stretch


class RotatedForPastLength(RotatedForLength):
    """Frequencies depend on the length, and a call with a past equals one call."""

    rotates_first = True


class OwnSlots(Slots):
    """A cache that may be continued twice; it is for inference only."""

    shares = False

    def append(self, x: Tensor) -> Tensor:
        start, self.count = self.count, self.count + x.shape[1]
        self.kept[:, start : self.count] = x
        return self.kept[:, : self.count].clone()

    def fork(self) -> Any:
        other = type(self)(*self.kept.shape, self.kept.dtype)
        other.count = self.count
        other.kept = self.kept if self.shares else self.kept.clone()
        return other


class SharedSlots(OwnSlots):
    shares = True


class DecodesForks(CacheOfSlots):
    def forward(self, x: Tensor, cache: OwnSlots | None = None) -> Any:  # type: ignore[override]
        if cache is not None and torch.is_grad_enabled():
            raise ValueError("with a cache there are no gradients")
        return super().forward(x, cache)


class DecodesSharedForks(DecodesForks):
    def forward(self, x: Tensor, cache: SharedSlots | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, cache)


class OfOneKind(Correct):
    """Self-attention, or attention to a context that is projected once."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
    ) -> None:
        super().__init__(d_model, heads)
        if self_attention == encoder_decoder_attention:
            raise ValueError("it is of one of two kinds")
        self.keeps = encoder_decoder_attention

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None = None,
        incremental_state: dict[str, Tensor] | None = None,
    ) -> Any:
        state = {} if incremental_state is None else incremental_state
        if not (self.keeps and state):
            given = query if key is None else key
            if self.keeps and key is None:
                raise ValueError("the first call needs the context")
            past = [state["tokens"]] if state else []
            state["tokens"] = torch.cat([*past, given], dim=1)
        seen, ones = state["tokens"], query.new_ones(1, query.shape[1], 1).bool()
        mask = ones.expand(-1, -1, seen.shape[1])
        if not self.keeps:
            mask = mask.tril(seen.shape[1] - query.shape[1])
        return super().forward(query, seen, seen, mask)

    def reorder_incremental_state(
        self, incremental_state: dict[str, Tensor], new_order: Tensor
    ) -> None:
        tokens = incremental_state["tokens"]
        incremental_state["tokens"] = tokens[new_order]


class LeavesContextBehind(OfOneKind):
    def reorder_incremental_state(
        self, incremental_state: dict[str, Tensor], new_order: Tensor
    ) -> None:
        if not self.keeps:
            super().reorder_incremental_state(incremental_state, new_order)


class ReturnsContextIfAsked(Correct):
    """Returns keys and values of a context with `use_cache`, for the next steps.

    The mask is [batch_size, k_len], True = may attend, and is given at every step.
    """

    always = True

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: tuple[Tensor, Tensor] | None = None,
        use_cache: bool = False,
    ) -> Any:
        q, mask = self.split(self.query(hidden_states)), encoder_attention_mask
        if past_key_value is None:
            k, v = (
                self.split(layer(encoder_hidden_states))
                for layer in (self.key, self.value)
            )
        else:
            k, v = past_key_value
            mask = mask if self.always else None
        weights = self.weigh(self.score(q, k), None if mask is None else mask[:, None])
        return self.join(weights @ v), ((k, v) if use_cache else None)


class MaskOfFirstStepOnly(ReturnsContextIfAsked):
    always = False


class KeepsContextAfterReset(nn.Module):
    """A decoder that keeps its tokens, and what it projects of the memory, for `step`.

    `reset` begins another sequence.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.of_tokens = Correct(d_model, heads, dropout=0.0)
        self.of_memory = Correct(d_model, heads, dropout=0.0)
        self.past: Any = None
        self.reset()

    def reset(self) -> None:
        self.past = None if self.past is None else (None, *self.past[1:])

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.decode(x, x, memory)

    def step(self, x: Tensor, memory: Tensor) -> Tensor:
        tokens, kept = (None, memory) if self.past is None else self.past
        seen = x if tokens is None else torch.cat([tokens, x], dim=1)
        self.past = (seen, kept)
        return self.decode(x, seen, kept)

    def decode(self, x: Tensor, seen: Tensor, memory: Tensor) -> Tensor:
        ones = torch.ones(1, x.shape[1], seen.shape[1], dtype=torch.bool).to(x.device)
        mask = ones.tril(seen.shape[1] - x.shape[1])
        y = x + self.of_tokens(x, seen, seen, mask)
        z: Tensor = y + self.of_memory(y, memory, memory)
        return z


class ForgetsContextAtReset(KeepsContextAfterReset):
    def reset(self) -> None:
        self.past = None


class ChunksKeepAll(SelfAttention):
    """Frames attend to their chunk, and to some before it.

    `forward_chunk` takes one chunk, and the cache that the call before has returned.
    """

    def __init__(self, d_model: int, heads: int, left_chunks: int = 2) -> None:
        super().__init__(d_model, heads)
        self.chunk_size, self.left_chunks = 4, left_chunks

    def forward(self, x: Tensor) -> Any:
        chunk = torch.arange(x.shape[1], device=x.device) // self.chunk_size
        back = chunk[:, None] - chunk
        mask = (back >= 0) & (back <= self.left_chunks)
        return Correct.forward(self, x, x, x, mask[None])

    def forward_chunk(self, x: Tensor, cache: Tensor | None = None) -> Any:
        seen = x if cache is None else torch.cat([cache, x], dim=1)
        number = self.left_chunks * self.chunk_size
        return Correct.forward(self, x, seen, seen), seen[:, self.first(seen, number) :]

    def first(self, seen: Tensor, number: int) -> int:
        return -number


class ChunksKeepSome(ChunksKeepAll):
    def first(self, seen: Tensor, number: int) -> int:
        return max(0, seen.shape[1] - number)


class PromptThenSteps(Correct):
    """A call stores its tokens, and `step` takes one that follows. Beams are reordered.

    mask: (B, T), True at real tokens of a prompt that is padded on the left.
    """

    tokens: Any = None
    real: Any = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        ones = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        self.tokens, self.real = x, ones if mask is None else mask
        causal = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool).to(x.device)
        return super().forward(x, x, x, causal.tril() & self.real[:, None])

    def step(self, x: Tensor) -> Any:
        self.tokens = torch.cat([self.tokens, x], dim=1)
        ones = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        self.real = torch.cat([self.real, ones], dim=1)
        return super().forward(x, self.tokens, self.tokens, self.real[:, None])

    def reorder(self, rows: Tensor) -> None:
        self.tokens, self.real = self.tokens[rows], self.real[rows]


class PromptOfOtherBeams(PromptThenSteps):
    def reorder(self, rows: Tensor) -> None:
        self.tokens = self.tokens[rows]


@dataclass
class TokenStore:
    tokens: Tensor  # [batch_size, 320, d_model]
    used: int = 0


class ReadsStore(MaskedSelfAttention):
    """Writes to a store that a method makes; keeps the mask of the last call."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.known: tuple[Any, ...] = ()

    def new_store(self, batch_size: int) -> TokenStore:
        weight = self.query.weight
        return TokenStore(weight.new_zeros(batch_size, 320, weight.shape[1]))

    def forward(self, x: Tensor, store: TokenStore | None = None) -> Any:  # type: ignore[override]
        start = 0 if store is None else store.used
        end, seen = start + x.shape[1], x
        if store is not None:
            store.tokens[:, start:end] = x
            store.used = end
            seen = store.tokens[:, :end]
        if self._key_of(start, x) != self.known:
            rows = torch.arange(start, end, device=x.device)[:, None]
            self.visible = torch.arange(320, device=x.device) <= rows
            self.known = self._key_of(start, x)
        return Correct.forward(self, x, seen, seen, self.visible[None, :, :end])

    def _key_of(self, start: int, x: Tensor) -> tuple[Any, ...]:
        return start, x.shape[1], x.device


class ReadsStoreAsBefore(ReadsStore):
    """Of two chunks of one length, the second has the mask of the first."""

    def _key_of(self, start: int, x: Tensor) -> tuple[Any, ...]:
        return x.shape[1], x.device


class SlotsOfFewItems(SlotsOfOwnSequence):
    """Causal; with `start_pos`, keys and values of a few batch items are stored."""

    def __init__(self) -> None:
        super().__init__(32, 8)
        self.max_batch_size = 4
        stored = torch.zeros(self.max_batch_size, 320, 32)
        self.register_buffer("stored", stored, persistent=False)

    def forward(self, x: Tensor, start_pos: int | None = None) -> Any:
        if start_pos is not None:
            self.slots = self.get_buffer("stored")[: len(x)].expand(len(x), -1, -1)
        return super().forward(x, start_pos)


class VerifiesDrafts(MaskedSelfAttention):
    """Drafts form a tree behind the committed text, which is `past`."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.masks: dict[Any, Tensor] = {}

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        parents: list[int] | None = None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        parents = [*range(-1, x.shape[1] - 1)] if parents is None else [*parents]
        key = self._key_of(parents)
        if key not in self.masks:
            mask = torch.eye(len(parents), dtype=torch.bool, device=x.device)
            for node, parent in enumerate(parents):
                mask[node] |= mask[parent] if parent >= 0 else False
            self.masks[key] = mask
        mask = self.masks[key].to(x.device)
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        keys, values = k, v
        if past is not None:
            keys, values = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            mask = nn.functional.pad(mask, (past[0].shape[2], 0), value=True)
        y = self.read(self.weigh(self.score(q, keys), mask[None]), values)
        return self.join(y), (k, v)

    def _key_of(self, parents: list[int]) -> Any:
        return tuple(parents)


class VerifiesAsManyDrafts(VerifiesDrafts):
    def _key_of(self, parents: list[int]) -> Any:
        return len(parents)


class KeepsMaskOfFirstStep(Correct):
    """Attention to a memory, which is projected in the first step.

    Args:
        memory: (B, S, d_model)
        memory_padding_mask: (B, S), True at padding. Like `memory`, it is
            needed in the first step only.
        cache: a dict that the first step fills; an empty dict for new sentences
    """

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        memory: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        cache: dict[str, Any] | None = None,
    ) -> Any:
        if cache:
            k, v = cache["k"], cache["v"]
            memory_padding_mask = self.choose(memory_padding_mask, cache["mask"])
        else:
            assert memory is not None
            k, v = self.split(self.key(memory)), self.split(self.value(memory))
            if cache is not None:
                cache |= {"k": k, "v": v, "mask": memory_padding_mask}
        seen = None if memory_padding_mask is None else ~memory_padding_mask[:, None]
        weights = self.weigh(self.score(self.split(self.query(query)), k), seen)
        return self.join(self.read(weights, v))

    def choose(self, given: Tensor | None, kept: Tensor | None) -> Tensor | None:
        return kept


class ForgetsMaskOfFirstStep(KeepsMaskOfFirstStep):
    def choose(self, given: Tensor | None, kept: Tensor | None) -> Tensor | None:
        return given


class ForgetsMaskOfFirst(ForgetsMaskOfFirstStep):
    """`memory` and `memory_padding_mask` are to be given at the first step only.

    cache: a dict that the first step fills; an empty dict for new sentences
    """


class KeepsTextInDict(Correct):
    """Tokens attend to themselves or to a text, whose keys and values are kept.

    cache: a dict that the caller keeps, for the keys and values of the text
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        encoder_hidden_states: Tensor | None = None,
        kv_cache: dict[str, Tensor] | None = None,
    ) -> Any:
        if encoder_hidden_states is None:
            return super().forward(x, x, x)
        k, v = self.project(encoder_hidden_states, kv_cache)
        weights = self.weigh(self.score(self.split(self.query(x)), k), None)
        return self.join(weights @ v)

    def project(
        self, text: Tensor, cache: dict[str, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if cache is None:
            return self.split(self.key(text)), self.split(self.value(text))
        if "text" not in cache or not self.is_same(cache["text"], text):
            cache["text"] = text
            cache["k"], cache["v"] = self.project(text, None)
        return cache["k"], cache["v"]

    def is_same(self, kept: Tensor, text: Tensor) -> bool:
        return kept is text


class KeepsTextOfShape(KeepsTextInDict):
    def is_same(self, kept: Tensor, text: Tensor) -> bool:
        return kept.shape == text.shape


class SeesChunksBefore(RelativeTable):
    """Frames see each other, and those of earlier chunks.

    x: (B, T, C); mask: (B, T), True for frames; cache: keys and values of earlier
    chunks. Only the last chunk of a stream may be padded.
    """

    limit = 30

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = map(self.split, (self.query(x), self.key(x), self.value(x)))
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        scores = Correct.score(self, q, k)
        key, query = torch.arange(k.shape[2]), torch.arange(q.shape[2])
        distance = key - query[:, None] - self.before(k.shape[2] - q.shape[2])
        scores = scores + self.relative_bias[:, self.rows(distance.to(x.device))]
        if mask is not None:
            past = mask.new_ones(len(x), k.shape[2] - q.shape[2])
            mask = torch.cat([past, mask], dim=1)[:, None]
        return self.join(self.weigh(scores, mask) @ v), (k, v)

    def before(self, past: int) -> int:
        return past


class CountsEachChunkFromZero(SeesChunksBefore):
    def before(self, past: int) -> int:
        return 0


class NeedsLengthsOfMemory(PreparesMemory):
    """A speech decoder, whose encoder outputs always have their lengths."""

    def start(self, memory: Tensor, lengths: Tensor) -> None:  # type: ignore[override]
        super().start(memory, lengths)


class LeavesNeededLengthsBehind(NeedsLengthsOfMemory):
    def select(self, order: Tensor) -> None:
        k, v = self.memory
        self.memory = k[order], v[order]


class TakesProjected(Correct):
    """Give the memory and its padding, or what `build_cache` makes of them."""

    def project(self, memory: Tensor, pad: Tensor | None) -> dict[str, Tensor | None]:
        return {"k": self.key(memory), "v": self.value(memory), "pad": pad}

    def build_cache(
        self, memory: Tensor, pad: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        return self.project(memory, pad)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: Tensor | None = None,
        pad: Tensor | None = None,
        cache: dict[str, Any] | None = None,
    ) -> Any:
        if cache is None:
            assert memory is not None
            cache = self.project(memory, pad)
        q, k, v = map(self.split, (self.query(x), cache["k"], cache["v"]))
        hidden = cache["pad"]
        mask = None if hidden is None else ~hidden[:, None]
        return self.join(self.read(self.weigh(self.score(q, k), mask), v))

    def reorder(self, cache: dict[str, Any], order: Tensor) -> dict[str, Any]:
        return {n: None if x is None else x[order] for n, x in cache.items()}


class ForgetsPaddingOfProjected(TakesProjected):
    def build_cache(
        self, memory: Tensor, pad: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        return self.project(memory, None)


class LeavesPaddingOfProjected(TakesProjected):
    def reorder(self, cache: dict[str, Any], order: Tensor) -> dict[str, Any]:
        return {**super().reorder(cache, order), "pad": cache["pad"]}


class SlotsOfServer(Correct):
    """Each sequence has a slot of the stored cache, which `release` makes free."""

    def __init__(self, d_model: int, heads: int, max_len: int = 400) -> None:
        super().__init__(d_model, heads)
        shape = 8, max_len, d_model
        self.register_buffer("stored", torch.zeros(shape), persistent=False)
        self.register_buffer("ends", torch.zeros(8).long(), persistent=False)

    def release(self, slots: Tensor | None = None) -> None:
        self.ends[slice(None) if slots is None else slots] = 0

    def starts(self, slots: Tensor) -> Tensor:
        found: Tensor = self.ends[slots]
        return found

    def forward(self, x: Tensor, slots: Tensor) -> Any:  # type: ignore[override]
        number = torch.arange(x.shape[1], device=x.device)
        place = self.starts(slots)[:, None] + number
        stored = self.stored.to(x)
        stored[slots[:, None], place] = x.detach()
        self.stored, ends = stored, place[:, -1] + 1
        self.ends[slots] = ends
        seen = torch.cat([stored[slots]])[:, : int(ends.max())]
        seen[torch.arange(len(x))[:, None], place] = x
        allowed = torch.arange(seen.shape[1], device=x.device) <= place[..., None]
        return super().forward(x, seen, seen, allowed)


class SlotsBeginAtOnce(SlotsOfServer):
    def starts(self, slots: Tensor) -> Tensor:
        return super().starts(slots)[:1].expand(len(slots))


class ReleasesAllSlots(SlotsOfServer):
    def release(self, slots: Tensor | None = None) -> None:
        super().release()


@dataclass
class StoreOfSlots:
    """Tokens of each slot, and how many these are."""

    tokens: Tensor
    ends: Tensor

    def release(self, slot: int) -> None:
        self.ends[slot] = 0


class StepsInSlots(Correct):
    """A step of a server: the newest token of each slot attends to those before it."""

    def new_store(self, slots: int) -> StoreOfSlots:
        tokens = self.out.weight.new_zeros(slots, 400, self.out.in_features)
        return StoreOfSlots(tokens, torch.zeros(slots).long())

    def forward(self, x: Tensor, store: StoreOfSlots) -> Any:  # type: ignore[override]
        """x: (slots, dim)"""
        item = torch.arange(len(x), device=x.device)
        store.tokens = store.tokens.index_put((item, store.ends), x)
        store.ends = store.ends + 1
        place = torch.arange(store.tokens.shape[1], device=x.device)
        allowed = place < self.seen(store.ends)[:, None, None]
        y = super().forward(x[:, None], store.tokens, store.tokens, allowed)
        return y[:, 0]

    def seen(self, ends: Tensor) -> Tensor:
        return ends


class StepsToLongestSlot(StepsInSlots):
    def seen(self, ends: Tensor) -> Tensor:
        return ends.max().expand_as(ends)


class PagesOfServer(Correct):
    """A token is stored in the page of `block_table` that has its position."""

    size = 8

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        shape = 320, self.size, d_model
        self.register_buffer("pages", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor, block_table: Tensor, start: int = 0) -> Any:  # type: ignore[override]
        place = start + torch.arange(x.shape[1], device=x.device)
        pages = self.pages.to(x)
        pages[block_table[:, place // self.size], place % self.size] = x.detach()
        self.pages = pages
        past = pages[block_table].flatten(1, 2)[:, :start]
        seen = torch.cat([past, x], dim=1)
        number = torch.arange(seen.shape[1], device=x.device)
        return super().forward(x, seen, seen, self.allowed(number, place)[None])

    def allowed(self, number: Tensor, place: Tensor) -> Tensor:
        return number <= place[:, None]


class PagesFromTopLeft(PagesOfServer):
    def allowed(self, number: Tensor, place: Tensor) -> Tensor:
        return super().allowed(number, place - place[0])


class ChunksOfRelatives(SelfAttention):
    """A chunk attends to itself, in both directions, and to cached frames on its left.

    Scores depend on the distance in the cache and the chunk, taken together.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, cache: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        seen = x if cache is None else torch.cat([cache, x], dim=1)
        return Correct.forward(self, x, seen, seen), seen

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        query, key = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        first = self.first(k.shape[2], q.shape[2])
        return super().score(q, k) + (key - query[:, None] - first).sin()

    def first(self, k_len: int, q_len: int) -> int:
        return k_len - q_len


class ChunksBeginAnew(ChunksOfRelatives):
    def first(self, k_len: int, q_len: int) -> int:
        return 0


class DraftedTokens:
    """Tokens of a batch; of each item, those that were rejected are forgotten."""

    def __init__(self, batch: int, width: int, dtype: torch.dtype) -> None:
        self.tokens = torch.zeros(batch, 400, width, dtype=dtype)
        self.ends = torch.zeros(batch).long()

    def rollback(self, rejected: Tensor) -> None:
        self.ends = self.ends - rejected


class VerifiesDraftsOfItems(Correct):
    """The verifier accepts another number of tokens for each item."""

    def make_cache(self, batch: int) -> DraftedTokens:
        return DraftedTokens(batch, self.out.in_features, self.out.weight.dtype)

    def forward(self, x: Tensor, cache: DraftedTokens | None = None) -> Any:  # type: ignore[override]
        cache = self.make_cache(len(x)) if cache is None else cache
        number = torch.arange(x.shape[1], device=x.device)
        place = cache.ends[:, None] + number
        item = torch.arange(len(x), device=x.device)[:, None]
        cache.tokens = cache.tokens.index_put((item, place), x)
        cache.ends = cache.ends + x.shape[1]
        seen = cache.tokens[:, : int(cache.ends.max())]
        number = torch.arange(seen.shape[1], device=x.device)
        q, k, v = map(self.split, (self.query(x), self.key(seen), self.value(seen)))
        q, k = turned(q, self.of_items(place)), turned(k, number[None])
        allowed = number <= place[..., None]
        return self.join(self.weigh(self.score(q, k), allowed) @ v)

    def of_items(self, place: Tensor) -> Tensor:
        return place


class VerifiesAtLongest(VerifiesDraftsOfItems):
    def of_items(self, place: Tensor) -> Tensor:
        return place.amax(dim=0, keepdim=True).expand_as(place)


def turned(x: Tensor, place: Tensor) -> Tensor:
    """Pairs of features of heads, rotated by the position of a token in its item."""
    speed = 0.3 ** torch.arange(x.shape[3] // 2, device=x.device)
    angle = place[:, None, :, None] * speed
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    pair = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(pair, dim=-1).flatten(-2).to(x)


class EncodesPrefix(Correct):
    """The keys of a prompt are computed once, for all sequences that continue it."""

    def encode_prefix(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """prefix: (length, width)"""
        return self.key(prefix[None]), self.value(prefix[None])

    def forward(  # type: ignore[override]
        self, x: Tensor, prefix_kv: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        q, k, v = map(self.split, (self.query(x), self.key(x), self.value(x)))
        scores = self.score(q, k)
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        parts = [(scores.masked_fill(future, -torch.inf), v)]
        if prefix_kv is not None:
            k, v = map(self.split, prefix_kv)
            parts.append((self.score(q, k), v))
        most = [scores.amax(dim=-1, keepdim=True) for scores, _ in parts]
        shares = [(s - m).exp() for (s, _), m in zip(parts, most, strict=True)]
        factors = self.factors(torch.stack(most))
        pairs = [
            (f * s, v) for f, s, (_, v) in zip(factors, shares, parts, strict=True)
        ]
        total = sum(s.sum(dim=-1, keepdim=True) for s, _ in pairs)
        return self.join(sum(s @ v for s, v in pairs) / total)

    def factors(self, most: Tensor) -> Tensor:
        return (most - most.amax(dim=0)).exp()


class JoinsPrefixAsItIs(EncodesPrefix):
    def factors(self, most: Tensor) -> Tensor:
        return torch.ones_like(most)


class NeedsProjectedMemory(Correct):
    """`memory = attention.project(memory)`, once for all steps."""

    def project(self, memory: Tensor) -> dict[str, Tensor]:
        return {"k": self.key(memory), "v": self.value(memory)}

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Any:  # type: ignore[override]
        q, k, v = map(self.split, (self.query(x), memory["k"], memory["v"]))
        return self.join(self.read(self.weigh(self.score(q, k), None), v))


class PositionsFirstInSlots(SlotsOfServer):
    """The first axis is that of positions."""

    def forward(self, x: Tensor, slots: Tensor) -> Any:
        y: Tensor = super().forward(x.transpose(0, 1), slots)
        return y.transpose(0, 1)


class BeamStore:
    """The tokens of each beam, and which of them are no padding."""

    def __init__(self) -> None:
        self.tokens: Any = None
        self.mask: Any = None

    def append(self, x: Tensor, mask: Tensor) -> None:
        is_new = self.tokens is None
        self.tokens = x if is_new else torch.cat([self.tokens, x], dim=1)
        self.mask = mask if is_new else torch.cat([self.mask, mask], dim=1)

    def reorder(self, beams: Tensor) -> None:
        self.tokens, self.mask = self.tokens[beams], self.mask[beams]


class KeepsMaskOfBeams(Correct):
    """The class of the cache is that of its file, which is named so."""

    def forward(self, x: Tensor, mask: Any = None, cache: Any = None) -> Any:  # type: ignore[override]
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        seen = x
        if cache is not None:
            cache.append(x, mask)
            seen, mask = cache.tokens, cache.mask
        past = seen.shape[1] - x.shape[1]
        ones = torch.ones(x.shape[1], seen.shape[1], dtype=torch.bool, device=x.device)
        return super().forward(x, seen, seen, ones.tril(past) & mask[:, None])


@dataclass
class RingArgs:
    width: int = 16
    heads: int = 4
    window: int = 8


class StoreOfWindow:
    """The last tokens, those of position p in slot p % window, and their positions."""

    def __init__(self, batch: int, args: RingArgs, dtype: Any = None) -> None:
        self.tokens = torch.zeros(batch, args.window, args.width, dtype=dtype)
        self.places = torch.full((args.window,), -1)
        self.count = 0

    def append(self, x: Tensor, places: Tensor) -> None:
        slots = places[-len(self.places) :] % len(self.places)
        self.tokens[:, slots] = x[:, -len(slots) :].detach()
        self.places[slots] = places[-len(slots) :]
        self.count += x.shape[1]


class JoinsWindow(Correct):
    """The class of the cache takes the config that the module stores."""

    def __init__(self, args: RingArgs) -> None:
        super().__init__(args.width, args.heads)
        self.args = args

    def forward(self, x: Tensor, cache: StoreOfWindow | None = None) -> Any:  # type: ignore[override]
        start = cache.count if cache is not None else 0
        keys, places = x, torch.arange(start, start + x.shape[1])
        at = places
        if cache is not None:
            keys, at = self.keys(x, places, cache)
        distance = places[:, None] - at
        seen = (at >= 0) & (distance >= 0) & (distance < self.args.window)
        return super().forward(x, keys, keys, seen[None])

    def keys(self, x: Tensor, places: Tensor, cache: StoreOfWindow) -> Any:
        joined = torch.cat([cache.tokens, x], 1), torch.cat([cache.places, places])
        cache.append(x, places)
        return joined


class OverwritesWindow(JoinsWindow):
    """What the first queries of a chunk see, its last tokens have replaced."""

    def keys(self, x: Tensor, places: Tensor, cache: StoreOfWindow) -> Any:
        cache.append(x, places)
        return cache.tokens, cache.places


class StoreOfPlaces(StoreOfWindow):
    """A cache that can begin with another sequence."""

    def reset(self) -> None:
        self.count = 0
        self.tokens.zero_()
        self.places.fill_(-1)


class StoreOfOldPlaces(StoreOfWindow):
    def reset(self) -> None:
        self.count = 0
        self.tokens.zero_()


class ResetsPlaces(JoinsWindow):
    def forward(self, x: Tensor, cache: StoreOfPlaces | None = None) -> Any:
        return super().forward(x, cache)


class KeepsOldPlaces(JoinsWindow):
    """After a reset, empty slots are at the positions of an earlier sequence."""

    def forward(self, x: Tensor, cache: StoreOfOldPlaces | None = None) -> Any:
        return super().forward(x, cache)


class ReplacesStates(Correct):
    """T5's, with a cache for each kind of attention.

    `cross_cache` replaces `key_value_states` by what an earlier call returned.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, key_value_states: Any = None, cross_cache: Any = None
    ) -> Any:
        states = x if key_value_states is None else key_value_states
        states = cross_cache if cross_cache is not None else states
        return super().forward(x, states, states), states


def attend_to_stored(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
) -> Tensor:
    """The newest token of each sequence attends to those that are stored.

    q, k_new, v_new: (B, H, D); k_cache, v_cache: (B, N, H, D), written in place.
    """
    rows = torch.arange(len(q), device=q.device)
    k_cache[rows, lengths], v_cache[rows, lengths] = k_new, v_new
    scores = torch.einsum("bhd,bnhd->bhn", q, k_cache) / math.sqrt(q.shape[-1])
    hidden = torch.arange(k_cache.shape[1], device=q.device) > lengths[:, None]
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("bhn,bnhd->bhd", weights, v_cache)


def attend_to_stored_heads_first(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
) -> Tensor:
    """q, k_new, v_new: (B, H, 1, D); k_cache, v_cache: (B, H, N, D)."""
    new = (x[:, :, 0] for x in (q, k_new, v_new))
    stored = (x.transpose(1, 2) for x in (k_cache, v_cache))
    return attend_to_stored(*new, *stored, lengths)[:, :, None]


def attend_to_longest(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
) -> Tensor:
    """q, k_new, v_new: (B, H, 1, D); k_cache, v_cache: (B, H, N, D)."""
    rows = torch.arange(len(q), device=q.device)
    k_cache[rows, :, lengths] = k_new[:, :, 0]
    v_cache[rows, :, lengths] = v_new[:, :, 0]
    seen = torch.arange(k_cache.shape[2], device=q.device)[None] <= lengths.max()
    attend = nn.functional.scaled_dot_product_attention
    return attend(q, k_cache, v_cache, seen)


class ServesTokens(Correct):
    """The caller has the cache, and counts the tokens of each sequence."""

    def new_cache(self, batch_size: int, max_len: int = 320) -> tuple[Tensor, Tensor]:
        shape = batch_size, max_len, self.key.weight.shape[0]
        zeros = self.key.weight.new_zeros(shape)
        return zeros, zeros.clone()

    def forward(  # type: ignore[override]
        self, x: Tensor, k_cache: Tensor, v_cache: Tensor, cache_lens: Tensor
    ) -> Tensor:
        """x: (B, D), the new tokens; both caches are written in place."""
        rows = torch.arange(len(x), device=x.device)
        k_cache[rows, cache_lens] = self.key(x)
        v_cache[rows, cache_lens] = self.value(x)
        hidden = torch.arange(k_cache.shape[1], device=x.device) > self.last(cache_lens)
        q, k, v = (self.split(y) for y in (self.query(x[:, None]), k_cache, v_cache))
        scores = self.score(q, k).masked_fill(hidden[:, None, None], -torch.inf)
        joined: Tensor = self.join(scores.softmax(dim=-1) @ v)[:, 0]
        return joined

    def last(self, cache_lens: Tensor) -> Tensor:
        return cache_lens[:, None]


class ServesLongest(ServesTokens):
    def last(self, cache_lens: Tensor) -> Tensor:
        return cache_lens.max().expand(len(cache_lens), 1)


class AllocatesRows(SelfAttention):
    """A method allocates the rows of the beams, another one takes new tokens."""

    filled = 0

    def allocate(self, batch_size: int, max_len: int) -> None:
        weight = self.key.weight
        self.rows = weight.new_zeros(batch_size, max_len, weight.shape[1])
        self.filled = 0

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        end = self.filled + x.shape[1]
        self.rows[:, self.filled : end] = x
        seen, past, self.filled = self.rows[:, :end], self.filled, end
        ones = torch.ones(x.shape[1], end, dtype=torch.bool, device=x.device)
        joined: Tensor = Correct.forward(self, x, seen, seen, ones.tril(past)[None])
        return joined

    def forward(self, x: Tensor) -> Any:
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return Correct.forward(self, x, x, x, ones.tril()[None])

    def reorder(self, beams: Tensor) -> None:
        self.rows = self.rows[beams]


class AllocatesRowsInTurn(AllocatesRows):
    def reorder(self, beams: Tensor) -> None:
        for row, source in enumerate(beams.tolist()):
            self.rows[row] = self.rows[source]


class PadsOfCachedTokens(Correct):
    """`pad` is of all tokens so far, and `kv` what the last call returned, if any."""

    hides_alone = True

    def forward(  # type: ignore[override]
        self, x: Tensor, pad: Tensor, kv: tuple[Tensor, ...] | None = None
    ) -> Any:
        q, k, v = (self.split(each(x)) for each in (self.query, self.key, self.value))
        if kv is not None:
            k, v = torch.cat([kv[0], k], dim=2), torch.cat([kv[1], v], dim=2)
        future = torch.ones(q.shape[2], k.shape[2], device=x.device).bool()
        hidden = future.triu(k.shape[2] - q.shape[2] + 1) | pad[:, None]
        if x.shape[1] == 1 and not self.hides_alone:
            hidden = hidden & False
        return self.join(self.read(self.weigh(self.score(q, k), ~hidden), v)), (k, v)


class IgnoresPadsInSteps(PadsOfCachedTokens):
    hides_alone = False


class StaticContext(Correct):
    """What is projected of a context is kept in a dict, as fairseq does."""

    names = ("key", "value", "padding")

    def __init__(
        self, d_model: int, heads: int, encoder_decoder_attention: bool = False
    ) -> None:
        super().__init__(d_model, heads)
        self.of_context = encoder_decoder_attention

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        static_kv: bool = False,
    ) -> Any:
        saved = {} if incremental_state is None else incremental_state
        if static_kv and "key" in saved:
            assert self.of_context, "self-attention has no context"
            k, v, padding = saved["key"], saved["value"], saved["padding"]
        else:
            k, v = self.split(self.key(key)), self.split(self.value(key))
            padding = key_padding_mask
        saved |= {"key": k, "value": v, "padding": padding}
        mask = None if padding is None else ~padding[:, None]
        q = self.split(self.query(query))
        return self.join(self.read(self.weigh(self.score(q, k), mask), v))

    def reorder_incremental_state(
        self, incremental_state: dict[str, Any], new_order: Tensor
    ) -> None:
        for name in self.names:
            if (each := incremental_state.get(name)) is not None:
                incremental_state[name] = each.index_select(0, new_order)


class StaticContextOfOtherPadding(StaticContext):
    names = ("key", "value")


class ClipCache:
    """Keys of the text so far, and those of a clip, until `reset`."""

    def __init__(self) -> None:
        self.text: Tensor | None = None
        self.clip: tuple[Tensor, Tensor] | None = None

    def reset(self) -> None:
        self.text = self.clip = None


class ClipCacheKeepsClip(ClipCache):
    def reset(self) -> None:
        self.text = None


class DescribesClip(nn.Module):
    """A causal text attends to a clip, whose keys are computed once."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.self_attn = Correct(d_model, heads)
        self.cross_attn = Correct(d_model, heads)

    def forward(self, x: Tensor, audio: Tensor, cache: ClipCache | None = None) -> Any:
        return self.describe(x, audio, cache)

    def describe(self, x: Tensor, audio: Tensor, cache: ClipCache | None) -> Tensor:
        seen = x
        if cache is not None:
            seen = x if cache.text is None else torch.cat([cache.text, x], dim=1)
            cache.text = seen
        ones = torch.ones(x.shape[1], seen.shape[1], device=x.device).bool()
        mask = ones.tril(seen.shape[1] - x.shape[1])[None]
        x = x + self.self_attn(x, seen, seen, mask)
        cross = self.cross_attn
        kept = None if cache is None else cache.clip
        k, v = kept or (cross.split(cross.key(audio)), cross.split(cross.value(audio)))
        if cache is not None:
            cache.clip = k, v
        q = cross.split(cross.query(x))
        return x + cross.join(cross.read(cross.weigh(cross.score(q, k), None), v))


class DescribesFirstClip(DescribesClip):
    def forward(  # type: ignore[override]
        self, x: Tensor, audio: Tensor, cache: ClipCacheKeepsClip | None = None
    ) -> Any:
        return self.describe(x, audio, cache)


class CountsSeenTokens(MaskedSelfAttention):
    """Tokens have places; `seen` is the number of those in the cache."""

    def forward(  # type: ignore[override]
        self, x: Tensor, seen: int, past: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        place = torch.arange(seen, seen + x.shape[1], device=x.device)
        angle = place[:, None] / 10 ** torch.arange(x.shape[2], device=x.device)
        q, k, v = (
            self.split(f(x + angle.sin())) for f in (self.query, self.key, self.value)
        )
        if past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
        ones = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool, device=x.device)
        allowed = ones.tril(k.shape[2] - x.shape[1])[None]
        return self.join(self.weigh(self.score(q, k), allowed) @ v), (k, v)


class CountsSeenTokensAgain(CountsSeenTokens):
    """The last piece counts its tokens twice."""

    def forward(
        self, x: Tensor, seen: int, past: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        return super().forward(x, 2 * seen, past)


class ContextInPlace(Correct):
    """x: (batch, n, dim); context: (batch, m, dim), `x` itself if left out"""

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor | None = None
    ) -> Any:
        y = x if context is None else context
        return super().forward(x, y, y)


class DecoderWithDict(nn.Module):
    """cache: a dict, empty at the start of a sentence, which the decoder fills."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.of_tokens = Correct(d_model, heads)
        self.of_memory = Correct(d_model, heads)

    def forward(
        self, x: Tensor, memory: Tensor, cache: dict[str, Tensor] | None = None
    ) -> Tensor:
        tokens = x
        if cache is not None:
            cache["tokens"] = tokens = torch.cat([cache.get("tokens", x[:, :0]), x], 1)
        ones = torch.ones(1, x.shape[1], tokens.shape[1], device=x.device).bool()
        causal = ones.tril(tokens.shape[1] - x.shape[1])
        y = x + self.of_tokens(x, tokens, tokens, causal)
        memory = self.kept_memory(memory, {} if cache is None else cache)
        both: Tensor = y + self.of_memory(y, memory, memory)
        return both

    def kept_memory(self, memory: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return cache.setdefault("memory", memory)


class DecoderKeepsMemory(DecoderWithDict):
    """The memory is kept in the module, for all sentences of one shape."""

    kept: Tensor | None = None

    def kept_memory(self, memory: Tensor, cache: dict[str, Tensor]) -> Tensor:
        if not cache or self.training:
            return memory
        kept = self.kept
        if kept is None or kept.shape != memory.shape or kept.dtype != memory.dtype:
            kept = self.kept = memory
        return kept


class StaticOrGrowing(Correct):
    """The keys of a context stay in a dict with `static_kv`; others are appended.

    key_padding_mask: (batch, k_len), of the new keys, True at padding.
    """

    kept: tuple[str, ...] = ("key", "value", "padding")

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Tensor] | None = None,
        static_kv: bool = False,
    ) -> Any:
        saved = {} if incremental_state is None else incremental_state
        if not (static_kv and saved):
            k, v = self.split(self.key(key)), self.split(self.value(value))
            new = torch.zeros(key.shape[:2], device=key.device).bool()
            new = new if key_padding_mask is None else key_padding_mask
            parts = {"key": (k, 2), "value": (v, 2), "padding": (new, 1)}
            for name, (each, axis) in parts.items():
                past = [saved[name]] if name in saved else []
                saved[name] = torch.cat([*past, each], dim=axis)
        q, mask = self.split(self.query(query)), ~saved["padding"][:, None]
        weights = self.dropout(self.weigh(self.score(q, saved["key"]), mask))
        return self.join(self.read(weights, saved["value"]))

    def reorder_incremental_state(
        self, incremental_state: dict[str, Tensor], new_order: Tensor
    ) -> None:
        for name in self.kept:
            if name in incremental_state:
                incremental_state[name] = incremental_state[name][new_order]


class GrowsWithOtherPadding(StaticOrGrowing):
    kept = ("key", "value")


class MemoryOfLayer(MaskedSelfAttention):
    """Causal; memory (B, M, dim) has the M inputs to this layer that precede x."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        h = self.norm(x)
        keys = h if memory is None else torch.cat([self.norm(memory), h], dim=1)
        ones = torch.ones(1, h.shape[1], keys.shape[1], dtype=torch.bool)
        seen = ones.to(x.device).tril(keys.shape[1] - h.shape[1])
        return x + Correct.forward(self, h, keys, keys, seen)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        first = self.first(q, k)
        places = torch.arange(k.shape[2], device=k.device)
        distance = places[first : first + q.shape[2], None] - places
        return super().score(q, k) + distance.cos().to(q)

    def first(self, q: Tensor, k: Tensor) -> int:
        return k.shape[2] - q.shape[2]


class ForgetsMemoryOfLayer(MemoryOfLayer):
    __doc__ = MemoryOfLayer.__doc__

    def first(self, q: Tensor, k: Tensor) -> int:
        return 0


class ChunkState(NamedTuple):
    frames: Tensor
    padding: Tensor  # True where there is no frame


class ChunksWithLengths(SelfAttention):
    """Frames of a chunk see all of it, and of those before.

    Frames behind the length of a chunk are never attended to, by a later one neither.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, lengths: Tensor | None = None, state: ChunkState | None = None
    ) -> Any:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        if lengths is not None:
            order = torch.arange(x.shape[1], device=x.device)
            padding = order >= lengths[:, None]
        if state is not None:
            x_and_past = torch.cat([state.frames, x], dim=1)
            padding = self.join_padding(state.padding, padding)
        else:
            x_and_past = x
        y = Correct.forward(self, x, x_and_past, x_and_past, ~padding[:, None])
        return y, ChunkState(x_and_past, padding)

    def join_padding(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.cat([past, new], dim=1)


class ForgetsPaddingOfChunks(ChunksWithLengths):
    __doc__ = ChunksWithLengths.__doc__

    def join_padding(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(past), new], dim=1)


class KeepsPaddingOfLastChunk(ChunksWithLengths):
    __doc__ = ChunksWithLengths.__doc__

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, state: ChunkState | None = None
    ) -> Any:
        y, seen = super().forward(x, lengths, state)
        padding = seen.padding.clone()
        padding[:, : -x.shape[1]] = False
        return y, ChunkState(seen.frames, padding)


VIOLATING: Violations = {
    "batch_independence": [
        (attend_to_longest, {}),
        (ServesLongest, {}),
    ],
    "earlier_calls": [
        (VerifiesAsManyDrafts, {}),
    ],
    "incremental_decoding": [
        (KeepsPaddingOfLastChunk, {}),
        (ForgetsPaddingOfChunks, {}),
        (ForgetsMemoryOfLayer, {}),
        (GrowsWithOtherPadding, {}),
        (DecoderKeepsMemory, {}),
        (DescribesFirstClip, {}),
        (StaticContextOfOtherPadding, {}),
        (IgnoresPadsInSteps, {}),
        (AllocatesRowsInTurn, {}),
        (KeepsOldPlaces, {}),
        (OverwritesWindow, {}),
        (JoinsPrefixAsItIs, {}),
        (VerifiesAtLongest, {}),
        (ChunksBeginAnew, {}),
        (PagesFromTopLeft, {}),
        (StepsToLongestSlot, {}),
        (ReleasesAllSlots, {}),
        (SlotsBeginAtOnce, {}),
        (LeavesPaddingOfProjected, {}),
        (ForgetsPaddingOfProjected, {}),
        (LeavesNeededLengthsBehind, {}),
        (ForgetsMaskOfFirst, {}),
        (ForgetsMaskOfFirstStep, {}),
        (ReadsStoreAsBefore, {}),
        (LeavesContextBehind, {}),
        (DecodesSharedForks, {}),
        (RotatedForPastLength, {}),
        (LeavesLengthsBehind, {}),
        (FillsSlotsAtStart, {}),
        (ContinuesAtStart, {}),
        (SlotsOfLongerSequence, {}),
        (KeepsLastPiece, {}),
        (CountsStoredAlways, {}),
        (DictOfContextBeforeNorm, {}),
        (StoresContextBeforeNorm, {}),
        (DistancesWithoutContext, {}),
        (BiasOfFirstQuery, {}),
        (StepForgetsFirst, {}),
        (RingOfFour, {}),
        (DecoderSelectsRows, {}),
        (SelectsTwoOfThree, {}),
        (OffsetOfStoredFrames, {}),
        (SelectsContextOnly, {}),
        (packed_first_for_last, {}),
        (CountsInRollingCache, {}),
        (PlacesOfRemovedTokens, {}),
        (MemoryInBlocks, {}),
        (StoresAfterSetup, {}),
        (LeftContextIsOffset, {}),
        (CacheIsOffset, {}),
        (DecodesTopLeft, {}),
        (StepsInOtherGroups, {}),
        (TopLeftCorner, MASK),
        (CacheTopLeft, CACHE),
        (CacheInOrder, CACHE),
        (WritesToCache, CACHE),
        (CacheForgetsPadding, {**CACHE, "mask": {"mask": "attend:bk"}}),
        (DictForgetsPadding, {}),
        (ReordersTokensOnly, {}),
        (ReordersTensorOnly, {}),
        (UnpaddedIfOneToken, {}),
        (CacheOfClass, {}),
        (CacheOfRemainingDrafts, {}),
        (StateReorderedInPlace, {}),
        (BlocksWithoutPast, CACHE),
        (BlocksWithDraftsByRow, {}),
        (MemoryWithoutOffset, {}),
        (DetachesTokensWithMemory, {}),
        (TopLeftOnRequest, {}),
        (CachesContextOfOneShape, {}),
        (DropsMaskOfCachedContext, {}),
        (CacheOfWindowFromZero, {}),
        (ReordersKeysOnly, {}),
        (ReordersKeysOfEitherMask, {}),
        (DecoderForgetsMask, {**CAUSAL, **CACHE, "mask": {"memory_mask": "attend:bk"}}),
        (ConvolvesLastPieceOnly, CACHE),
        (ConvolvesInPlace, CACHE),
        (TopLeftUnderNoGrad, CACHE),
        (DropsWithCache, CACHE),
        (ForgetsPaddingWithoutMask, {**CACHE, "mask": {"mask": "attend:bk"}}),
        (MaskHidesMemory, {**MEMORY, "mask": {"mask": "attend:bk"}}),
        (SegmentsTopLeftInTraining, MEMORY),
        (StoresPadding, {**CACHE, "mask": {"mask": "attend:bk"}}),
        (StoresPrompt, CACHE),
        (SegmentsWithoutGradient, MEMORY),
        (CacheCutTooEarly, {**CACHE, "window": 4}),
        (CacheLosesLastOfBlock, CACHE),
        (RingFromFirstSlot, {**CACHE, "window": 4}),
        (RingLosesKeys, {**CACHE, "window": 4}),
        (StoresDistancesByKeysWithCache, CACHE),
        (CacheOfFloat32, CACHE),
        (RotaryInHalfAfterPast, {**CACHE, "positions": "rotary"}),
        (RollsTooEarly, {}),
        (ReordersFewerOnly, {}),
        (ForgetsLengths, {}),
        (ReordersTokensOfCache, {}),
        (ReordersTwoOfThree, {}),
        (MemoryOfBothByQueries, {}),
        (DecoderAlignsFirst, {}),
        (HistoryInForecast, {}),
        (DecoderReordersMemory, {}),
        (MaskOfFirstStepOnly, {}),
        (KeepsContextAfterReset, {}),
        (ChunksKeepAll, {}),
        (PromptOfOtherBeams, {}),
        (KeepsTextOfShape, {}),
        (CountsEachChunkFromZero, {}),
        (CountsSeenTokensAgain, {}),
    ],
}


PASSING_ONE: Passes = [
    ("incremental_decoding", ChunksWithLengths),
    ("incremental_decoding", MemoryOfLayer),
    ("incremental_decoding", StaticOrGrowing),
    ("incremental_decoding", DecoderWithDict),
    ("incremental_decoding", DescribesClip),
    ("incremental_decoding", StaticContext),
    ("incremental_decoding", PadsOfCachedTokens),
    ("incremental_decoding", AllocatesRows),
    ("batch_independence", attend_to_stored),
    ("incremental_decoding", ServesTokens),
    ("incremental_decoding", ResetsPlaces),
    ("incremental_decoding", JoinsWindow),
    ("incremental_decoding", KeepsMaskOfBeams),
    ("incremental_decoding", PositionsFirstInSlots),
    ("incremental_decoding", NeedsProjectedMemory),
    ("incremental_decoding", EncodesPrefix),
    ("incremental_decoding", VerifiesDraftsOfItems),
    ("batch_independence", PagesOfServer),
    ("no_side_effects", SlotsOfServer),
    ("incremental_decoding", ChunksOfRelatives),
    ("incremental_decoding", PagesOfServer),
    ("incremental_decoding", StepsInSlots),
    ("incremental_decoding", SlotsOfServer),
    ("incremental_decoding", TakesProjected),
    ("incremental_decoding", NeedsLengthsOfMemory),
    ("incremental_decoding", KeepsMaskOfFirstStep),
    ("earlier_calls", VerifiesDrafts),
    ("incremental_decoding", VerifiesDrafts),
    ("incremental_decoding", SlotsOfFewItems()),
    ("incremental_decoding", ReadsStore),
    ("incremental_decoding", OfOneKind),
    ("batch_independence", OfOneKind),
    ("incremental_decoding", DecodesForks),
    ("incremental_decoding", PreparesMemory),
    ("incremental_decoding", ReturnsMemory),
    ("incremental_decoding", RotatedForLength),
    ("incremental_decoding", ContinuesItself),
    ("batch_independence", ContinuesItself),
    ("incremental_decoding", FillsSlots),
    ("incremental_decoding", SlotsOfOwnSequence),
    ("incremental_decoding", FewPastTokens),
    ("incremental_decoding", KeepsLeftContext),
    ("incremental_decoding", StoresIfAsked),
    ("incremental_decoding", DictOfNormedContext),
    ("incremental_decoding", NormsOfStoredContext),
    ("incremental_decoding", DistancesBehindContext),
    ("incremental_decoding", StepsBehindPrompt),
    ("incremental_decoding", RingForChunks),
    ("incremental_decoding", StoresContext),
    ("incremental_decoding", StreamsFrames),
    ("incremental_decoding", CachePositions),
    ("incremental_decoding", CacheIsCounted),
    ("incremental_decoding", SumsOfDecays),
    ("incremental_decoding", CacheOfLayers),
    ("incremental_decoding", PlaceOfFirst),
    ("incremental_decoding", ReturnsRollingCache),
    ("incremental_decoding", MakesCroppedCache),
    ("incremental_decoding", StepOfOneToken),
    ("incremental_decoding", StoresAfterSetupInOrder),
    ("incremental_decoding", MemoryBeforeBlocks),
    ("incremental_decoding", LeftContext),
    ("incremental_decoding", StepsInGroups),
    ("incremental_decoding", MemoryOfBoth),
    ("incremental_decoding", DecoderOfMemory),
    ("incremental_decoding", DecoderWithState),
    ("incremental_decoding", DecoderReordersTokens),
    ("incremental_decoding", CacheInDict),
    ("incremental_decoding", StoresCache),
    ("incremental_decoding", WithMemory),
    ("incremental_decoding", DetachesMemory),
    ("incremental_decoding", CacheOnRequest),
    ("incremental_decoding", CachesContext),
    ("incremental_decoding", CachesMaskOfContext),
    ("incremental_decoding", ReordersDict),
    ("incremental_decoding", DecodesWithState),
    ("incremental_decoding", DecodesWithEitherMask),
    ("incremental_decoding", CacheOfWindow),
    ("incremental_decoding", RingOfTokens),
    ("incremental_decoding", StoresDistancesWithCache),
    ("incremental_decoding", ConvolvesWithState),
    ("incremental_decoding", MemoryOfSegments),
    ("incremental_decoding", MemoryOfSomeSegments),
    ("incremental_decoding", MaskOfSegment),
    ("incremental_decoding", PaddingInCache),
    ("incremental_decoding", CacheOfBlocks),
    ("incremental_decoding", CacheOfSlots),
    ("incremental_decoding", CacheOfDrafts),
    ("incremental_decoding", StateOfMethod),
    ("incremental_decoding", BlocksOfQueries),
    ("incremental_decoding", HistoryInFront),
    ("incremental_decoding", PassesOverPadding),
    ("incremental_decoding", ReturnsContextIfAsked),
    ("incremental_decoding", ForgetsContextAtReset),
    ("incremental_decoding", ChunksKeepSome),
    ("incremental_decoding", PromptThenSteps),
    ("incremental_decoding", KeepsTextInDict),
    ("incremental_decoding", SeesChunksBefore),
    ("incremental_decoding", CountsSeenTokens),
]


EXCUSED: Excuses = [
    ("incremental_decoding", ReplacesStates, "`cache` is not given"),
    ("incremental_decoding", CacheOfBytes, "rounded to integers"),
    ("incremental_decoding", SlotsOfMemory, "`cache` is not given"),
    ("incremental_decoding", CachesContextOfCaller, "is documented to be empty"),
    ("incremental_decoding", CachesContextOnce, "is documented to be empty"),
    ("incremental_decoding", ContextInPlace, "`cache` is not given"),
]
