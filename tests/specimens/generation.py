"""Language models whose generation violates its law, and models that pass it."""

from typing import Any

import torch
from torch import Tensor, nn

from attention_laws.embedded import of_vectors
from specimens.base import Correct, Excuses, Passes, Violations, WithCache

VOCABULARY = 64


class Model(nn.Module):
    """A causal model of tokens, with learned positions, and a cache of all tokens."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.positions = nn.Embedding(40, d_model)
        self.attend = WithCache(d_model, heads)
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        first = 0 if past is None else past.shape[1]
        places = torch.arange(first, first + ids.shape[1])
        y, past = self.attend(self.embedding(ids) + self.positions(places), past)
        return self.head(self.norm(y)), past

    @torch.no_grad()
    def generate(self, ids: Tensor, max_new_tokens: int = 16) -> Tensor:
        logits, past = self(ids, self.kept())
        for _ in range(max_new_tokens):
            last = self.choose(logits[:, -1])
            ids = torch.cat([ids, last], dim=1)
            logits, past = self(last, self.keep(past))
        return ids

    def choose(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1, keepdim=True)

    def kept(self) -> Tensor | None:
        return None

    def keep(self, past: Tensor) -> Tensor:
        return past


@of_vectors
class GeneratesBehindEarlierText(Model):
    """The cache of one text is that with which the next one begins."""

    past: Tensor | None = None

    def kept(self) -> Tensor | None:
        past = self.past
        return past if past is None or past.shape[1] < 20 else None

    def keep(self, past: Tensor) -> Tensor:
        self.past = past
        return past


@of_vectors
class GeneratesWithoutPrompt(Model):
    """Of a text, the last eight tokens are kept."""

    def keep(self, past: Tensor) -> Tensor:
        return past[:, -8:]


class Prefills(Model):
    """Methods for a prompt, for the next tokens, and for another order of both."""

    def prefill(self, ids: Tensor) -> Tensor:
        return self(ids)[1]

    def decode_step(self, ids: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        return self(ids, past)

    def reorder_cache(self, past: Tensor, order: Tensor) -> Tensor:
        return past[order]


@of_vectors
class DecodesBehindLastToken(Prefills):
    def prefill(self, ids: Tensor) -> Tensor:
        return self(ids)[1][:, -1:]


@of_vectors
class DecodesInOldOrder(Prefills):
    def reorder_cache(self, past: Tensor, order: Tensor) -> Tensor:
        return past


class Translates(nn.Module):
    """An encoder and a decoder; the state has the past, the text and its mask."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.encoder = Correct(d_model, heads, 0.0)
        self.decoder = WithCache(d_model, heads)
        self.cross = Correct(d_model, heads, 0.0)
        self.head = nn.Linear(d_model, VOCABULARY)

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> dict[str, Any]:
        x = self.embedding(src)
        mask = None if src_mask is None else src_mask[:, None]
        return {"past": None, "text": self.encoder(x, x, x, mask), "mask": src_mask}

    def step(self, ids: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        text, mask = state["text"], state["mask"]
        y, past = self.decoder(self.embedding(ids), state["past"])
        mask = None if mask is None else mask[:, None]
        return self.head(y + self.cross(y, text, text, mask)), {**state, "past": past}

    def reorder(self, state: dict[str, Any], order: Tensor) -> dict[str, Any]:
        moved = {n: state[n][order] for n in ("past", "text")}
        return {**moved, "mask": self.reordered(state["mask"], order)}

    def reordered(self, mask: Tensor | None, order: Tensor) -> Tensor | None:
        return None if mask is None else mask[order]

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None
    ) -> Tensor:
        logits, _state = self.step(tgt, self.start(src, src_mask))
        return logits


class Greedy(Translates):
    """The translation is returned without the token with which it begins."""

    def __init__(self, d_model: int, heads: int, bos: int = 1) -> None:
        super().__init__(d_model, heads)
        self.bos = bos
        self.head = nn.Sequential(nn.LayerNorm(d_model), self.head)  # type: ignore[assignment]

    @torch.no_grad()
    def translate(self, src: Tensor, max_len: int = 20) -> Tensor:
        state, found = self.start(src), []
        last = src.new_full((len(src), 1), self.bos)
        for _ in range(max_len):
            logits, state = self.step(last, self.seen(state))
            last = logits[:, -1].argmax(dim=-1, keepdim=True)
            found.append(last)
        return torch.cat(found, dim=1)

    def seen(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


@of_vectors
class TranslatesFirstItem(Greedy):
    def seen(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "text": state["text"][:1].expand_as(state["text"])}


class TakesOneToken(Translates):
    """A step takes one token of each text, [batch_size], and returns its logits."""

    def step(self, ids: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        logits, state = super().step(ids[:, None], state)
        return logits[:, 0], state

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None
    ) -> Tensor:
        return super().step(tgt, self.start(src, src_mask))[0]


@of_vectors
class TakesOneTokenWithOldMask(TakesOneToken):
    def reordered(self, mask: Tensor | None, order: Tensor) -> Tensor | None:
        return mask


@of_vectors
class TranslatesWithOldMask(Translates):
    def reordered(self, mask: Tensor | None, order: Tensor) -> Tensor | None:
        return mask


class FillsState(nn.Module):
    """Each of two layers keeps the keys of a text in a dict that the caller owns."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.layers = nn.ModuleList([Correct(d_model, heads, 0.0) for _ in range(2)])
        self.decoder = WithCache(d_model, heads)
        self.head = nn.Linear(d_model, VOCABULARY)

    def encode(self, src: Tensor) -> Tensor:
        text: Tensor = self.embedding(src)
        return text

    def decode(
        self, ids: Tensor, text: Tensor, src: Tensor, state: Any = None
    ) -> Tensor:
        kept = {} if state is None else state
        y, kept["past"] = self.decoder(self.embedding(ids), kept.get("past"))
        for number, layer in enumerate(self.layers):
            name = str(number) if state is None else self.name(number)
            if name not in kept:
                kept[name] = layer.key(text)  # type: ignore[operator]
            weights = (layer.query(y) @ kept[name].mT).softmax(-1)  # type: ignore[operator]
            y = y + weights @ text
        logits: Tensor = self.head(y)
        return logits

    def name(self, layer: int) -> str:
        return f"keys of layer {layer}"

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.decode(tgt, self.encode(src), src)


@of_vectors
class SharesState(FillsState):
    def name(self, layer: int) -> str:
        return "keys"


@of_vectors
class Draws(Model):
    def choose(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1).multinomial(1)


class DrawsOfOne(Model):
    """It takes the largest logit if `top_k` is one."""

    @torch.no_grad()
    def generate(
        self, ids: Tensor, steps: int = 16, top_k: int | None = None
    ) -> Tensor:
        for _ in range(steps):
            logits = self(ids)[0][:, -1]
            if top_k is not None:
                least = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            last = logits.softmax(dim=-1).multinomial(1)
            ids = torch.cat([ids, last], dim=1)
        return ids


@of_vectors
class GeneratesOfFirstItem(DrawsOfOne):
    """A batch continues with the tokens of its first item."""

    def generate(
        self, ids: Tensor, steps: int = 16, top_k: int | None = None
    ) -> Tensor:
        tokens = super().generate(ids, steps, top_k)[:1, ids.shape[1] :]
        return torch.cat([ids, tokens.expand(len(ids), -1)], dim=1)


class FillsNewState(nn.Module):
    """`decode` adds to a state of the caller, which `new_state` makes.

    Tokens with the id `pad_idx` are padding, and are hidden with those before them.
    """

    kept: tuple[str, ...] = ("tokens", "pad")

    def __init__(self, d_model: int, heads: int, pad_idx: int = 0) -> None:
        super().__init__()
        self.pad_idx = pad_idx
        self.table = nn.Embedding(64, d_model)
        self.of_text, self.of_tokens = (
            Correct(d_model, heads, dropout=0.0) for _ in range(2)
        )

    def new_state(self) -> list[dict[str, Tensor]]:
        return [{}]

    def encode(self, src: Tensor) -> Tensor:
        return self.table(src)

    def decode(
        self,
        tgt: Tensor,
        encoded: Tensor,
        incremental_state: list[dict[str, Tensor]] | None = None,
    ) -> Tensor:
        new = self.table(tgt)
        state = incremental_state[0] if incremental_state else {}
        for name, each in (("tokens", new), ("pad", tgt.eq(self.pad_idx))):
            state[name] = torch.cat([state[name], each], 1) if name in state else each
        ones = torch.ones(1, tgt.shape[1], state["pad"].shape[1], device=tgt.device)
        seen = ones.tril(ones.shape[2] - ones.shape[1]).bool() & ~state["pad"][:, None]
        y = new + self.of_tokens(new, state["tokens"], state["tokens"], seen)
        y = y + self.of_text(y, encoded, encoded)
        return y @ self.table.weight.T

    def reorder(
        self, encoded: Tensor, state: list[dict[str, Tensor]], order: Tensor
    ) -> Tensor:
        for name in self.kept:
            state[0][name] = state[0][name][order]
        return encoded[order]

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.decode(tgt, self.encode(src))


@of_vectors
class PadsInOldOrder(FillsNewState):
    kept = ("tokens",)


class TranslatesWithTotal(Greedy):
    """Token 3 begins a sentence. The tokens come with their log-probability."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, 3)
        del self.bos

    @torch.no_grad()
    def translate(self, src: Tensor, max_len: int = 20) -> Any:  # type: ignore[override]
        state, found, total = self.seen(self.start(src)), [], torch.zeros(len(src))
        last = src.new_full((len(src), 1), 3)
        for _ in range(max_len):
            logits, state = self.step(last, state)
            best, last = logits[:, -1].log_softmax(-1).max(dim=-1, keepdim=True)
            total = total + best[:, 0]
            found.append(last)
        return torch.cat(found, dim=1), total


@of_vectors
class KeepsEarlierText(TranslatesWithTotal):
    __doc__ = TranslatesWithTotal.__doc__

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.texts: dict[torch.Size, Tensor] = {}

    def seen(self, state: dict[str, Any]) -> dict[str, Any]:
        text = state["text"]
        return {**state, "text": self.texts.setdefault(text.shape, text)}


VIOLATING: Violations = {
    "generated_tokens": [
        (KeepsEarlierText, {}),
        (GeneratesBehindEarlierText, {}),
        (GeneratesWithoutPrompt, {}),
        (GeneratesOfFirstItem, {}),
        (TranslatesFirstItem, {}),
    ],
    "decoding_methods": [
        (PadsInOldOrder, {}),
        (DecodesBehindLastToken, {}),
        (DecodesInOldOrder, {}),
        (TranslatesWithOldMask, {}),
        (SharesState, {}),
        (TakesOneTokenWithOldMask, {}),
    ],
}

PASSING_ONE: Passes = [
    ("generated_tokens", of_vectors(TranslatesWithTotal)),
    ("decoding_methods", of_vectors(FillsNewState)),
    ("generated_tokens", of_vectors(Model)),
    ("generated_tokens", of_vectors(DrawsOfOne)),
    ("generated_tokens", of_vectors(Greedy)),
    ("decoding_methods", of_vectors(Prefills)),
    ("decoding_methods", of_vectors(Translates)),
    ("decoding_methods", of_vectors(FillsState)),
    ("decoding_methods", of_vectors(TakesOneToken)),
]

EXCUSED: Excuses = [
    ("generated_tokens", Draws, "takes the largest logit"),
    ("decoding_methods", Draws, "no methods were found"),
]
