r"""# Token embeddings and positional encoding

This module converts text to the vectors that attention takes as input, in four steps.
Tokenization splits the text into tokens, here words. A vocabulary maps each token to a
number. An embedding layer maps each number to a vector, a row of a learned table. And
because attention itself does not depend on the order of its keys, a positional encoding
is added: a second vector, which depends on the position only.

$$x_t = \sqrt{d_{model}}\; E_{w_t} + P_t$$

Here $w_t$ is the number of the token at position $t$, $E$ the learned table and $P$ the
table of sinusoids. Tensors are sequence first: token numbers are `[seq_len,
batch_size]`, vectors `[seq_len, batch_size, d_model]`, and **the position is the first
axis**. For batch-first attention, transpose the finished vectors with `x.transpose(0,
1)`.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.4 for the scaled embeddings and section 3.5 for the positions.
"""

import math
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from headnotes.checks import check_dropout, check_sizes, check_tensor, value_range


def tokenize(text: str) -> list[str]:
    r"""Split `text` into words, in lower case and without punctuation.

    A word consists of letters, accents and digits, with hyphens and apostrophes inside
    it. All other characters separate words. This is enough for a lesson; real models
    use tokenizers that learn pieces of words from data. Raises `TypeError` for what is
    not a string.

    >>> tokenize("Well-read? Don’t ask: the cat's asleep!")
    ['well-read', "don't", 'ask', 'the', "cat's", 'asleep']
    """
    if not isinstance(text, str):
        seen = type(text).__name__
        raise TypeError(f"`text` must be a string, but is a {seen}; give one at a time")
    # Two spellings of a word must give one token: NFC makes é one character, not e with
    # an accent, and a curly apostrophe becomes a straight one.
    text = unicodedata.normalize("NFC", text.lower()).replace("’", "'")

    # Categories L, M and N of Unicode: letters, marks such as accents, and numbers.
    characters = []
    for character in text:
        is_part = character in "'-" or unicodedata.category(character)[0] in "LMN"
        characters.append(character if is_part else " ")
    text = "".join(characters)
    words = [word.strip("'-") for word in text.split()]
    return [word for word in words if word]


class Vocabulary:
    r"""A vocabulary: all words of some texts, with a number for each.

    Words are sorted, so that the numbers do not depend on the order of the texts. Two
    special tokens come first: number 0 is padding, which makes short sequences as long
    as the others of their batch, and number 1 stands for every unknown word. No text
    can contain either token, because `tokenize` removes their brackets.

    Raises `TypeError` where `texts` is a single string.

    >>> vocabulary = Vocabulary(["The cat sat.", "The dog?"])
    >>> vocabulary.words
    ['<pad>', '<unk>', 'cat', 'dog', 'sat', 'the']
    >>> len(vocabulary)
    6
    """

    def __init__(self, texts: Iterable[str]) -> None:
        check_texts(texts)
        words = {word for text in texts for word in tokenize(text)}
        self.words = ["<pad>", "<unk>", *sorted(words)]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        """The size of the vocabulary: all words, padding and unknown."""
        return len(self.words)

    def encode(self, text: str) -> Tensor:
        r"""The numbers of the words of one text: `[seq_len]`.

        >>> vocabulary = Vocabulary(["The cat sat."])
        >>> vocabulary.encode("The dog sat")
        tensor([4, 1, 3])
        """
        numbers = [self.numbers.get(word, 1) for word in tokenize(text)]
        tokens = torch.tensor(numbers, dtype=torch.int64)  # [seq_len]
        return tokens  # [seq_len]

    def encode_batch(self, texts: Iterable[str]) -> tuple[Tensor, Tensor]:
        r"""A padded batch of texts, `[seq_len, batch_size]`, and their lengths.

        Each column is a text; short texts are padded at the end. `masks.padding` makes
        the padding mask from the lengths, `[batch_size]`. Raises `ValueError` for an
        empty list.

        >>> vocabulary = Vocabulary(["The cat sat."])
        >>> tokens, valid_lens = vocabulary.encode_batch(
        ...     ["The cat sat", "Sat"])
        >>> tokens
        tensor([[4, 3],
                [2, 0],
                [3, 0]])
        >>> valid_lens
        tensor([3, 1])
        """
        check_texts(texts)
        columns = [self.encode(text) for text in texts]
        if not columns:
            raise ValueError("`texts` is empty; give at least one text to encode")
        tokens = nn.utils.rnn.pad_sequence(columns)  # [seq_len, batch_size]
        lengths = torch.tensor([len(column) for column in columns])  # [batch_size]
        return tokens, lengths  # [seq_len, batch_size], [batch_size]

    def decode(self, tokens: Tensor) -> list[str]:
        r"""The words of one sequence of numbers `[seq_len]`, padding included.

        Raises `TypeError` where `tokens` is not an integer tensor, and `ValueError` for
        more than one axis or a number outside of the vocabulary.

        >>> vocabulary = Vocabulary(["The cat sat."])
        >>> vocabulary.decode(torch.tensor([4, 1, 3, 0]))
        ['the', '<unk>', 'sat', '<pad>']
        """
        check_tokens(tokens, len(self))
        if tokens.dim() != 1 or tokens.is_meta:
            raise ValueError(
                f"`tokens` has shape {list(tokens.shape)}, on {tokens.device}, not "
                f"[seq_len] with values; take one sequence of a batch with "
                f"`tokens[:, 0]`"
            )
        return [self.words[number] for number in tokens.tolist()]


class Embeddings(nn.Module):
    r"""Token embeddings: a learned vector for each number, times $\sqrt{d_{model}}$.

    Token numbers `[...]`, of any shape, become vectors `[..., d_model]`.

    Raises `TypeError` for tokens that are not int32 or int64, `ValueError` for a number
    outside of the table. Source: Vaswani et al. 2017, section 3.4.

    >>> embeddings = Embeddings(vocab_size=11, d_model=4)
    >>> tokens = torch.tensor([[3, 5], [7, 0], [3, 3]])
    >>> x = embeddings(tokens)
    >>> x.shape
    torch.Size([3, 2, 4])
    >>> x[0, 0].equal(2 * embeddings.table.weight[3])
    True
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, d_model=d_model)
        # The paper shares one table between this layer and, transposed, the last one,
        # which needs entries of size $1/\sqrt{d_{model}}$. The factor then scales the
        # embeddings to size 1, that of the positions. Here, as PyTorch initializes the
        # table with size 1, embeddings start out $\sqrt{d_{model}}$ times larger.
        self.scale = math.sqrt(d_model)

        # No row is reserved for padding (`padding_idx`): its number depends on the
        # vocabulary, and the mask hides padding anyway.
        self.table = nn.Embedding(vocab_size, d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens `[...]`: vectors `[..., d_model]`."""
        check_tokens(tokens, self.table.num_embeddings)
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`tokens` is {tokens.dtype}; use `tokens.long()`")
        check_tensor("tokens", tokens, self.table.weight.device)
        x: Tensor = self.table(tokens)  # [..., d_model]
        return x * self.scale  # [..., d_model]


class PositionalEncoding(nn.Module):
    r"""Sinusoidal positional encoding: added to each vector, then dropout.

    `x` is `[seq_len, batch_size, d_model]`: **positions run along the first axis**, and
    batch-first data would be numbered along the batch without an error. There are no
    parameters. The table holds `max_length` positions and is not stored in checkpoints,
    so a checkpoint loads whatever its `max_length` was.

    Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device, a
    sequence longer than `max_length`, or a setting out of range.
    Source: Vaswani et al. 2017, section 3.5, and section 5.4 for the dropout.

    >>> positions = PositionalEncoding(d_model=4)
    >>> positions.eval()(torch.zeros(3, 2, 4))[:, 0]
    tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
            [ 0.8415,  0.5403,  0.0100,  0.9999],
            [ 0.9093, -0.4161,  0.0200,  0.9998]])
    """

    table: Tensor

    def __init__(
        self, d_model: int, dropout: float = 0.1, max_length: int = 5000
    ) -> None:
        super().__init__()
        check_sizes(d_model=d_model, max_length=max_length)
        check_dropout(dropout)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("table", torch.empty(max_length, d_model), False)
        self._fill_table()
        self.register_load_state_dict_post_hook(materialize_table)  # type: ignore[no-untyped-call]

    def forward(
        self,
        x: Tensor,  # [seq_len, batch_size, d_model]
    ) -> Tensor:
        """Add positions to `x`, which is not modified."""
        max_length, d_model = self.table.shape
        check_vectors(x, self.table)
        if x.shape[0] > max_length:
            raise ValueError(
                f"`x` has {x.shape[0]} positions, but `max_length` is {max_length}; "
                f"build `PositionalEncoding({d_model}, max_length={x.shape[0]})`, or "
                f"transpose batch-first data with `x.transpose(0, 1)`"
            )
        # Broadcast over the batch. Converted to the dtype of `x`, so that the sum stays
        # in half precision if `x` is.
        table = self.table[: x.shape[0], None].to(x.dtype)  # [seq_len, 1, d_model]
        output: Tensor = self.dropout(x + table)  # [seq_len, batch_size, d_model]
        return output

    def _fill_table(self) -> None:
        if not self.table.is_meta:  # where tensors have no values
            self.table.copy_(sinusoids(*self.table.shape))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to`, `.half`, `.double` and `.to_empty` all call this. The table is
        # recomputed, not converted: from float32 to float64 it would keep its rounding
        # errors, and from the "meta" device it would be uninitialized memory.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill_table()
        return self


def materialize_table(module: PositionalEncoding, _: Any) -> None:
    """Compute the table when a model that was built on "meta" loads its weights.

    No checkpoint holds the table, and the device of the weights is not known here: the
    table is created on the CPU, and `.to` moves it together with the weights.
    """
    if module.table.is_meta:
        module.table = torch.empty_like(module.table, device="cpu")
        module._fill_table()


def sinusoids(max_length: int, d_model: int) -> Tensor:
    r"""The table of sinusoidal positions, `[max_length, d_model]`, in float64.

    $$P_{t,2i} = \sin(t / 10000^{2i/d_{model}})$$

    $$P_{t,2i+1} = \cos(t / 10000^{2i/d_{model}})$$

    Each pair of columns is a point on a circle: it rotates once in $2\pi$ positions in
    the first pair, and more slowly in each pair after it. A shift by $k$ positions
    rotates every point by an angle that depends on $k$ alone, so the dot product of two
    rows depends on their distance only (where `d_model` is even; if it is odd,
    the last pair has no cosine):

    >>> products = sinusoids(50, 8) @ sinusoids(50, 8).T
    >>> products.diagonal(3).allclose(products[0, 3])
    True

    Raises `ValueError` for a size below 1. Source: Vaswani et al. 2017, section 3.5.
    """
    check_sizes(max_length=max_length, d_model=d_model)
    # In float64, on the CPU, because not every accelerator supports it. In float32 the
    # angles of late positions are coarse: in 5,000 rows, some values are off by 0.0004.
    row = torch.arange(max_length, dtype=torch.float64, device="cpu")  # [max_length]
    column = torch.arange(d_model, dtype=torch.float64, device="cpu")  # [d_model]

    # Columns $2i$ and $2i + 1$ have the same frequency; the even one is the sine.
    even = column % 2 == 0
    frequency = 10000 ** -((column - column % 2) / d_model)  # [d_model]
    angle = row[:, None] * frequency  # [max_length, d_model]
    return torch.where(even, angle.sin(), angle.cos())  # [max_length, d_model]


def check_texts(texts: Iterable[str]) -> None:
    """Refuse a single string, which would be read letter by letter."""
    if isinstance(texts, str):
        raise TypeError("`texts` is one string; give a list of them, as in `[text]`")
    if not isinstance(texts, Iterable):
        seen = type(texts).__name__
        raise TypeError(f"`texts` must be a list of strings, but is a {seen}")


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Refuse numbers that are not integers, or not in the vocabulary."""
    check_tensor("tokens", tokens)
    integral = not (tokens.is_floating_point() or tokens.is_complex())
    if not integral or tokens.dtype == torch.bool:
        raise TypeError(f"`tokens` is {tokens.dtype}, but token numbers are integers")
    # Reading the values costs a synchronization on a GPU. But there, an index beyond
    # the table would raise an assertion in the kernel, after which CUDA is unusable.
    low, high = value_range(tokens)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"`tokens` runs from {low} to {high}, but must lie between 0 and "
            f"{vocab_size - 1}, as there are {vocab_size} tokens"
        )


def check_vectors(x: Tensor, table: Tensor) -> None:
    """Refuse vectors to which the rows of `table` cannot be added."""
    check_tensor("x", x)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise TypeError(f"`x` is {x.dtype}; positions are added to vectors, not tokens")
    d_model = table.shape[1]
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise ValueError(
            f"`x` has shape {list(x.shape)}, not [seq_len, batch_size, d_model "
            f"(={d_model})]; a single sequence needs `x.unsqueeze(1)`"
        )
    check_tensor("x", x, table.device)
