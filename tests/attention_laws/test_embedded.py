"""Models of token ids are checked as a whole, with vectors in place of the ids."""

import inspect
import itertools
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import check, documented
from attention_laws.adapter import Options
from attention_laws.embedded import has_padding_id, of_vectors, with_vectors
from attention_laws.infer import infer_adapter
from headnotes.cli import main

TOKENS, WIDTH, POSITIONS = 11, 6, 13


class Model(nn.Module):
    """Adds positions to its tokens, and looks up parts of them in any order."""

    def __init__(self, vocab_size: int = TOKENS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(POSITIONS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand_as(ids)
        return self.tokens(ids) + self.positions(places)


class OfColumns(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids.T[1:]).transpose(0, 1)


class OfPairs(Model):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return torch.cat([self.tokens(ids), self.tokens(targets)], dim=1)


class Decoder(Model):
    """Means of the context are added to the tokens of the decoder."""

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.tokens(decoder_ids) + self.tokens(ids).mean(1, keepdim=True)


class MarksPadding(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) * (ids != 0)[..., None]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        looked_up: Tensor = self.table(ids)
        return looked_up


class MarksPaddingOfPart(nn.Module):
    """The embedding, and its id for padding, is in a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()

    def forward(self, ids: Tensor) -> Any:
        return self.tokens(ids) * (ids != 0)[..., None]


class OfBase(nn.Module):
    """times: (B, T) ints"""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)

    def forward(self, ids: Tensor, times: Tensor) -> Tensor:
        return self.tokens(ids) * (ids != 0)[..., None] + times[..., None]


class Inherits(OfBase):
    pass


def test_what_a_base_says_is_known_of_a_model() -> None:
    model = of_vectors(Inherits)
    assert documented.shapes(model) == {"times": ("B", "T")}
    assert has_padding_id(model)


def test_vectors_are_returned_where_ids_are_looked_up() -> None:
    x, targets = torch.randn(2, 3, WIDTH), torch.randn(2, 5, WIDTH)
    model = of_vectors(Model)()
    torch.testing.assert_close(model(x), x + model.positions.weight[:3])
    torch.testing.assert_close(of_vectors(OfColumns)()(x), x[:, 1:])
    together = torch.cat([x, targets], dim=1)
    torch.testing.assert_close(of_vectors(OfPairs)()(x, targets), together)


def test_the_tokens_of_a_decoder_are_the_first_input() -> None:
    adapter = infer_adapter(of_vectors(Decoder), "Decoder", "", Options())
    assert adapter.inputs == ("decoder_ids", "ids")
    assert adapter.by_keyword


class ComparesIds(MarksPadding):
    """Its embedding knows no padding, whose ids are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.padding_idx = None

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids)
        return x * (ids != 0)[..., None]


@pytest.mark.parametrize("model", [MarksPadding, MarksPaddingOfPart, ComparesIds])
def test_padding_gets_the_id_of_the_embedding_where_there_is_no_mask(
    model: type[nn.Module],
) -> None:
    x, padding = torch.ones(2, 3, WIDTH), torch.tensor([[False, False, True]] * 2)
    of_padded = of_vectors(model)
    assert "padding_mask" in inspect.signature(of_padded.forward).parameters
    masked = of_padded()(x, padding_mask=padding)
    torch.testing.assert_close(masked, x * ~padding[..., None])


def test_a_copy_takes_vectors_and_the_model_keeps_its_ids() -> None:
    model, x = Model(), torch.randn(1, 5, WIDTH)
    torch.testing.assert_close(with_vectors(model)(x), x + model.positions.weight[:5])
    ids = torch.arange(5)[None]
    torch.testing.assert_close(
        model(ids), model.tokens(ids) + model.positions.weight[:5]
    )


def test_vectors_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="another width than its embedding"):
        of_vectors(Model)()(torch.randn(2, 5, 1))


def test_ids_that_are_not_told_apart_are_refused() -> None:
    # The first tokens are left out, and more follow than the table has rows.
    with pytest.raises(ValueError, match="cannot be told apart by their ids"):
        of_vectors(OfColumns)()(torch.randn(2, 2 * TOKENS, WIDTH))


class Attention(nn.Module):
    """Causal attention with a bias by the distance, which a model passes to it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, bias_of: Any, cache: Any = None) -> Any:
        b, n, d = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        length = k.shape[2]
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias_of(n, length)
        future = torch.ones(n, length).triu(length - n + 1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out = (weights @ v).transpose(1, 2).reshape(b, n, d)
        return self.proj(out), (k, v)


class LanguageModel(nn.Module):
    def __init__(self, num_tokens: int = 64, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.rel_bias = nn.Embedding(9, heads)
        self.attn = Attention(dim, heads)
        self.to_logits = nn.Linear(dim, num_tokens)

    def first(self, n: int, length: int) -> int:
        return length - n

    def bias(self, n: int, length: int) -> Tensor:
        query = torch.arange(n)[:, None] + self.first(n, length)
        distance = (query - torch.arange(length)).clamp(0, 8)
        return self.rel_bias(distance).permute(2, 0, 1)

    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        x = self.token_emb(ids)
        out, cache = self.attn(x, self.bias, cache)
        return self.to_logits(x + out), cache


class LogitsInFloat32(LanguageModel):
    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        logits, cache = super().forward(ids, cache)
        return logits.float(), cache


class CountsFromZero(LanguageModel):
    """The positions of new tokens begin at zero: the bias forgets the past."""

    def first(self, n: int, length: int) -> int:
        return 0


@pytest.mark.slow
def test_a_model_is_checked_with_its_cache_and_its_positions() -> None:
    laws = ["causality", "incremental_decoding", "parameter_gradients"]
    report = check(of_vectors(LanguageModel), only=laws)
    assert report.ok
    (result,) = check(of_vectors(LogitsInFloat32), only="dtype_and_device").results
    assert result.status == "not applicable"
    report = check(of_vectors(CountsFromZero), only=laws)
    assert [result.law.name for result in report.failed] == ["incremental_decoding"]


@pytest.mark.slow
def test_a_part_that_takes_more_than_vectors_is_checked_with_its_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--only", "causality", "--only", "incremental_decoding", "--json"]
    assert main(["check", f"{__file__}:LanguageModel", *flags]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == "LanguageModel"
    assert report["facts"][-1]["name"] == "token ids"
    assert main(["check", f"{__file__}:CountsFromZero", *flags]) == 1


def build_small() -> LanguageModel:
    return LanguageModel(64, 12, 3)


def build_large() -> LanguageModel:
    return LanguageModel(20_000, 120, 3)


@pytest.mark.slow
def test_a_large_model_is_not_checked_as_a_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--only", "causality"]
    assert main(["check", f"{__file__}:build_small", *flags]) == 0
    assert main(["check", f"{__file__}:build_large", *flags]) == 2
    assert "could not be called" in capsys.readouterr().err


class NeverPadding(Model):
    """The logit of the padding is minus infinity."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids) @ self.tokens.weight.T
        hidden = torch.arange(TOKENS) == self.tokens.padding_idx
        return logits.masked_fill(hidden, -torch.inf)


def test_a_logit_that_is_always_minus_infinity_is_left_out() -> None:
    logits = with_vectors(NeverPadding())(torch.randn(2, 3, WIDTH))
    assert logits.isfinite().all()
    assert not logits[..., 0].any()
    assert logits[..., 1:].all()


class ScoresGraphs(nn.Module):
    """atoms (B, N) long, gaps (B, N, N) long -> (B,): one number for each graph."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(28, dim)
        self.gap_emb = nn.Embedding(8, heads)
        self.attn = Attention(dim, heads)
        self.head = nn.Linear(dim, 1)

    def forward(self, atoms: Tensor, gaps: Tensor) -> Tensor:
        x = self.token_emb(atoms)
        bias = self.gap_emb(gaps).permute(0, 3, 1, 2)
        y, _cache = self.attn(x, lambda *_: bias)
        return self.head(x + y).mean(1).squeeze(-1)


class WeighsByHours(ScoresGraphs):
    """codes (B, N) int, hours (B, N) float: how late each code is."""

    def forward(self, codes: Tensor, hours: Tensor) -> Tensor:
        gaps = (hours[:, :, None] - hours[:, None]).abs()  # before codes are looked up
        x = self.token_emb(codes)
        y, _cache = self.attn(x, lambda *_: -gaps[:, None])
        return self.head(x + y)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ScoresGraphs", "WeighsByHours"])
def test_a_model_gets_what_is_documented_beside_its_ids(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    flags = ["--only", "batch_independence", "--json"]
    assert main(["check", f"{__file__}:{model}", *flags]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    facts = {fact["name"]: fact["value"] for fact in report["facts"]}
    assert {"`gaps`", "`hours`"} & {*facts}
    assert facts["token ids"] == "vectors are given in their place"


class PoolsBehindPadding(Model):
    """The mean of tokens that are no padding."""

    def forward(self, ids: Tensor) -> Tensor:
        kept = (ids != 0)[..., None]
        return (self.tokens(ids) * kept).sum(1) / kept.sum(1).clamp(min=1)


def test_padding_hides_the_tokens_that_get_its_id() -> None:
    adapter = infer_adapter(of_vectors(PoolsBehindPadding), "Pools", "", Options())
    assert [(mask.kind, mask.axes) for mask in adapter.masks] == [("ignore", "bk")]


class AddsToken(Model):
    """A token of its own is in front, as one for the class of a text."""

    def forward(self, ids: Tensor) -> Tensor:
        first = torch.full_like(ids[:, :1], 1)
        return self.tokens(torch.cat([first, ids], dim=1))


def test_a_token_that_a_model_adds_has_a_row_of_the_table() -> None:
    model = with_vectors(AddsToken())
    x = torch.randn(2, 3, WIDTH)
    output = model(x)
    assert torch.equal(output[:, 1:], x)
    assert torch.equal(output[:, 0], model.tokens.weight[1].expand(2, WIDTH))


class ShiftsTokens(AddsToken):
    """A token sees those before it; the one in front is its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[:, :-1]


def test_several_tokens_of_padding_are_none_of_the_vectors() -> None:
    x, padding = torch.randn(1, 5, WIDTH), torch.arange(5)[None] > 2
    output = of_vectors(ShiftsTokens)()(x, padding_mask=padding)
    assert torch.equal(output[:, 1:4], x[:, :3])
    assert not output[:, 4:].any()


class Computes(Model):
    def forward(self, ids: Tensor, shift: Tensor) -> Tensor:
        return self.tokens(ids - shift)


def test_ids_that_are_computed_are_refused() -> None:
    model, x = of_vectors(Computes)(300), torch.randn(2, 5, WIDTH)
    assert torch.equal(model(x, shift=torch.tensor(0)), x)
    with pytest.raises(ValueError, match="cannot be told apart by their ids"):
        model(x, shift=torch.tensor([[0], [100]]))


class SmallSizes:
    classes = 2


class HasTwoClasses(Model):
    """As many classes as a small batch has items; its sizes are those of a class."""

    def __init__(self, sizes: Any = SmallSizes) -> None:
        super().__init__()
        widths = (WIDTH, 17, 19, 23, 29, 31, 37, 41, WIDTH)  # of no input
        layers = (nn.Linear(*pair) for pair in itertools.pairwise(widths))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, sizes.classes)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.tokens(ids)).mean(dim=1))
        return logits


def test_as_many_classes_as_items_are_no_number_of_each() -> None:
    adapter = infer_adapter(of_vectors(HasTwoClasses), "Classes", "", Options())
    assert (adapter.layout, adapter.is_pooled) == ("bld", True)


class HasPaddingMask(Model):
    """The mean of tokens that its own argument, 1 for those to keep, does not hide."""

    def forward(self, ids: Tensor, padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self.tokens(ids)
        kept = torch.ones_like(x[..., :1])
        if padding_mask is not None:
            kept = padding_mask.to(x)[..., None]
        return (x * kept).sum(1) / kept.sum(1).clamp(min=1)


def test_an_argument_for_padding_of_its_own_keeps_its_meaning() -> None:
    adapter = infer_adapter(of_vectors(HasPaddingMask), "Pools", "", Options())
    assert {mask.kind for mask in adapter.masks} <= {"attend", "attend_int"}
    assert adapter.masks


class OtherIfCompiled(LanguageModel):
    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        logits, cache = super().forward(ids, cache)
        return (-logits if torch.compiler.is_compiling() else logits), cache


def test_of_a_model_its_own_forward_is_compiled() -> None:
    assert check(of_vectors(LanguageModel), only="compiled").passed
    (failed,) = check(of_vectors(OtherIfCompiled), only="compiled").failed
    assert failed.counterexample is not None
    code = failed.counterexample.code
    assert "from attention_laws.embedded import compile_own_forward\n" in code
    # A trace that goes on behind the embedding asks each tensor for a gradient.
    with warnings.catch_warnings(action="ignore"), pytest.raises(AssertionError):
        exec(code, {"OtherIfCompiled": of_vectors(OtherIfCompiled)})
