"""Tokens, embeddings and positional encoding: results and errors."""

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from headnotes.positions import (
    Embeddings,
    PositionalEncoding,
    Vocabulary,
    sinusoids,
    tokenize,
)

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
SEQ_LEN, BATCH, D_MODEL, VOCAB = 5, 3, 22, 17
TEXTS = ["The cat sat on the mat.", "The dog slept!", "Cat?"]


def by_loops(max_length: int, d_model: int) -> Tensor:
    """The table of positions, computed entry by entry."""
    rows = []
    for t in range(max_length):
        row = []
        for column in range(d_model):
            angle = t / 10000 ** (2 * (column // 2) / d_model)
            row.append(math.cos(angle) if column % 2 else math.sin(angle))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


# Tokens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat sat, did it?", ["the", "cat", "sat", "did", "it"]),
        ('Yes! No... (maybe): "so";', ["yes", "no", "maybe", "so"]),
        ("one\ttwo\n\n three ", ["one", "two", "three"]),
        ("reads—and asks, head/tail", ["reads", "and", "asks", "head", "tail"]),
        ("don't don’t", ["don't", "don't"]),
        ("'quoted' dogs' -well-read-", ["quoted", "dogs", "well-read"]),
        ("in 2017, 8 heads", ["in", "2017", "8", "heads"]),
        ("Cafe\u0301 café CAFÉ", ["café"] * 3),
        ("नमस्ते दुनिया।", ["नमस्ते", "दुनिया"]),  # vowels that are marks
        ("<pad> <unk>", ["pad", "unk"]),
        ("- '' — ?!", []),
        ("", []),
    ],
)
def test_words_are_separated_by_spaces_and_punctuation(
    text: str, words: list[str]
) -> None:
    assert tokenize(text) == words


def test_a_vocabulary_holds_each_word_once_and_in_order() -> None:
    vocabulary = Vocabulary(TEXTS)
    words = ["cat", "dog", "mat", "on", "sat", "slept", "the"]
    assert vocabulary.words == ["<pad>", "<unk>", *words]
    assert len(vocabulary) == 9
    assert Vocabulary(reversed(TEXTS)).words == vocabulary.words
    assert Vocabulary(text for text in TEXTS).words == vocabulary.words
    assert Vocabulary([]).words == ["<pad>", "<unk>"]


def test_decoding_undoes_encoding() -> None:
    vocabulary = Vocabulary(TEXTS)
    for text in TEXTS:
        assert vocabulary.decode(vocabulary.encode(text)) == tokenize(text)


def test_an_unknown_word_is_number_1_and_no_text_contains_the_padding_token() -> None:
    vocabulary = Vocabulary(TEXTS)
    assert vocabulary.encode("the bird <pad>").tolist() == [8, 1, 1]
    assert vocabulary.encode("").tolist() == []
    assert vocabulary.encode("").dtype == torch.int64


def test_a_batch_holds_each_text_as_a_column_padded_at_the_end() -> None:
    vocabulary = Vocabulary(TEXTS)
    texts = [*TEXTS, "..."]
    tokens, valid_lens = vocabulary.encode_batch(texts)
    assert tokens.shape == (6, 4)
    assert valid_lens.tolist() == [6, 3, 1, 0]
    for b, text in enumerate(texts):
        length = int(valid_lens[b])
        assert torch.equal(tokens[:length, b], vocabulary.encode(text))
        assert not tokens[length:, b].any()
        filler = ["<pad>"] * (6 - length)
        assert vocabulary.decode(tokens[:, b]) == tokenize(text) + filler
    again = vocabulary.encode_batch(text for text in texts)
    assert torch.equal(again[0], tokens)


# Embeddings


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (5, 3), (5, 3, 2), (0, 3)], ids=str)
def test_each_token_gets_its_row_times_the_root_of_the_width(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    embeddings = Embeddings(VOCAB, D_MODEL).to(device)
    tokens = torch.randint(VOCAB, shape, device=device, dtype=dtype)
    x = embeddings(tokens)
    assert x.shape == (*shape, D_MODEL)
    table = embeddings.table.weight
    rows = [table[token] for token in tokens.flatten().tolist()]
    for row, vector in zip(rows, x.reshape(-1, D_MODEL), strict=True):
        torch.testing.assert_close(vector, row * D_MODEL**0.5)


def test_padding_has_an_embedding_and_each_row_its_gradient(
    device: torch.device,
) -> None:
    embeddings = Embeddings(VOCAB, D_MODEL).to(device, torch.float64)
    tokens = torch.tensor([[3, 0], [0, 3], [3, 7]], device=device)
    upstream = torch.randn(3, 2, D_MODEL, dtype=torch.float64, device=device)
    embeddings(tokens).backward(upstream)
    expected = torch.zeros(VOCAB, D_MODEL, dtype=torch.float64, device=device)
    for t in range(3):
        for b in range(2):
            expected[tokens[t, b]] += upstream[t, b] * D_MODEL**0.5
    assert embeddings.table.weight.grad is not None
    assert embeddings.table.weight[0].any()
    assert expected[0].any()
    torch.testing.assert_close(embeddings.table.weight.grad, expected)


def test_embeddings_start_larger_than_positions_by_the_root_of_the_width() -> None:
    d_model = 256
    x = Embeddings(1000, d_model)(torch.arange(1000))
    assert abs(x.std() / d_model**0.5 - 1) < 0.02  # 256,000 samples: 14 sigma
    # A sine and a cosine of one angle: every row has the mean square of one half.
    square = sinusoids(1000, d_model).square().mean(dim=1)
    torch.testing.assert_close(square, torch.full((1000,), 0.5).double())


# Positions


@pytest.mark.parametrize("d_model", [1, 2, 7, 22], ids="d_model={}".format)
def test_positions_are_those_of_the_loops(d_model: int) -> None:
    table = sinusoids(5003, d_model)
    assert table.dtype == torch.float64
    # Angles reach 5,002, where float64 is exact to 1e-12.
    torch.testing.assert_close(table, by_loops(5003, d_model), rtol=0, atol=3e-12)


@pytest.mark.parametrize("k", [1, 3, 11])
def test_moving_by_k_positions_is_the_same_rotation_everywhere(k: int) -> None:
    table = sinusoids(101, D_MODEL)
    pairs = table.reshape(101, D_MODEL // 2, 2)  # sine, cosine
    for i in range(D_MODEL // 2):
        angle = k / 10000 ** (2 * i / D_MODEL)
        cos, sin = math.cos(angle), math.sin(angle)
        rotation = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
        moved = pairs[:-k, i] @ rotation.T
        torch.testing.assert_close(moved, pairs[k:, i], rtol=0, atol=1e-12)


def test_dot_products_depend_on_the_distance_alone() -> None:
    table = sinusoids(53, D_MODEL)
    products = table @ table.T
    for distance in range(53):
        expected = sum(
            math.cos(distance / 10000 ** (2 * i / D_MODEL)) for i in range(D_MODEL // 2)
        )
        for diagonal in (distance, -distance):
            values = products.diagonal(diagonal)
            torch.testing.assert_close(values, torch.full_like(values, expected))
    # An odd width ends in a sine without its cosine.
    odd = sinusoids(53, 3)
    assert (odd @ odd.T).diagonal().std() > 1e-3


def test_in_float32_the_angles_of_late_positions_are_coarse() -> None:
    position = torch.arange(5000.0)
    speed = (torch.arange(0, 512, 2) * (-math.log(10000) / 512)).exp()
    coarse = (position[:, None] * speed).sin().double()
    error = (coarse - sinusoids(5000, 512)[:, ::2]).abs().max().item()
    print(f"largest error of a table in float32: {error:.1e}")
    assert 1e-4 < error < 1e-3


def test_every_item_of_the_batch_gets_the_same_positions(device: torch.device) -> None:
    positions = PositionalEncoding(D_MODEL, max_length=7).to(device).eval()
    x = torch.randn(SEQ_LEN, BATCH, D_MODEL, device=device, requires_grad=True)
    y = positions(x)
    assert y.shape == x.shape
    table = by_loops(SEQ_LEN, D_MODEL).float().to(device)
    for b in range(BATCH):
        torch.testing.assert_close(y[:, b], x[:, b] + table)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)


def test_batch_first_vectors_are_transposed(device: torch.device) -> None:
    positions = PositionalEncoding(D_MODEL).to(device).eval()
    x = torch.randn(BATCH, SEQ_LEN, D_MODEL, device=device)
    y = positions(x.transpose(0, 1)).transpose(0, 1)
    table = by_loops(SEQ_LEN, D_MODEL).float().to(device)
    torch.testing.assert_close(y, x + table)
    assert not torch.allclose(positions(x), y)  # accepted, but with other positions


def test_dropout_acts_on_the_sum_and_only_in_training(device: torch.device) -> None:
    positions = PositionalEncoding(D_MODEL, dropout=0.5).to(device)
    x = torch.randn(SEQ_LEN, BATCH, D_MODEL, device=device)
    y = positions(x)
    total = positions.eval()(x)
    assert (y == 0).any()
    assert (y != 0).any()
    torch.testing.assert_close(y[y != 0], 2 * total[y != 0])


def test_the_full_length_fits_and_empty_input_too(device: torch.device) -> None:
    positions = PositionalEncoding(D_MODEL, max_length=SEQ_LEN).to(device)
    for seq_len, batch_size in [(SEQ_LEN, 1), (0, BATCH), (SEQ_LEN, 0)]:
        x = torch.zeros(seq_len, batch_size, D_MODEL, device=device)
        assert positions(x).shape == x.shape


def test_the_table_is_exact_in_every_dtype_that_the_module_was_moved_to(
    device: torch.device,
) -> None:
    exact = by_loops(97, D_MODEL)
    positions = PositionalEncoding(D_MODEL, max_length=97)
    assert positions.table.dtype == torch.float32
    for dtype in (torch.float16, torch.float64, torch.bfloat16, torch.float32):
        moved = positions.to(device, dtype).table
        assert moved.dtype == dtype
        assert moved.device.type == device.type
        # One rounding from float64; a table cast up from half would be off by 1e-3.
        error = (moved.double().cpu() - exact).abs().max().item()
        assert error <= torch.finfo(dtype).eps / 2 + 1e-13


def test_a_module_from_the_meta_device_has_its_table(device: torch.device) -> None:
    with torch.device("meta"):
        positions = PositionalEncoding(D_MODEL, max_length=7)
    assert positions.table.is_meta
    x = torch.zeros(SEQ_LEN, BATCH, D_MODEL, device="meta")
    assert positions(x).shape == x.shape
    positions.to_empty(device=device)
    expected = by_loops(7, D_MODEL).float().to(device)
    torch.testing.assert_close(positions.table, expected)


def test_a_model_from_the_meta_device_has_its_table_once_its_weights_are_loaded(
    device: torch.device,
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(Embeddings(11, D_MODEL), PositionalEncoding(D_MODEL, 0.0))

    early = model().to(device)
    with torch.device("meta"):
        late = model()
    late.load_state_dict(early.state_dict(), assign=True)
    tokens = torch.randint(11, (SEQ_LEN, BATCH), device=device)
    assert torch.equal(late.to(device)(tokens), early(tokens))


def test_the_table_is_no_parameter_and_in_no_checkpoint() -> None:
    positions = PositionalEncoding(D_MODEL)
    assert not list(positions.parameters())
    assert not positions.state_dict()
    assert positions.table.shape == (5000, D_MODEL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_half(device: torch.device, dtype: torch.dtype) -> None:
    whole = nn.Sequential(Embeddings(VOCAB, D_MODEL), PositionalEncoding(D_MODEL))
    whole.to(device).eval()
    tokens = torch.randint(VOCAB, (SEQ_LEN, BATCH), device=device)
    expected = whole(tokens)
    # Under autocast, vectors may be in half precision and the table in float32.
    assert whole[1](expected.to(dtype)).dtype == dtype
    output = whole.to(dtype)(tokens)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)


# Compilers, export, vmap, copies


def pipeline(device: torch.device) -> nn.Sequential:
    parts = [Embeddings(VOCAB, D_MODEL), PositionalEncoding(D_MODEL, max_length=31)]
    return nn.Sequential(*parts).to(device).eval()


@pytest.mark.slow
def test_compiles_whole_and_gives_the_same(device: torch.device) -> None:
    torch.compiler.reset()
    whole = pipeline(device)
    counter = CompileCounterWithBackend("eager")
    fast = torch.compile(whole, backend=counter, fullgraph=True)
    for seq_len in (5, 7, 11):
        tokens = torch.randint(VOCAB, (seq_len, BATCH), device=device)
        torch.testing.assert_close(fast(tokens), whole(tokens))
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_exports_with_a_dynamic_length(device: torch.device) -> None:
    whole = pipeline(device)
    tokens = torch.randint(VOCAB, (SEQ_LEN, BATCH), device=device)
    length = torch.export.Dim("seq_len", min=2, max=31)
    program = torch.export.export(
        whole, (tokens,), dynamic_shapes={"input": {0: length}}, strict=False
    )
    other = torch.randint(VOCAB, (11, BATCH), device=device)
    torch.testing.assert_close(program.module()(other), whole(other))


def test_vmap_gives_what_a_loop_gives(device: torch.device) -> None:
    whole = pipeline(device)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN, BATCH), device=device)
    outputs = torch.func.vmap(whole)(tokens)
    for one, output in zip(tokens, outputs, strict=True):
        torch.testing.assert_close(output, whole(one))


def test_copies_and_pickles_are_equal(device: torch.device) -> None:
    whole = pipeline(device).train()
    tokens = torch.randint(VOCAB, (SEQ_LEN, BATCH), device=device)
    whole(tokens).sum().backward()
    expected = whole.eval()(tokens)
    for twin in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert torch.equal(twin(tokens), expected)


def test_inputs_and_parameters_are_not_modified(device: torch.device) -> None:
    whole: Any = pipeline(device)
    tokens = torch.randint(VOCAB, (SEQ_LEN, BATCH), device=device)
    x = torch.randn(SEQ_LEN, BATCH, D_MODEL, device=device)
    kept = [t.clone() for t in (tokens, x, whole[0].table.weight, whole[1].table)]
    whole(tokens).sum().backward()
    whole[1].train()(x)
    now = (tokens, x, whole[0].table.weight, whole[1].table)
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


# Errors


def embed(tokens: Any) -> Tensor:
    return Embeddings(17, 22)(tokens)  # type: ignore[no-any-return]


def place(x: Any) -> Tensor:
    return PositionalEncoding(22, max_length=7)(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: tokenize(["a"]),  # type: ignore[arg-type]
            TypeError,
            "`text` must be a string, but is a list; give one at a time",
        ),
        (
            lambda: Vocabulary("the cat"),
            TypeError,
            "`texts` is one string; give a list of them, as in `[text]`",
        ),
        (
            lambda: Vocabulary(TEXTS).encode_batch("the cat"),
            TypeError,
            "`texts` is one string; give a list of them, as in `[text]`",
        ),
        (
            lambda: Vocabulary(TEXTS).encode_batch([]),
            ValueError,
            "`texts` is empty; give at least one text to encode",
        ),
        (
            lambda: Vocabulary(TEXTS).decode([3]),  # type: ignore[arg-type]
            TypeError,
            "`tokens` must be a tensor, but is a list",
        ),
        (
            lambda: Vocabulary(TEXTS).decode(torch.ones(2, 3).long()),
            ValueError,
            "`tokens` has shape [2, 3], on cpu, not [seq_len] with values; take one "
            "sequence of a batch with `tokens[:, 0]`",
        ),
        (
            lambda: Vocabulary(TEXTS).decode(torch.ones(3, device="meta").long()),
            ValueError,
            "`tokens` has shape [3], on meta, not [seq_len] with values; take one "
            "sequence of a batch with `tokens[:, 0]`",
        ),
        (
            lambda: Vocabulary(TEXTS).decode(torch.tensor([3, 9])),
            ValueError,
            "`tokens` runs from 3 to 9, but must lie between 0 and 8, as there are 9 "
            "tokens",
        ),
        (
            lambda: embed(torch.tensor([-1, 3])),
            ValueError,
            "`tokens` runs from -1 to 3, but must lie between 0 and 16, as there are "
            "17 tokens",
        ),
        (
            lambda: embed(torch.tensor([17])),
            ValueError,
            "`tokens` runs from 17 to 17, but must lie between 0 and 16, as there are "
            "17 tokens",
        ),
        (
            lambda: embed(torch.zeros(3)),
            TypeError,
            "`tokens` is torch.float32, but token numbers are integers",
        ),
        (
            lambda: embed(torch.zeros(3).bool()),
            TypeError,
            "`tokens` is torch.bool, but token numbers are integers",
        ),
        (
            lambda: embed(torch.zeros(3, dtype=torch.uint8)),
            TypeError,
            "`tokens` is torch.uint8; use `tokens.long()`",
        ),
        (
            lambda: embed(torch.zeros(3, device="meta").long()),
            ValueError,
            "`tokens` is on meta, the module on cpu; use `tokens.to('cpu')`",
        ),
        (
            lambda: Embeddings(0, 22),
            ValueError,
            "`vocab_size` (=0) must be an int from 1 up",
        ),
        (
            lambda: Embeddings(17, 2.0),  # type: ignore[arg-type]
            ValueError,
            "`d_model` (=2.0) must be an int from 1 up",
        ),
        (
            lambda: PositionalEncoding(22, max_length=0),
            ValueError,
            "`max_length` (=0) must be an int from 1 up",
        ),
        (
            lambda: PositionalEncoding(22, dropout=1.5),
            ValueError,
            "`dropout` (=1.5) must lie between 0 and 1",
        ),
        (
            lambda: PositionalEncoding(22, dropout=True),
            ValueError,
            "`dropout` (=True) must lie between 0 and 1",
        ),
        (
            lambda: sinusoids(7, -2),
            ValueError,
            "`d_model` (=-2) must be an int from 1 up",
        ),
        (
            lambda: place([0.0]),
            TypeError,
            "`x` must be a tensor, but is a list",
        ),
        (
            lambda: place(torch.zeros(5, 3, 22).long()),
            TypeError,
            "`x` is torch.int64; positions are added to vectors, not tokens",
        ),
        (
            lambda: place(torch.zeros(5, 3, 22).to_sparse()),
            TypeError,
            "`x` is sparse, nested or quantized; pass a dense one",
        ),
        (
            lambda: embed(torch.zeros(5, 3).long().to_sparse()),
            TypeError,
            "`tokens` is sparse, nested or quantized; pass a dense one",
        ),
        (
            lambda: Vocabulary(None),  # type: ignore[arg-type]
            TypeError,
            "`texts` must be a list of strings, but is a NoneType",
        ),
        (
            lambda: place(torch.zeros(5, 22)),
            ValueError,
            "`x` has shape [5, 22], not [seq_len, batch_size, d_model (=22)]; a single "
            "sequence needs `x.unsqueeze(1)`",
        ),
        (
            lambda: place(torch.zeros(5, 3, 21)),
            ValueError,
            "`x` has shape [5, 3, 21], not [seq_len, batch_size, d_model (=22)]; a "
            "single sequence needs `x.unsqueeze(1)`",
        ),
        (
            lambda: place(torch.zeros(8, 3, 22)),
            ValueError,
            "`x` has 8 positions, but `max_length` is 7; build "
            "`PositionalEncoding(22, max_length=8)`, or transpose batch-first data "
            "with `x.transpose(0, 1)`",
        ),
        (
            lambda: place(torch.zeros(5, 3, 22, device="meta")),
            ValueError,
            "`x` is on meta, the module on cpu; use `x.to('cpu')`",
        ),
    ],
)
def test_invalid_arguments_are_refused(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()
