"""Shapes in comments: which notations are read, and that prose is not."""

import pytest

from sidenotes.notations import shapes_of, split_entries


def axes_in(comment: str) -> list[str]:
    return [" | ".join(shape.axes) for shape in shapes_of(comment)]


@pytest.mark.parametrize(
    ("comment", "axes"),
    [
        ("# [B, T, C]", "B | T | C"),
        ("# (B, T, C)", "B | T | C"),
        ("# (B, T, C,)", "B | T | C"),
        ("#(batch,seq,dim)", "batch | seq | dim"),
        ("# B x T x C", "B | T | C"),
        ("# B × T × C", "B | T | C"),
        ("# (B x T x C)", "B | T | C"),
        ("# n_head x (mb_size*len_q) x d_k", "n_head | mb_size * len_q | d_k"),
        ("# mb_size x len_q x (n_head*d_v)", "mb_size | len_q | n_head * d_v"),
        ("# b h n d", "b | h | n | d"),
        ("# [b h n d]", "b | h | n | d"),
        ("# [n d]", "n | d"),
        ("# b n (h d)", "b | n | h * d"),
        ("# B, T, C", "B | T | C"),
        ("# nH, Wh*Ww, Wh*Ww", "nH | Wh * Ww | Wh * Ww"),
        ("# -> (b, n)", "b | n"),
        ("# (b, m) => (b, n)", "b | n"),
        ("# (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)", "B | nh | T | hs"),
        ("# (b, m) @ (m, n) = (b, n)", "b | n"),
        ("# x: (B, T, C)", "B | T | C"),
        ("# Shape: (b, num_tokens, d_out)", "b | num_tokens | d_out"),
        ("# Shape [batch_size, num_tokens]", "batch_size | num_tokens"),
        ("# shape (t)", "t"),
        ("# embeddings of shape (b, t, n_embd)", "b | t | n_embd"),
        ("# the `mask` has shape `[q_len, k_len]`.", "q_len | k_len"),
        ("# Shape of q: (batch, no. of queries, d)", "batch | no_of_queries | d"),
        ("# reshape to (B, T, C)", "B | T | C"),
        ("# ~ [bsz, n]", "bsz | n"),
        ("# torch.Size([2, 3])", "2 | 3"),
        ("# (t,)", "t"),
        ("# []", ""),
        ("# [..., heads*d_k]", "... | heads * d_k"),
        ("# [b, ..., d]; rows sum to 1", "b | ... | d"),
        ("# (B, T', d′)", "B | Tʹ | dʹ"),
        ("# (batch, 5 tokens, 64 dims)", "batch | 5 | 64"),
        ("# (B=2, T=1024, C)", "B | T | C"),
        ("# (B, 2C, 4*d)", "B | 2 * C | 4 * d"),
        ("# (B, H/2, C//2)", "B | H // 2 | C // 2"),
        ("# (B, self.heads, config.dim)", "B | heads | dim"),
        ("# (B, T, -1)", "B | T | _"),
        ("# [N, *, ?]", "N | _ | _"),
        ("# (B, T, C) float32", "B | T | C"),
        ("# [B, T] the states", "B | T"),
        ("# shape (0, d)", "0 | d"),
        ("# of size (2, 3)", "2 | 3"),
        ("# [b, n] -> [b, n, n]", "b | n | n"),
        ("# b (h d)", "b | h * d"),
        ("# [n]  # noqa: E501", "n"),
        ("# type: ignore  # [n]", "n"),
    ],
)
def test_a_shape_is_read_in_the_notations_in_use(comment: str, axes: str) -> None:
    assert axes_in(comment) == [axes]


def test_a_comment_may_state_several_shapes() -> None:
    assert axes_in("# [n, d], [n]") == ["n | d", "n"]
    assert axes_in("# (B, T) and (B,)") == ["B | T", "B"]
    assert axes_in("# B x T, T x (B*C)") == ["B | T", "T | B * C"]
    assert axes_in("# B x T and T x B") == ["B | T", "T | B"]
    assert axes_in("# B x T as C x T") == ["B | T"]
    both = shapes_of("# q: (B, T), k: (B, S)")
    assert [(s.about, s.axes) for s in both] == [
        (("q",), ("B", "T")),
        (("k",), ("B", "S")),
    ]


@pytest.mark.parametrize(
    "comment",
    [
        "# [1] see the paper",
        "# [TODO] speed this up",
        "# [Vaswani et al., 2017]",
        "# as in [Vaswani et al., 2017]",
        "# (optional, but faster)",
        "# (optional)",
        "# type: (int, int) -> int",
        "# x -> y",
        "# key, query, value projections for all heads, but in a batch",
        "# batch size, sequence length, embedding dimensionality (n_embd)",
        "# treat as a (n_head) size batch",
        "# multiply by a x b",
        "# This costs a",
        "# returns (sin, cos)",
        "# f(x, y) and x[0, 1]",
        "# $(30, 50, 512)$",
        "# (b, m) @ (m, n)",
        "# [n, d] or [d]",
        "# is ok",
        "# 1 / sqrt(d)",
        "# (0, 1)",
        "# [-1, 1]",
        "# rows: [0, 1]",
        "# (i, j) = (0, 0)",
        "# [0, 1, ..., n-1]",
        "# values: (1, 2)",
        "# range: [lo, hi]",
        "# for example: [1, 2, 3]",
        "# e.g.: [n, d]",
        "# kernel size is (3, 3)",
        "# stride: (2, 2)",
        "# padding = [2, 2]",
        "# axes are (1, 2)",
        "# xyxy: (3, 4, 5, 6)",
        "# [1, 2] -> [1, 3]",
        "# [a, b] -> [a, a, b, b]",
        "# (a, b) -> (a, b, a, b)",
        "# A B",
        "# [see the paper]",
        "# 1, 2, 3",
        "# 16 x 16 patches",
    ],
)
def test_other_comments_state_no_shape(comment: str) -> None:
    assert axes_in(comment) == []


@pytest.mark.parametrize(
    ("comment", "guessed"),
    [
        ("# [a, b, c] -> [c, a, b]", True),
        ("# [c, a, b]", False),
        ("# [b, n, d] -> [n, b, d]", False),
        ("# [a, b, d] -> [d, b, a]", False),
        ("# [a, a] -> [a]", False),
    ],
)
def test_letters_behind_an_arrow_may_be_values(comment: str, guessed: bool) -> None:
    assert [shape.guessed for shape in shapes_of(comment)] == [guessed]


def test_the_place_and_the_words_before_a_shape_are_known() -> None:
    comment = "# so k, v shape:  (b, n)"
    (shape,) = shapes_of(comment)
    assert comment[shape.start :].startswith(shape.text)
    assert shape.about == ("so", "k", "v")
    (shape,) = shapes_of("# transposed x to (b, n)")
    assert shape.about == ()


def test_entries_may_be_split_and_joined_again() -> None:
    assert split_entries("[a * b, c]") == (["a * b", "c"], "[", ",")
    assert split_entries("a  b (c d)") == (["a", "b", "(c d)"], "", " ")
    assert split_entries("(a,)") == (["a"], "(", ",")
