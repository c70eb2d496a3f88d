"""Printed numbers: all that can be recomputed come out, from our own classes.

`data/expected.json` holds what two published walk-throughs print: 001, which builds
self-attention in stages, and 003, an article without seeds. `blocks` come out in every
digit; what is `not_reproducible` must at least agree with itself.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headnotes import masks, mha
from headnotes.implementations import batch_first, causal, stages, valid_lens
from headnotes.positions import Embeddings, PositionalEncoding

FILE = Path(__file__).parent / "data" / "expected.json"
EXPECTED = json.loads(FILE.read_text(encoding="utf-8"))
BLOCKS = EXPECTED["blocks"]
UNSEEDED = EXPECTED["not_reproducible"]

GIVEN = ["001.a", "001.inputs"]  # written by hand in the source
COMPUTED = sorted(BLOCKS.keys() - GIVEN)
DROPPED = ["001.dropout_ones", "001.dropout_weights"]
# The article's steps, in its order: each follows from those before it.
ARTICLE = ["X", "Wq", "Q", "Q_view", "Q_permute", "Q_first", "A", "output"]
ANOTHER_DRAW = "class_output"  # of other weights, from another input

# The article's vocabulary has 24 words; these are its three sentences.
SENTENCES = [[11, 23, 21, 22, 5, 15], [20, 13, 0, 3, 7, 17], [10, 21, 13, 0, 3, 18]]


def read(numbers: Any) -> Tensor:
    """A tensor of what the file holds, where minus infinity is a string."""
    if isinstance(numbers, list):
        return torch.stack([read(number) for number in numbers])
    return torch.tensor(float(numbers), dtype=torch.float64)


def printed(key: str) -> Tensor:
    return read((BLOCKS | UNSEEDED)[key]["printed"])


class Softmaxes(TorchFunctionMode):
    """Keeps the scores that go into each softmax, and the weights that come out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "softmax":
            self.seen.append((args[0], result))
        return result


def look_inside(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of a head, as the softmax meets them, its weights, and its output."""
    with Softmaxes() as softmaxes:
        output = module(x)
    [(scores, weights)] = softmaxes.seen
    return scores, weights, output


def built(seed: int, kind: type[nn.Module], *settings: Any) -> nn.Module:
    """A module as the source draws it: always on the CPU, whose generator it used."""
    torch.manual_seed(seed)
    return kind(*settings)


@functools.cache
def recomputed(device: torch.device) -> dict[str, Tensor]:
    """All blocks that are not given, each from a class of ours, by its name."""
    inputs = printed("001.inputs").float().to(device)
    batch = torch.stack((inputs, inputs))
    is_past = masks.causal(6, device=device).squeeze(-1)

    # Attention without weights is the first stage with identity matrices, once the
    # query makes up for the division by the root of its width.
    bare = stages.SelfAttention_v1(3, 3)
    with torch.no_grad():
        for matrix in bare.parameters():
            matrix.copy_(torch.eye(3))
        bare.W_query.mul_(math.sqrt(3))
    scores, weights, context = look_inside(bare.to(device), inputs)
    found = {"scores_all": scores, "weights_all": weights, "context_all": context}
    found["scores_2"], found["weights_2"] = scores[1], weights[1]
    found["context_2"] = context[1]
    found["scores_2_sum"] = scores[1].sum(0, keepdim=True)
    found["weights_2_sumnorm"] = scores[1] / scores[1].sum()

    v1 = built(123, stages.SelfAttention_v1, 3, 2).to(device)
    found["v1_out"] = v1(inputs)
    found |= {f"v1_{name}": matrix for name, matrix in v1.named_parameters()}

    v2 = built(789, stages.SelfAttention_v2, 3, 2).to(device)
    _, found["v2_weights"], found["v2_out"] = look_inside(v2, inputs)
    for name in ("W_query", "W_key", "W_value"):
        found[f"v2_{name}"] = v2.get_submodule(name).weight

    # Two ways to look only backwards. The second is the third stage, given the weights
    # of the second stage; its printed context has the values of the first, though.
    found["mask_simple"] = is_past.float()
    found["masked_simple"] = found["v2_weights"] * is_past
    row_sums = found["masked_simple"].sum(-1, keepdim=True)
    found["masked_simple_norm"] = found["masked_simple"] / row_sums
    backwards = stages.CausalAttention(3, 2, 6, 0.0).to(device)
    backwards.load_state_dict(v2.state_dict())
    inside = look_inside(backwards, inputs[None])
    names = ("masked_scores", "weights_masked", "context_masked_v2_values")
    found |= {name: x.squeeze(0) for name, x in zip(names, inside, strict=True)}
    found["masked_scores"] *= math.sqrt(2)  # printed as they are before the division
    backwards.load_state_dict(v2.state_dict() | {"W_value.weight": v1.W_value.T})
    found["context_masked"] = backwards(inputs[None]).squeeze(0)

    single = built(123, stages.CausalAttention, 3, 2, 6, 0.0).to(device)
    found["causal_out"] = single(batch)
    wrapper = built(123, stages.MultiHeadAttentionWrapper, 3, 2, 6, 0.0, 2).to(device)
    found["wrapper_out"] = wrapper(batch)
    heads = built(123, causal.MultiHeadAttention, 3, 2, 6, 0.0, 2).to(device)
    found["mha_out"] = heads(batch)
    for name in ("W_query", "W_key", "W_value"):
        found[f"mha_{name}"] = heads.get_submodule(name).weight
    found["mha_out_weight"] = heads.out_proj.weight
    found["mha_out_bias"] = heads.out_proj.bias

    # Heads need no loop: the scores of our core, brought to the order of the source.
    a = printed("001.a").float().to(device).permute(2, 0, 1, 3)
    products = mha.MultiHeadAttention(heads=2, d_model=8).get_scores(a, a)
    found["a_aT"] = products.permute(2, 3, 0, 1)
    found["a_first_head"], found["a_second_head"] = found["a_aT"][0]
    return {f"001.{name}": x.detach() for name, x in found.items()}


@pytest.mark.parametrize("key", COMPUTED)
def test_every_number_comes_out(key: str, device: torch.device) -> None:
    block, found = BLOCKS[key], recomputed(device)[key]
    assert list(found.shape) == block["shape"]
    exact = read(block["computed_float32"]).float().to(device)
    torch.testing.assert_close(found, exact, rtol=0, atol=2e-6)
    # Each value is at least eight units of its last place away from where rounding
    # changes, so that no order of summation can change a digit.
    if "printed" in block:
        digits = found.cpu().double().round(decimals=block["decimals"])
        torch.testing.assert_close(digits, printed(key), rtol=0, atol=1e-9)


def test_no_block_of_the_file_is_left_out() -> None:
    assert EXPECTED.keys() == {"_about", "blocks", "shapes", "not_reproducible"}
    assert recomputed(torch.device("cpu")).keys() == set(COMPUTED)
    assert len(COMPUTED) == 35
    article = [f"003.{step}" for step in (*ARTICLE, ANOTHER_DRAW)]
    assert UNSEEDED.keys() == {*DROPPED, *article}
    assert sum("printed" in block for block in BLOCKS.values()) == 20 + 1 + len(GIVEN)


def test_the_printed_shapes_come_out(device: torch.device) -> None:
    found: dict[str, dict[str, Tensor]] = {}
    ours = recomputed(device)
    inputs = printed("001.inputs")
    found["001.shapes"] = {"batch": torch.stack((inputs, inputs))} | {
        name: ours[f"001.{name}_out"] for name in ("causal", "wrapper", "mha")
    }

    by_lengths = valid_lens.MultiHeadAttention(100, 5, 0.5).to(device)
    queries, keys = torch.ones(2, 4, 100).to(device), torch.ones(2, 6, 100).to(device)
    lens = torch.tensor([3, 2]).to(device)
    found["002.shapes"] = {"output": by_lengths(queries, keys, keys, lens)}

    tokens = torch.tensor(SENTENCES).T.to(device)
    positions = PositionalEncoding(8, 0.1).to(device)
    x = positions(Embeddings(24, 8).to(device)(tokens)).transpose(0, 1)
    output, _ = batch_first.MultiHeadAttention(8, 4, 0.1).to(device)(x, x, x)
    found["003.shapes"] = {"X": x, "output": output}

    shapes = {
        key: {name: list(x.shape) for name, x in group.items()}
        for key, group in found.items()
    }
    assert shapes == EXPECTED["shapes"]


def kept_by_mkl(size: int, p: float, seed: int) -> Tensor:
    """Whom dropout spares by the rule behind the print: MKL's generator MCG31.

    Its seed is the first number of torch's own, a Mersenne twister: the upper half of
    the first 64 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.empty(1, dtype=torch.int64).random_(
        -(2**63), None, generator=generator
    )
    m = 2**31 - 1
    x = (first.item() >> 32) % 2**32 % m or 1
    kept = []
    for _ in range(size):
        kept.append(x / m < 1 - p)
        x = 1132489760 * x % m
    return torch.tensor(kept)


def kept_by_twister(size: int, p: float, seed: int) -> Tensor:
    """Whom dropout spares by the other rule: the twister itself, 53 bits a number."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, dtype=torch.float64, generator=generator) < 1 - p


def test_the_printed_dropout_is_that_of_mkl() -> None:
    survivors = 2 * kept_by_mkl(36, 0.5, seed=123).reshape(6, 6)
    assert torch.equal(survivors, printed("001.dropout_ones").long())
    weights = recomputed(torch.device("cpu"))["001.weights_masked"]
    dropped = (survivors * weights).double().round(decimals=4)
    torch.testing.assert_close(
        dropped, printed("001.dropout_weights"), rtol=0, atol=1e-9
    )


def test_the_other_dropout_is_that_of_the_twister() -> None:
    survivors = 2 * kept_by_twister(36, 0.5, seed=123).reshape(6, 6)
    on_amd = read(UNSEEDED["001.dropout_ones"]["computed_on_amd"])
    assert torch.equal(survivors, on_amd.long())
    weights = recomputed(torch.device("cpu"))["001.weights_masked"]
    on_amd = read(UNSEEDED["001.dropout_weights"]["computed_on_amd"])
    torch.testing.assert_close(
        (survivors * weights).double(), on_amd, rtol=0, atol=2e-6
    )


def test_dropout_here_follows_one_of_the_two_rules() -> None:
    # Which, depends on the build of torch and on the processor, so no number may be
    # fixed. torch 2.13 follows the twister, on Intel too: MKL's rule was switched off
    # in pytorch#146174. On CUDA there is a third.
    rules = dict.fromkeys((kept_by_mkl, kept_by_twister), True)
    for seed, p in ((123, 0.5), (123, 0.1), (7, 0.3)):
        torch.manual_seed(seed)
        kept = nn.Dropout(p)(torch.ones(101)) > 0
        for rule in rules:
            rules[rule] &= torch.equal(kept, rule(101, p, seed))
    assert sorted(rules.values()) == [False, True]


def test_our_dropout_falls_where_that_of_torch_falls() -> None:
    inputs = printed("001.inputs").float()
    weights = recomputed(torch.device("cpu"))["001.weights_masked"]
    backwards = stages.CausalAttention(3, 2, 6, dropout=0.5)
    v2 = built(789, stages.SelfAttention_v2, 3, 2)
    backwards.load_state_dict(v2.state_dict())
    torch.manual_seed(123)
    context = backwards(inputs[None]).squeeze(0)
    torch.manual_seed(123)
    dropped = nn.Dropout(0.5)(weights)
    assert not torch.equal(dropped, weights)
    torch.testing.assert_close(context, dropped @ v2.W_value(inputs))


@pytest.mark.parametrize("key", sorted(UNSEEDED))
def test_unseeded_prints_have_their_shapes(key: str) -> None:
    assert list(printed(key).shape) == UNSEEDED[key]["shape"]


def test_the_article_splits_and_turns_its_queries() -> None:
    queries = printed("003.Q")
    view, permuted = printed("003.Q_view"), printed("003.Q_permute")
    assert torch.equal(view, queries.view(3, 6, 4, 2))
    assert torch.equal(permuted, view.permute(0, 2, 1, 3))
    assert torch.equal(printed("003.Q_first"), permuted[0])
    # Our batch-first class makes the same split of the same queries.
    split = batch_first.MultiHeadAttention(8, 4, 0.1).split(queries)
    assert torch.equal(split, permuted)


def test_the_article_projects_by_the_transpose_and_a_bias() -> None:
    x, weight, queries = (printed(f"003.{name}") for name in ("X", "Wq", "Q"))
    assert weight.abs().max() <= 1 / math.sqrt(8)

    # What is left of a column must be one number, the bias, give or take what rounding
    # can hide: half of a hundredth in each factor, and in the result.
    hidden = 0.005 * (1 + x.abs().sum(-1, keepdim=True) + weight.abs().sum(-1))
    left = queries - x @ weight.T
    low, high = (left - hidden).amax((0, 1)), (left + hidden).amin((0, 1))
    assert (low <= high).all()
    assert ((low + high) / 2).abs().max() <= 1 / math.sqrt(8)
    # The text speaks neither of the bias, which in some column cannot be zero, nor of
    # the transpose, without which nothing fits.
    assert (low * high > 0).any()
    left = queries - x @ weight
    assert ((left - hidden).amax((0, 1)) > (left + hidden).amin((0, 1))).all()


def test_the_article_dropped_nine_entries_out() -> None:
    x = printed("003.X")
    assert (x == 0).sum() == 9
    assert x.numel() == 144


def test_repeated_words_of_the_article_differ_by_their_positions() -> None:
    # The same word in two places has one embedding, so what differs is the positions,
    # each divided by 0.9, as dropout leaves it. Two roundings may hide a hundredth.
    x = printed("003.X")
    table = PositionalEncoding(8, 0.1).double().table
    places: dict[int, list[tuple[int, int]]] = {}
    for b, sentence in enumerate(SENTENCES):
        for t, word in enumerate(sentence):
            places.setdefault(word, []).append((b, t))
    repeated = [both for both in places.values() if len(both) == 2]
    assert len(repeated) == 4
    usable = 0
    for (b, t), (c, u) in repeated:
        alive = (x[b, t] != 0) & (x[c, u] != 0)
        usable += int(alive.sum())
        gap = (x[b, t] - x[c, u]) - (table[t] - table[u]) / 0.9
        assert gap[alive].abs().max() <= 0.01
    assert usable == 28


def test_the_output_of_the_article_is_affine_in_its_heads() -> None:
    heads, output = printed("003.A").flatten(0, 1), printed("003.output").flatten(0, 1)
    known = torch.cat((heads, torch.ones(18, 1)), dim=1)
    fit = torch.linalg.lstsq(known, output).solution
    assert (known @ fit - output).abs().max() < 0.0056
    assert fit.abs().max() <= 1 / math.sqrt(8)


def test_the_last_print_of_the_article_is_of_another_draw() -> None:
    # Other weights, another input: nothing printed leads to it, nor comes near.
    gap = (printed(f"003.{ANOTHER_DRAW}") - printed("003.output")).abs()
    assert gap.max() > 1
