r"""# Solution: only in float32 (mixed precision)

This is a solution of the exercise [only in
float32](../../../exercises/25_bug_precision.py), with the inputs that its check uses
and the mistakes that the check recognizes.

The given code converts the scores to float32 for the softmax, and leaves the weights
so. Their product with values in bfloat16, or in float64, raises an error, since PyTorch
converts no operand of a matrix product. In float32 the conversion does nothing, so no
test in float32 can find this. The law *dtype_and_device* fails, and with it
*large_scores*, which runs in float16.

Source: [T5 in Hugging Face's
library](https://github.com/huggingface/transformers/blob/main/src/transformers/models/t5/modeling_t5.py),
whose softmax is in float32 too, and converted back with `type_as`; the bug is our own.
"""

import math

import torch
from torch import Tensor, nn

from headnotes.exercises.exercise import Exercise, numbers


class Attention(nn.Module):
    r"""Self-attention over `[batch_size, seq_len, d_model]`, fixed.

    >>> attention = Attention(d_model=21, heads=3).to(torch.bfloat16)
    >>> attention(torch.randn(2, 5, 21, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """Split the last dimension into heads."""
        x = x.view(*x.shape[:2], self.n_heads, -1)  # [batch_size, seq_len, heads, d_k]
        return x.transpose(1, 2)  # [batch_size, heads, seq_len, d_k]

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token of `x` to all tokens."""
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        context = self.weights(scores) @ v
        return self.o(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def weights(self, scores: Tensor) -> Tensor:
        """The weights, computed in float32, in the dtype of the scores."""
        return scores.float().softmax(dim=-1).to(scores.dtype)


def run_in(attention: type[nn.Module], x: Tensor, dtype: torch.dtype) -> Tensor:
    """The output, but for bfloat16 only its shape and dtype."""
    torch.manual_seed(0)
    module = attention(d_model=x.shape[-1], heads=2).eval().to(dtype)
    output: Tensor = module(x.to(dtype))
    return torch.zeros_like(output) if dtype == torch.bfloat16 else output


# region Typical mistakes


class Given(Attention):
    """This is the given code, or one that computes the same. Print the dtypes of the
    weights and of the values before they are multiplied.
    """

    def weights(self, scores: Tensor) -> Tensor:
        return scores.float().softmax(dim=-1)


class AlwaysBFloat16(Attention):
    """The weights are converted to bfloat16, whatever the values are. Convert them to
    the dtype of the values: `weights.to(v.dtype)`.
    """

    def weights(self, scores: Tensor) -> Tensor:
        return scores.float().softmax(dim=-1).to(torch.bfloat16)


class OutputInFloat32(Attention):
    """The output is in float32 for every input. Only the softmax is computed in
    float32; convert the weights back to the dtype of the values.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class SoftmaxOverQueries(Attention):
    """The dtypes are right, but the softmax runs over the queries. Let it run over the
    keys, the last dimension, as in the given code.
    """

    def weights(self, scores: Tensor) -> Tensor:
        return scores.float().softmax(dim=-2).to(scores.dtype)


# endregion

EXERCISE = Exercise(
    series="Find the bug",
    solution=Attention,
    reference=Attention,
    inputs=[
        (numbers(1, 1, 2), torch.float32),
        (numbers(1, 1, 2), torch.bfloat16),
        (numbers(1, 1, 2), torch.float64),
        (numbers(3, 5, 4), torch.float32),
    ],
    mistakes=[Given, AlwaysBFloat16, OutputInFloat32, SoftmaxOverQueries],
    run=run_in,
    laws=["dtype_and_device", "large_scores"],
    options={"layout": "batch_first"},
)
