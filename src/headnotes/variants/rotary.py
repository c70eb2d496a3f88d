r"""# Rotary position embedding (RoPE)

Rotary attention encodes positions by a rotation of the queries and keys. The components
of each query and key are grouped into pairs, each pair is a point in a plane, and it is
rotated by an angle that is proportional to the position $t$ of the token. Pair number
$n$ is rotated by $t\,\theta_n$, with $\theta_n = 10000^{-2n/d_k}$:

$$x'_1 = x_1 \cos t\,\theta_n - x_2 \sin t\,\theta_n$$

$$x'_2 = x_1 \sin t\,\theta_n + x_2 \cos t\,\theta_n$$

The dot product of a query that is rotated by $i\,\theta$ and a key that is rotated by
$j\,\theta$ depends on the difference of the angles only. So a score depends on the
distance $i - j$ of query and key, and not on where in the sequence they are. Nothing is
added to the embeddings, nothing is learned, and the values are not rotated.

One step of the [core](../mha.md#MultiHeadAttention.get_scores) changes, the scores:

$$S_{ij} =
  \operatorname{rotate}(q_i, i) \cdot \operatorname{rotate}(k_j, j) / \sqrt{d_k}$$

Llama, Mistral, Qwen, Gemma, Phi, GPT-NeoX, GPT-J and DeepSeek use it. They differ in
two ways. One is which components form a pair: $d$ and $d + d_k / 2$ ("halves"), or $2d$
and $2d + 1$ ("neighbors"). The other is how the angles are scaled for texts longer than
those of the training: not at all, linearly, NTK-aware, by YaRN, or as in Llama 3.

**At full speed** it is the argument `rotary` of
[`fast.MultiHeadAttention`](../fast/module.md), a
[`Rotary`](../fast/components.md#Rotary). With the same weights, the outputs are equal:

```python
from headnotes import fast
from headnotes.variants.rotary import rotary_frequencies

rotary = fast.Rotary(rotary_frequencies(14))  # d_k = d_model / heads
quick = fast.MultiHeadAttention(heads=3, d_model=42, rotary=rotary)
```

**Reduces to** the core where the frequencies are zero.

**Laws.** The law
[`relative_positions`](../attention_laws/positions.md#relative_positions) tests the idea
itself. Of the laws that the core passes, all but `key_permutation`, `query_permutation`
and `longer_padding` apply: the order of tokens matters, and keys that are appended
behind the last query here move the queries along.

Source: [RoFormer](https://arxiv.org/abs/2104.09864), Su et al. 2021, section 3.2, pairs
neighbors. [GPT-NeoX](https://arxiv.org/abs/2204.06745), Black et al. 2022, section 2,
pairs halves, and rotates a part of the components.
"""

import math
from typing import Any

import torch
from torch import Tensor

from headnotes.checks import check_sizes, check_tensor
from headnotes.mha import MultiHeadAttention, check_inputs, check_weight

PAIRINGS = ("halves", "neighbors")

# Frequencies are computed here, whatever the default device and dtype.
FLOAT64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


class RotaryAttention(MultiHeadAttention):
    r"""Multi-head attention with rotary positions, and the parameters of the core.

    `frequencies` are the angles per position, one for each pair of components, as
    `rotary_frequencies` and the functions for scaling return them. If they are fewer
    than `d_k / 2`, the other components are not rotated (partial rotary). `pairing` is
    "halves" or "neighbors"; halves are the default, because the published checkpoints
    of Llama and its successors are stored for them. `attention_factor` multiplies the
    rotated components; YaRN needs it.

    Raises `TypeError` or `ValueError` for settings that do not fit.
    Source: Su et al. 2021, section 3.2.2.

    Only distances matter. With all positions of the first sequence 1,000 later, and of
    the second 2,000, the outputs are the same:

    >>> mha = RotaryAttention(heads=7, d_model=84).eval()
    >>> x = torch.randn(5, 2, 84)
    >>> y = mha(query=x, key=x, value=x)
    >>> positions = torch.arange(5).unsqueeze(1) + torch.tensor([1000, 2000])
    >>> shifted = mha(query=x, key=x, value=x, key_positions=positions)
    >>> torch.allclose(y, shifted, atol=1e-5)
    True

    GPT-NeoX rotates a quarter of the components, Llama 3 has a larger base:

    >>> quarter = rotary_frequencies(24)
    >>> neox = RotaryAttention(2, 192, frequencies=quarter)
    >>> large_base = rotary_frequencies(96, base=500_000)
    >>> llama = RotaryAttention(2, 192, frequencies=large_base)
    """

    def __init__(
        self,
        heads: int,
        d_model: int,
        dropout_prob: float = 0.1,
        bias: bool = True,
        *,
        frequencies: Tensor | None = None,
        pairing: str = "halves",
        attention_factor: float = 1.0,
    ) -> None:
        super().__init__(heads, d_model, dropout_prob, bias)
        check_pairing(pairing)
        check_factor("attention_factor", attention_factor, 0)
        if frequencies is None:
            check_width("`d_model / heads`", self.d_k)
            frequencies = rotary_frequencies(self.d_k)  # [d_model // heads // 2]
        check_frequencies(frequencies, self.d_k)
        # Numbers of Python, not a buffer: a buffer would be rounded by `.half()`. With
        # frequencies in bfloat16, the angles at position 1,000 are off by whole turns.
        self.frequencies: tuple[float, ...] = tuple(frequencies.tolist())
        self.pairing = pairing
        self.attention_factor = attention_factor

    def forward(
        self,
        *,
        query: Tensor,  # [q_len, batch_size, d_model]
        key: Tensor,  # [k_len, batch_size, d_model]
        value: Tensor,  # [k_len, batch_size, d_model]
        mask: Tensor | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        r"""As the `forward` of the core; positions can be given.

        Positions are `[q_len, batch_size or 1]` and `[k_len, batch_size or 1]`, of an
        integer dtype, float32 or float64. By default the keys have positions 0 to
        `k_len - 1`, and **the queries those of the last keys**: that is what decoding
        needs, where few queries meet the keys of all earlier tokens.

        Only distances matter within a sequence, so padding on the left and packed
        documents need no positions of their own where a mask hides the rest. Positions
        are needed where tokens between the keys are missing, such as keys that were
        evicted.

        Raises what the core raises, the same for positions, and `ValueError` for more
        queries than keys if `key_positions` are given alone.

        The last two of five tokens attend to all of them. The third sequence is padded
        on the left:

        >>> mha = RotaryAttention(heads=7, d_model=84).eval()
        >>> x = torch.randn(5, 3, 84)
        >>> mask = torch.ones(5, 5, 3).bool()
        >>> mask[:, :2, 2] = False
        >>> y = mha(query=x, key=x, value=x, mask=mask)
        >>> last = mha(query=x[3:], key=x, value=x, mask=mask[3:])
        >>> torch.allclose(last, y[3:], atol=1e-6)
        True
        >>> x = x[2:, 2:]
        >>> alone = mha(query=x, key=x, value=x)
        >>> torch.allclose(alone, y[2:, 2:], atol=1e-6)
        True
        """
        # Every line is one of the core, but for the two that mention positions.
        check_weight(self, "output")
        check_inputs(self.output.weight, query, key, value)
        positions = prepare_positions(
            query, key, query_positions, key_positions
        )  # [q_len, ...], [k_len, ...]
        if mask is not None:
            check_tensor("mask", mask, query.device)
            shapes = query.shape, key.shape
            mask = self.prepare_mask(mask, *shapes)  # [q_len, k_len, batch_size, 1]
            hidden = ~mask.any(dim=(0, 3)).unsqueeze(-1)  # [k_len, batch_size, 1]
            key = key.masked_fill(hidden, 0)
            value = value.masked_fill(hidden, 0)
        query = self.query(query) * self.scale  # [q_len, batch_size, heads, d_k]
        key = self.key(key)  # [k_len, batch_size, heads, d_k]
        value = self.value(value)  # [k_len, batch_size, heads, d_k]
        scores = self.get_scores(
            query, key, *positions
        )  # [q_len, k_len, batch_size, heads]
        attn = self.get_weights(scores, mask)  # [q_len, k_len, batch_size, heads]
        if not torch.compiler.is_exporting():
            self.attn = attn.detach()
        attn = self.dropout(attn)
        context = self.apply_weights(attn, value)  # [q_len, batch_size, heads, d_k]
        output: Tensor = self.output(context.flatten(-2))  # [q_len, ..., d_model]
        return output

    def get_scores(
        self,
        query: Tensor,  # [q_len, batch_size, heads, d_k]
        key: Tensor,  # [k_len, batch_size, heads, d_k]
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        r"""The dot product of each rotated query with each rotated key.

        $$S_{ijbh} = \operatorname{rotate}(Q_{ibh}, i) \cdot
          \operatorname{rotate}(K_{jbh}, j)$$

        A rotation does not change a length, so the scale remains right.

        >>> mha = RotaryAttention(heads=5, d_model=20)
        >>> query = torch.randn(3, 2, 5, 4)
        >>> mha.get_scores(query, torch.randn(7, 2, 5, 4)).shape
        torch.Size([3, 7, 2, 5])
        """
        positions = prepare_positions(query, key, query_positions, key_positions)
        # The angles are computed in float64, and not rounded with the module.
        query, key = (
            rotate(
                x,
                rotary_angles(position, torch.tensor(self.frequencies, **FLOAT64)),
                pairing=self.pairing,
                attention_factor=self.attention_factor,
            )
            for x, position in zip((query, key), positions, strict=True)
        )
        scores = super().get_scores(query, key)
        return scores  # [q_len, k_len, batch_size, heads]


def rotary_angles(
    positions: Tensor,
    frequencies: Tensor,  # [pairs]
) -> Tensor:
    r"""The angle of each pair at each position, $t\,\theta_i$: `[..., pairs]`.

    Angles are float64 (float32 on Apple's GPUs, which have no float64), whatever the
    dtype of a model: float32 is off by 0.004 at position 100,000, and bfloat16, with 8
    significant bits, cannot tell position 257 from 256.

    Raises `TypeError` for positions in half precision, `ValueError` for `frequencies`
    of another shape. Source: Su et al. 2021, equation 15.

    >>> rotary_angles(torch.tensor([0, 1, 10]), torch.tensor([1.0, 0.5]))
    tensor([[ 0.0000,  0.0000],
            [ 1.0000,  0.5000],
            [10.0000,  5.0000]], dtype=torch.float64)
    """
    check_tensor("positions", positions)
    check_position_dtype("positions", positions)
    check_frequencies(frequencies)
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    frequencies = frequencies.to(positions.device, wide)
    angles = positions.to(wide).unsqueeze(-1) * frequencies  # [..., pairs]
    return angles  # [..., pairs]


def rotate(
    x: Tensor,  # [seq_len, batch_size, heads, d_k]
    angles: Tensor,  # [seq_len, ..., pairs]
    *,
    pairing: str = "halves",
    attention_factor: float = 1.0,
) -> Tensor:
    r"""Rotate each pair of components by its angle; shape and dtype stay the same.

    `angles` is `[seq_len, batch_size or 1, pairs]`. The first `2 * pairs` components
    are rotated, the others are returned as they are.

    Raises `TypeError` for a wrong dtype, `ValueError` for shapes or devices that do not
    fit, or an unknown `pairing`. Source: Su et al. 2021, equation 34, for neighbors.

    A quarter turn, $\theta = \pi / 2$, takes $(1, 0)$ to $(0, 1)$. With `d_k = 4` the
    pairs are components 0 and 2, 1 and 3, or else 0 and 1, 2 and 3:

    >>> x = torch.tensor([1.0, 2, 0, 0]).view(1, 1, 1, 4)
    >>> turn = torch.full((1, 1, 2), math.pi / 2)
    >>> rotate(x, turn).flatten().round().tolist() == [0, 0, 1, 2]
    True
    >>> neighbors = rotate(x, turn, pairing="neighbors")
    >>> neighbors.flatten().round().tolist() == [-2, 1, 0, 0]
    True

    Four pairs are the first 8 of 11 components; the other three stay as they are:

    >>> x = torch.randn(3, 2, 5, 11)
    >>> torch.equal(rotate(x, torch.ones(3, 1, 4))[..., 8:], x[..., 8:])
    True
    """
    check_rotation(x, angles)
    check_pairing(pairing)
    check_factor("attention_factor", attention_factor, 0)
    pairs = angles.shape[-1]

    # The rotation is done in float32 at least, and rounded once.
    wide = torch.promote_types(x.dtype, torch.float32)
    cos = (angles.cos() * attention_factor).to(wide)  # [seq_len, ..., pairs]
    sin = (angles.sin() * attention_factor).to(wide)  # [seq_len, ..., pairs]
    # All heads share them.
    cos = cos.unsqueeze(-2)  # [seq_len, ..., 1, pairs]
    sin = sin.unsqueeze(-2)  # [seq_len, ..., 1, pairs]

    # The only difference of the two pairings: which of two axes numbers the pairs.
    halves = pairing == "halves"
    axis, shape = (-2, (2, pairs)) if halves else (-1, (pairs, 2))
    whole = 2 * pairs == x.shape[-1]
    rotated = x if whole else x[..., : 2 * pairs]  # [..., heads, 2 * pairs]
    rotated = rotated.to(wide)
    x1, x2 = rotated.view(*x.shape[:-1], *shape).unbind(
        axis
    )  # [seq_len, batch_size, heads, pairs]
    # $x_1 \cos - x_2 \sin$ and $x_1 \sin + x_2 \cos$, each in two passes.
    both = [
        torch.addcmul(x1 * cos, x2, sin, value=-1),
        torch.addcmul(x1 * sin, x2, cos),
    ]
    rotated = torch.stack(both, dim=axis).flatten(-2)  # [..., heads, 2 * pairs]
    rotated = rotated.to(x.dtype)
    if whole:
        return rotated  # nothing to copy, forward or backward
    return torch.cat([rotated, x[..., 2 * pairs :]], dim=-1)  # [..., heads, d_k]


def convert_pairing(
    weight: Tensor, heads: int, *, to: str, rotary_dim: int | None = None
) -> Tensor:
    r"""Permute the rows of a query or key projection for the other pairing.

    `weight` is the weight `[heads * d_k, d_model]` or bias `[heads * d_k]` of a
    projection that was trained with the other pairing than `to`. A permutation of the
    components of queries and keys alike changes no score, so one pairing is as good as
    the other, but weights fit one only. `rotary_dim` is the number of components of a
    head that are rotated, all by default.

    Raises `ValueError` for sizes that do not fit.

    Two heads of 6 components, of which 4 are rotated:

    >>> bias = torch.arange(12)
    >>> convert_pairing(bias, heads=2, to="neighbors", rotary_dim=4)
    tensor([ 0,  2,  1,  3,  4,  5,  6,  8,  7,  9, 10, 11])

    The same model, stored for the other pairing:

    >>> mha = RotaryAttention(5, 40, pairing="halves").eval()
    >>> twin = RotaryAttention(5, 40, pairing="neighbors").eval()
    >>> state = mha.state_dict()
    >>> for name in state:
    ...     if name.startswith(("query", "key")):
    ...         state[name] = convert_pairing(state[name], 5, to="neighbors")
    >>> _ = twin.load_state_dict(state)
    >>> x = torch.randn(3, 2, 40)
    >>> y, z = (m(query=x, key=x, value=x) for m in (mha, twin))
    >>> torch.allclose(y, z, atol=1e-6)
    True
    """
    check_pairing(to, "to")
    check_sizes(heads=heads)
    check_tensor("weight", weight)
    if not weight.dim() or weight.shape[0] % heads:
        raise ValueError(
            f"`weight` has shape {list(weight.shape)}, not [heads * d_k, ...] with "
            f"`heads` (={heads})"
        )
    d_k = weight.shape[0] // heads
    rotary_dim = d_k if rotary_dim is None else rotary_dim
    check_width("`rotary_dim`", rotary_dim)
    if rotary_dim > d_k:
        raise ValueError(f"`rotary_dim` (={rotary_dim}) must be at most d_k (={d_k})")
    # Numbers of rows: those of one head, then those of all, `d_k` further for each.
    pairs = rotary_dim // 2
    rows = torch.arange(len(weight), device=weight.device).view(
        heads, d_k
    )  # [heads, d_k]
    shape = (2, pairs) if to == "neighbors" else (pairs, 2)
    rotated = rows[:, :rotary_dim].view(heads, *shape).mT.flatten(1)  # [heads, ...]
    order = torch.cat([rotated, rows[:, rotary_dim:]], dim=1)  # [heads, d_k]
    return weight[order.flatten()]


# region Frequencies, and their scaling for longer sequences


def rotary_frequencies(rotary_dim: int, *, base: float = 10_000.0) -> Tensor:
    r"""The angle per position of each pair, $b^{-2i/d}$: `[rotary_dim / 2]`, float64.

    The first pair rotates fastest, once in $2\pi$ positions. A larger `base` slows down
    the others; Llama 3 has 500,000. Raises `ValueError` for an odd `rotary_dim`, or a
    base below 1. Source: Su et al. 2021, section 3.2.2.

    >>> rotary_frequencies(8)
    tensor([1.0000, 0.1000, 0.0100, 0.0010], dtype=torch.float64)
    """
    check_width("`rotary_dim`", rotary_dim)
    check_factor("base", base)
    exponents = torch.arange(0, rotary_dim, 2, **FLOAT64)  # [rotary_dim // 2]
    frequencies = base ** -(exponents / rotary_dim)  # [rotary_dim // 2]
    return frequencies  # [rotary_dim // 2]


def linear_scaling(frequencies: Tensor, factor: float) -> Tensor:
    r"""Position interpolation: all frequencies are divided by `factor`.

    A text that is `factor` times as long as those of the training then has the angles
    of the training, but neighbors are closer together; the model must be trained
    further. Raises `ValueError` for a factor below 1. Source: [Extending Context
    Window](https://arxiv.org/abs/2306.15595), Chen et al. 2023, section 2.3.

    >>> linear_scaling(rotary_frequencies(8), factor=2)
    tensor([0.5000, 0.0500, 0.0050, 0.0005], dtype=torch.float64)
    """
    check_frequencies(frequencies)
    check_factor("factor", factor)
    return frequencies / factor


def ntk_scaling(frequencies: Tensor, factor: float) -> Tensor:
    r"""NTK-aware scaling: the base is increased, $b' = b \cdot s^{d/(d-2)}$.

    The last pair is slowed down by the whole `factor` $s$, as in linear scaling, the
    first not at all, and pair $i$ of $n$ by $s^{i/(n-1)}$. So neighbors stay apart.
    With `factor = s * seq_len / trained_length - (s - 1)` it is the *dynamic* scaling
    of `transformers`. Raises `ValueError` for a factor below 1.
    Source: [YaRN](https://arxiv.org/abs/2309.00071), Peng et al. 2023, section 3.1.

    >>> ntk_scaling(rotary_frequencies(8), factor=8) * 8
    tensor([8.0000e+00, 4.0000e-01, 2.0000e-02, 1.0000e-03], dtype=torch.float64)
    """
    check_frequencies(frequencies)
    check_factor("factor", factor)
    last = max(len(frequencies) - 1, 1)
    index = torch.arange(
        len(frequencies), dtype=torch.float64, device=frequencies.device
    )
    return frequencies * factor ** -(index / last)


def yarn_scaling(
    frequencies: Tensor,
    factor: float,
    trained_length: int,
    *,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> Tensor:
    r"""YaRN: fast pairs keep their frequency, slow pairs are divided by `factor`.

    A pair that makes more than `beta_fast` turns within the `trained_length` has shown
    all of its angles in the training and is not changed; one that makes fewer than
    `beta_slow` is interpolated linearly; between them the share of both is a ramp.
    `frequencies` are those of `rotary_frequencies`, two at least. YaRN also wants
    `attention_factor=yarn_attention_factor(factor)`.

    The ramp is linear in the number of the pair, and begins and ends at whole numbers
    (`truncate`), as in the code of the paper and in all models but gpt-oss, which does
    not truncate. In equation 13 of the paper it is linear in the number of turns: that
    is `llama3_scaling` with `low=1, high=32`.

    Raises `ValueError` for settings out of range.
    Source: Peng et al. 2023, section 3.2.

    >>> old = rotary_frequencies(64)
    >>> new = yarn_scaling(old, factor=4, trained_length=2048)
    >>> (old / new)[[0, 8, 12, 16, 31]]
    tensor([1.0000, 1.0000, 1.3000, 1.8571, 4.0000], dtype=torch.float64)
    """
    check_frequencies(frequencies)
    check_factor("factor", factor)
    check_sizes(trained_length=trained_length)
    check_factor("beta_slow", beta_slow)
    check_factor("beta_fast", beta_fast, beta_slow)
    first, second = [*frequencies[:2].tolist(), 0, 0][:2]
    if not 0 < second < first < math.inf:
        raise ValueError("`frequencies` must fall, from two up; scale them once only")
    # Frequencies are a geometric series, so their logarithm finds the pair that makes
    # so many turns.
    wanted = (2 * math.pi * beta / trained_length for beta in (beta_fast, beta_slow))
    low, high = (math.log(f / first) / math.log(second / first) for f in wanted)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    index = torch.arange(len(frequencies), **FLOAT64)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)  # [pairs]
    return frequencies * (1 - ramp) + frequencies / factor * ramp  # [pairs]


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    r"""YaRN's factor of queries and keys, $0.1\, m \ln s + 1$.

    More keys make a softmax flatter; a score that is larger by the square of this
    factor makes up for it. DeepSeek-V2 has an `mscale` $m$ of its own. Raises
    `ValueError` for a factor below 1. Source: Peng et al. 2023, equation 15.

    >>> round(yarn_attention_factor(4), 4)
    1.1386
    """
    check_factor("factor", factor)
    check_factor("mscale", mscale, 0)
    return 0.1 * mscale * math.log(factor) + 1


def llama3_scaling(
    frequencies: Tensor,
    factor: float,
    trained_length: int,
    *,
    low: float = 1,
    high: float = 4,
) -> Tensor:
    r"""Scaling as in Llama 3.1: a ramp over the number of turns in the trained length.

    A pair that makes more than `high` turns is not changed, one that makes fewer than
    `low` is divided by `factor`. In the configurations of the models these are
    `high_freq_factor` and `low_freq_factor`.

    Raises `ValueError` for settings out of range. Source: the code of [Llama
    3.1](https://github.com/meta-llama/llama-models), `apply_scaling`.

    >>> old = rotary_frequencies(128, base=500_000)
    >>> new = llama3_scaling(old, factor=8, trained_length=8192)
    >>> (old / new)[[0, 28, 32, 35]]
    tensor([1.0000, 1.0000, 2.6945, 8.0000], dtype=torch.float64)
    """
    check_frequencies(frequencies)
    check_factor("factor", factor)
    check_sizes(trained_length=trained_length)
    check_factor("low", low, 0)
    check_factor("high", high, low)
    turns = trained_length * frequencies / (2 * math.pi)  # [pairs]
    share = ((turns - low) / max(high - low, 1e-9)).clamp(0, 1)  # [pairs]
    return frequencies * share + frequencies / factor * (1 - share)  # [pairs]


# endregion
# region Input checks


def prepare_positions(
    query: Tensor,  # [q_len, batch_size, ...]
    key: Tensor,  # [k_len, batch_size, ...]
    query_positions: Tensor | None,
    key_positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Validate positions, and number the tokens where they are not given."""
    given = {"query": (query, query_positions), "key": (key, key_positions)}
    for name, (x, positions) in given.items():
        if positions is None:
            continue
        name = f"{name}_positions"
        check_tensor(name, positions, x.device)
        check_position_dtype(name, positions)
        length, batch_size = x.shape[:2]
        if tuple(positions.shape) not in ((length, 1), (length, batch_size)):
            raise ValueError(
                f"`{name}` has shape {list(positions.shape)}, not [seq_len, batch_size "
                f"or 1] = [{length}, {batch_size} or 1]; positions that the batch "
                f"shares need `{name}.unsqueeze(1)`"
            )
    q_len, k_len = query.shape[0], key.shape[0]
    if query_positions is None:
        if key_positions is None:
            # Position `k_len - 1` is that of the last query, too.
            order = torch.arange(k_len - q_len, k_len, device=key.device)  # [q_len]
            query_positions = order.unsqueeze(1)  # [q_len, 1]
        elif q_len > k_len:
            raise ValueError(
                f"`key_positions` has {k_len} positions, fewer than the {q_len} "
                "queries; pass `query_positions` as well"
            )
        else:
            query_positions = key_positions[k_len - q_len :]
    if key_positions is None:
        order = torch.arange(k_len, device=key.device)  # [k_len]
        key_positions = order.unsqueeze(1)  # [k_len, 1]
    return query_positions, key_positions  # [q_len, ...], [k_len, ...]


def check_position_dtype(name: str, positions: Tensor) -> None:
    """Refuse bool and complex positions, and those that are too coarse to count."""
    integral = not (positions.is_floating_point() or positions.is_complex())
    if positions.dtype == torch.bool or not (
        integral or positions.dtype in (torch.float32, torch.float64)
    ):
        raise TypeError(
            f"`{name}` is {positions.dtype}; use integers, float32 or float64 "
            "(bfloat16 counts to 256 only)"
        )


def check_pairing(pairing: str, name: str = "pairing") -> None:
    """Refuse an unknown pairing."""
    if type(pairing) is not str or pairing not in PAIRINGS:
        raise ValueError(f"`{name}` (={pairing!r}) must be 'halves' or 'neighbors'")


def check_width(name: str, width: int) -> None:
    """Refuse a number of components that cannot be paired."""
    if type(width) is not int or width < 2 or width % 2:
        raise ValueError(
            f"{name} (={width!r}) must be an even int from 2 up, as components are "
            "rotated in pairs"
        )


def check_factor(name: str, factor: float, minimum: float = 1) -> None:
    """Refuse what is not a finite number from `minimum` up."""
    if type(factor) not in (int, float) or not minimum <= factor < math.inf:
        raise ValueError(
            f"`{name}` (={factor!r}) must be a finite number from {minimum} up"
        )


def check_frequencies(frequencies: Tensor, d_k: int | None = None) -> None:
    """Refuse what are not the frequencies of some pairs of components."""
    check_tensor("frequencies", frequencies)
    if frequencies.is_meta:
        raise ValueError("`frequencies` is on meta, where there are no values")
    if frequencies.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"`frequencies` is {frequencies.dtype}, not float32 or float64")
    if frequencies.dim() != 1:
        raise ValueError(
            f"`frequencies` has shape {list(frequencies.shape)}, not [pairs]; see "
            "`rotary_frequencies`"
        )
    if d_k is not None and 2 * len(frequencies) > d_k:
        raise ValueError(
            f"`frequencies` has {len(frequencies)} pairs, more than fit into a head of "
            f"d_k (={d_k}) components; `rotary_frequencies({d_k})` would do"
        )


def check_rotation(x: Tensor, angles: Tensor) -> None:
    """Refuse tensors that do not fit one another."""
    check_tensor("x", x)
    check_tensor("angles", angles, x.device, owner="`x`")
    for name, tensor in (("x", x), ("angles", angles)):
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise TypeError(f"`{name}` is {tensor.dtype}, not a floating-point tensor")
    seen = f"`x` has shape {list(x.shape)}, `angles` {list(angles.shape)}"
    if x.dim() != 4 or angles.dim() != 3:
        raise ValueError(
            f"{seen}, not [seq_len, batch_size, heads, d_k] and [seq_len, batch_size "
            "or 1, pairs]"
        )
    (length, batch_size, _, d_k), pairs = x.shape, angles.shape[-1]
    fits = tuple(angles.shape[:2]) in ((length, 1), (length, batch_size))
    if not fits or 2 * pairs > d_k:
        raise ValueError(
            f"{seen}, not [{length}, {batch_size} or 1, at most {d_k // 2}]; "
            "make them with `rotary_angles(positions, frequencies)`"
        )


# endregion
