"""Online softmax: exact, linear in memory, and right in the corners."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from attention_laws import check
from contract import BlockwiseAttention
from headnotes import masks
from headnotes.variants import online_softmax
from headnotes.variants.online_softmax import online_softmax_attention, running_softmax

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen; and no
# block divides the length that it cuts.
Q_LEN, K_LEN, BATCH, HEADS, D_K, D_V = 11, 17, 2, 3, 5, 7
BLOCKS = {"q_block": 4, "k_block": 6}
KINDS = ["none", "padding", "random", "empty", "causal", "causal and random"]


def inputs(
    q_len: int = Q_LEN,
    k_len: int = K_LEN,
    batch_size: int = BATCH,
    heads: int = HEADS,
    d_k: int = D_K,
    d_v: int = D_V,
    **options: Any,
) -> list[Tensor]:
    """Query, key and value, large enough for rows of attention to differ."""
    shapes = [(q_len, d_k), (k_len, d_k), (k_len, d_v)]
    return [2 * torch.randn(n, batch_size, heads, d, **options) for n, d in shapes]


def of_kind(
    kind: str, q_len: int, k_len: int, batch_size: int, device: Any = None
) -> dict[str, Any]:
    """A mask, and whether the future is hidden beside it."""
    causal = {"is_causal": kind.startswith("causal")}
    if kind in ("none", "causal"):
        return causal
    if kind == "padding":
        lens = torch.randint(0, k_len + 1, (batch_size,), device=device)
        return causal | {"mask": masks.padding(lens, k_len)}
    mask = torch.rand(q_len, k_len, batch_size, device=device) < 0.6
    if kind == "empty":
        mask[q_len // 2] = mask[:, :, -1:] = False
    return causal | {"mask": mask}


def allowed(options: dict[str, Any], q_len: int, k_len: int, batch_size: int) -> Tensor:
    """The options as one mask in full."""
    mask = torch.ones(q_len, k_len, batch_size).bool()
    if options.get("mask") is not None:
        mask = mask.to(options["mask"].device) & options["mask"]
    if options["is_causal"]:
        mask = mask & masks.causal(q_len, k_len, device=mask.device)
    return mask


def by_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's own; its rows without keys are zero as well."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    bias = mask.to(q.device).permute(2, 0, 1).unsqueeze(1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, bias).permute(2, 0, 1, 3)


def gradients(output: Tensor, xs: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.linspace(-2, 3, output.numel(), device=output.device)
    upstream = upstream.to(output.dtype).view_as(output)
    return torch.autograd.grad(output, xs, upstream)


# What it computes


def test_the_output_is_that_of_the_loops() -> None:
    query, key, value = inputs(7, 11, d_k=5, d_v=5, dtype=torch.float64)
    mask = torch.rand(7, 11, BATCH) < 0.5
    mask[3] = False
    eye = torch.eye(HEADS * 5).tolist()
    names = ("query", "key", "value", "output")
    expected, _ = oracle.attention(
        *(x.flatten(-2).tolist() for x in (query, key, value)),
        mask.tolist(),
        dict.fromkeys(names, (eye, None)),
        HEADS,
    )
    output = online_softmax_attention(query, key, value, mask, **BLOCKS)
    torch.testing.assert_close(
        output.flatten(-2),
        torch.tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=1e-13,
    )
    assert not output[3].any()


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_output_and_gradients_are_those_of_torch_for_all_sizes_and_blocks(
    data: st.DataObject,
) -> None:
    q_len, k_len = (data.draw(st.integers(1, 13), label=n) for n in ("q_len", "k_len"))
    names = ("batch_size", "heads", "d_k", "d_v", "q_block", "k_block")
    batch_size, heads, d_k, d_v, q_block, k_block = (
        data.draw(st.integers(1, 5), label=name) for name in names
    )
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    xs = inputs(q_len, k_len, batch_size, heads, d_k, d_v, dtype=torch.float64)
    kind = data.draw(st.sampled_from(KINDS), label="kind")
    options = of_kind(kind, q_len, k_len, batch_size)
    for x in xs:
        x.requires_grad_()
    output = online_softmax_attention(*xs, **options, q_block=q_block, k_block=k_block)
    expected = by_sdpa(*xs, allowed(options, q_len, k_len, batch_size))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    for got, wanted in zip(gradients(output, xs), gradients(expected, xs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("block_size", [1, 2, 5, 13, 14])
def test_the_running_softmax_is_the_softmax(
    device: torch.device, block_size: int
) -> None:
    scores = 9 * torch.randn(13, device=device, dtype=torch.float64).sort().values
    scores[::3] -= 5  # it grows with each block, and not within all of them
    largest, total = running_softmax(scores, block_size)
    assert largest.shape == total.shape == (-(-13 // block_size),)
    for n in range(len(total)):
        seen = scores[: (n + 1) * block_size]
        assert torch.equal(largest[n], seen.amax())
        torch.testing.assert_close(largest[n] + total[n].log(), seen.logsumexp(0))
    weights = (scores - largest[-1]).exp() / total[-1]
    torch.testing.assert_close(weights, scores.softmax(0))


def test_masked_scores_add_nothing_to_a_running_sum(device: torch.device) -> None:
    infinity = torch.inf
    scores = torch.tensor([-infinity, -infinity, 2.0, -infinity, 2.0], device=device)
    _, total = running_softmax(scores, 2)
    assert total.tolist() == [0, 1, 2]


def test_one_block_of_all_is_plain_softmax_attention(device: torch.device) -> None:
    query, key, value = inputs(device=device, dtype=torch.float64)
    scores = torch.einsum("ibhd,jbhd->ijbh", query / D_K**0.5, key)
    expected = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), value)
    for q_block, k_block in [(1, 1), (4, 6), (Q_LEN, K_LEN), (512, 1024)]:
        output = online_softmax_attention(
            query, key, value, q_block=q_block, k_block=k_block
        )
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_derivatives_are_those_of_finite_differences(
    device: torch.device, kind: str
) -> None:
    xs = inputs(5, 7, 2, 1, 2, 3, device=device, dtype=torch.float64)
    options = of_kind(kind, 5, 7, 2, device)

    def attend(*xs: Tensor) -> Tensor:
        return online_softmax_attention(*xs, **options, q_block=2, k_block=3)

    xs = [(x / 2).requires_grad_() for x in xs]
    assert torch.autograd.gradcheck(attend, xs)
    # The fast mode compares a random projection: all entries would take ten times
    # as long.
    assert torch.autograd.gradgradcheck(attend, xs, fast_mode=True)


# What may be read


@pytest.mark.parametrize(("q_len", "k_len"), [(11, 11), (7, 11), (11, 7)])
def test_future_keys_cannot_leak(device: torch.device, q_len: int, k_len: int) -> None:
    query, key, value = inputs(q_len, k_len, device=device)
    options: dict[str, Any] = {"is_causal": True, **BLOCKS}
    before = online_softmax_attention(query, key, value, **options)
    for j in range(k_len):
        changed = [x.clone() for x in (key, value)]
        for x in changed:
            x[j] += 1
        after = online_softmax_attention(query, *changed, **options)
        same = (after == before).all(dim=(1, 2, 3)).tolist()
        assert same == [j > i + k_len - q_len for i in range(q_len)]


@pytest.mark.parametrize("kind", ["padding", "causal and random"])
def test_nan_that_no_query_may_read_stays_where_it_is(
    device: torch.device, kind: str
) -> None:
    xs = inputs(device=device)
    options = of_kind(kind, Q_LEN, K_LEN, BATCH, device)
    if "mask" in options and options["mask"].shape[0] > 1:
        # Those that may read key 15 lie before it, and so may not.
        options["mask"][:, 15] = torch.arange(Q_LEN, device=device)[:, None] < 4
    may = allowed(options, Q_LEN, K_LEN, BATCH)
    unread = ~may.any(dim=0)[..., None, None].to(device)
    assert unread.any()
    expected = online_softmax_attention(*xs, **options, **BLOCKS)
    spoilt = [xs[0], *(x.masked_fill(unread, torch.nan) for x in xs[1:])]
    for x in spoilt:
        x.requires_grad_()
    output = online_softmax_attention(*spoilt, **options, **BLOCKS)
    assert torch.equal(output, expected)
    assert all(grad.isfinite().all() for grad in gradients(output, spoilt))


def test_a_key_that_is_nan_is_not_seen_by_those_before_it(device: torch.device) -> None:
    query, key, value = inputs(K_LEN, device=device)
    expected = online_softmax_attention(query, key, value, is_causal=True, **BLOCKS)
    key[9] = torch.nan
    output = online_softmax_attention(query, key, value, is_causal=True, **BLOCKS)
    assert torch.equal(output[:9], expected[:9])
    assert output[9:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_query_without_keys_reads_zero_and_its_gradients_are_finite(
    device: torch.device, dtype: torch.dtype
) -> None:
    xs = [x.requires_grad_() for x in inputs(device=device, dtype=dtype)]
    mask = torch.ones(Q_LEN, K_LEN, BATCH, device=device).bool()
    mask[5] = mask[:, :, 1] = False
    mask[2, :13] = False  # its first blocks are empty, and the last is not
    output = online_softmax_attention(*xs, mask, **BLOCKS)
    assert not output[5].any()
    assert not output[:, 1].any()
    assert output[2, 0].all()
    with torch.autograd.set_detect_anomaly(True):
        grads = gradients(output, xs)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][5].any()
    assert not any(grad[:, 1].any() for grad in grads)


def test_more_queries_than_keys_leave_the_first_without_any(
    device: torch.device,
) -> None:
    xs = [x.requires_grad_() for x in inputs(K_LEN, Q_LEN, device=device)]
    output = online_softmax_attention(*xs, is_causal=True, **BLOCKS)
    assert not output[: K_LEN - Q_LEN].any()
    assert output[K_LEN - Q_LEN :].all()
    assert all(grad.isfinite().all() for grad in gradients(output, xs))


# How large numbers become, and how small


def test_scores_of_any_size_make_no_nan(device: torch.device) -> None:
    for size in (1e4, 1e15):
        xs = [size * x for x in inputs(device=device)]
        xs = [x.requires_grad_() for x in (*xs[:2], xs[2] / size)]
        output = online_softmax_attention(*xs, **BLOCKS)
        assert output.isfinite().all()
        best = torch.einsum("ibhd,jbhd->ijbh", *xs[:2]).argmax(dim=1)
        places = best[..., None].expand(-1, -1, -1, D_V)
        torch.testing.assert_close(output, xs[2].gather(0, places), rtol=0, atol=1e-2)
        assert all(grad.isfinite().all() for grad in gradients(output, xs))


def test_scores_far_below_zero_are_as_good_as_others(device: torch.device) -> None:
    key = torch.linspace(1000, 1010, 7, device=device).view(7, 1, 1, 1)
    value = torch.randn(7, 1, 1, 3, device=device)
    output = online_softmax_attention(-torch.ones_like(key[:1]), key, value, **BLOCKS)
    expected = ((-key).softmax(dim=0) * value).sum(0, keepdim=True)
    torch.testing.assert_close(output, expected)
    _, total = running_softmax(-key.flatten(), 2)
    assert total[0] > 1


def test_a_row_whose_maximum_grows_with_each_block_keeps_what_it_read(
    device: torch.device,
) -> None:
    # Scores 0, 1, 2 ...: each block brings a new maximum. And the other way round.
    key = torch.arange(13.0, device=device).view(13, 1, 1, 1)
    value = torch.randn(13, 1, 1, 3, device=device)
    for sign in (1.0, -1.0):
        query = torch.full((1, 1, 1, 1), sign, device=device)
        output = online_softmax_attention(query, key, value, k_block=2)
        weights = (sign * key).softmax(dim=0)
        torch.testing.assert_close(output, (weights * value).sum(0, keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once_at_the_end(
    device: torch.device, dtype: torch.dtype
) -> None:
    xs = [x.requires_grad_() for x in inputs(61, 997, device=device, dtype=dtype)]
    wide = [x.detach().double().requires_grad_() for x in xs]
    mask = torch.ones(61, 997, BATCH, device=device).bool()
    output = online_softmax_attention(*xs, q_block=7, k_block=13)
    expected = by_sdpa(*wide, mask)
    assert output.dtype == dtype
    error = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(output.double(), expected, rtol=error, atol=1e-6)
    upstream = torch.randn_like(output)
    pairs = zip(
        torch.autograd.grad(output, xs, upstream),
        torch.autograd.grad(expected, wide, upstream.double()),
        strict=True,
    )
    for got, wanted in pairs:
        assert got.dtype == dtype
        # What is upstream of the last step was rounded once more, with the output.
        torch.testing.assert_close(got.double(), wanted, rtol=4 * error, atol=2e-2)


def test_float16_holds_scores_beyond_its_end(device: torch.device) -> None:
    # q · k is 64 · 300 · 300, or 720,000 over √64; float16 ends at 65,504.
    x = torch.full((5, 1, 1, 64), 300.0, device=device, dtype=torch.float16)
    output = online_softmax_attention(x, x, x, k_block=2)
    assert torch.equal(output, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_changes_nothing_here(
    device: torch.device, dtype: torch.dtype
) -> None:
    xs = [x.requires_grad_() for x in inputs(device=device, dtype=dtype)]
    expected = online_softmax_attention(*xs, **BLOCKS)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output = online_softmax_attention(*xs, **BLOCKS)
    assert torch.equal(output, expected)
    pairs = zip(gradients(output, xs), gradients(expected, xs), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in pairs)


# What it costs


class Sizes(TorchDispatchMode):
    """The number of elements of each tensor that is made, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.made.append((x.dtype, x.untyped_storage().nbytes() // x.itemsize))
        return result


def largest_made(length: int, *dtypes: torch.dtype, **options: Any) -> int:
    xs = [x.requires_grad_() for x in inputs(length, length, 1, 2, 3, 3)]
    with Sizes() as sizes:
        gradients(online_softmax_attention(*xs, **options, **BLOCKS), xs)
    return max(size for dtype, size in sizes.made if dtype in dtypes)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_of_a_training_step_grows_faster_than_the_length(
    is_causal: bool,
) -> None:
    for length in (37, 74):
        mask = torch.ones(1, length, 1).bool()
        for each in (None, mask):
            options = {"is_causal": is_causal, "mask": each}
            largest = largest_made(
                length, torch.float32, torch.bool, torch.int64, **options
            )
            assert largest <= length * 2 * 3  # as large as a query


def test_a_mask_is_never_made_larger_than_it_came() -> None:
    mask = torch.rand(37, 37, 1) < 0.7
    assert largest_made(37, torch.bool, mask=mask) == mask.numel()


def test_what_is_kept_for_the_way_back_is_linear() -> None:
    def kept(length: int) -> int:
        sizes = []

        def pack(x: Tensor) -> Tensor:
            sizes.append(x.untyped_storage().nbytes())
            return x

        xs = [x.requires_grad_() for x in inputs(length, length)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            online_softmax_attention(*xs, is_causal=True, **BLOCKS)
        return sum(sizes)

    assert kept(74) == 2 * kept(37)


def scores_computed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[int]:
    """How many scores a head has in forward, and how many in backward."""
    counts: list[int] = []
    block_scores = online_softmax.block_scores

    def counting(*arguments: Any) -> Tensor:
        scores = block_scores(*arguments)
        counts.append(scores.shape[-2] * scores.shape[-1])
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(online_softmax, "block_scores", counting)
        xs = [x.requires_grad_() for x in inputs(64, 64)]
        output = online_softmax_attention(*xs, q_block=8, k_block=16, **options)
        yield sum(counts)
        counts.clear()
        gradients(output, xs)
        yield sum(counts)


def test_blocks_of_the_future_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = scores_computed(monkeypatch)
    assert (forward, backward) == (64 * 64, 64 * 64)
    forward, backward = scores_computed(monkeypatch, is_causal=True)
    assert forward == 8 * 8 * sum(range(1, 9))  # only the triangle is cut by squares
    assert backward == forward


# What it works under


@pytest.mark.slow
def test_compiles_whole_and_gives_the_same(device: torch.device) -> None:
    torch.compiler.reset()
    fast = torch.compile(online_softmax_attention, backend="eager", fullgraph=True)
    xs = [x.requires_grad_() for x in inputs(device=device)]
    options = of_kind("causal and random", Q_LEN, K_LEN, BATCH, device)
    output = fast(*xs, **options, q_block=6, k_block=9)
    expected = online_softmax_attention(*xs, **options)
    torch.testing.assert_close(output, expected)
    pairs = zip(gradients(output, xs), gradients(expected, xs), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_functional_gradients_are_the_usual_ones(device: torch.device) -> None:
    query, key, value = inputs(device=device)

    def total(query: Tensor) -> Tensor:
        return online_softmax_attention(query, key, value, **BLOCKS).square().sum()

    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(query), expected)


@pytest.mark.parametrize(
    ("q_len", "k_len", "batch_size", "heads"),
    [(0, 7, 2, 3), (5, 0, 2, 3), (5, 7, 0, 3), (5, 7, 2, 0), (0, 0, 0, 0)],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_tensors_work(
    device: torch.device,
    q_len: int,
    k_len: int,
    batch_size: int,
    heads: int,
    is_causal: bool,
) -> None:
    xs = inputs(q_len, k_len, batch_size, heads, device=device)
    xs = [x.requires_grad_() for x in xs]
    mask = torch.ones(q_len, k_len, batch_size, device=device).bool()
    for each in (None, mask):
        output = online_softmax_attention(*xs, each, is_causal=is_causal)
        assert output.shape == (q_len, batch_size, heads, D_V)
        assert not output.any()
        assert not any(grad.any() for grad in gradients(output, xs))


def test_on_meta_it_knows_the_shape() -> None:
    xs = [x.requires_grad_() for x in inputs(device="meta")]
    mask = torch.ones(1, K_LEN, BATCH, device="meta").bool()
    output = online_softmax_attention(*xs, mask, is_causal=True, **BLOCKS)
    assert output.shape == (Q_LEN, BATCH, HEADS, D_V)
    output.sum().backward()
    assert [x.grad.shape for x in xs if x.grad is not None] == [x.shape for x in xs]


def test_inputs_are_left_alone(device: torch.device) -> None:
    # Sequence first, but not in memory; the value is one row that is shared by all.
    query, key, value = inputs(device=device)
    query, key = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key))
    value = value[:1].expand(K_LEN, -1, -1, -1)
    mask = torch.rand(Q_LEN, K_LEN, BATCH, device=device) < 0.6
    everything = [query, key, value, mask]
    before = [(x.clone(), x._version) for x in everything]
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = online_softmax_attention(*leaves, mask, **BLOCKS)
    upstream = torch.randn_like(output)
    kept = upstream.clone()
    output.backward(upstream)
    for x, (content, version) in zip(everything, before, strict=True):
        assert torch.equal(x, content)
        assert x._version == version
    assert torch.equal(upstream, kept)
    running_softmax(query[:, 0, 0, 0], 2)
    assert torch.equal(query, before[0][0])


@pytest.mark.slow
def test_all_laws_but_that_of_dropout_are_kept(device: torch.device) -> None:
    # There is no dropout, on purpose.
    skip = ("compiled", "dropout")
    report = check(BlockwiseAttention, device=device.type, skip=skip)
    assert report.ok, report
    assert len(report.passed) >= 15, report


# What it refuses

GOOD = dict(zip(("query", "key", "value"), inputs(), strict=True))
SHAPES = (
    "`query`, `key`, `value` have shapes {}, {}, {}, not [q_len, batch_size, heads, "
    "d_k] and [k_len, batch_size, heads, d_k or d_v]; split heads with "
    "`unflatten(-1, (heads, d_k))`"
)
SIZES = [11, 2, 3, 5], [17, 2, 3, 5], [17, 2, 3, 7]
MASK = (
    "`mask` has shape {}, not [q_len or 1, k_len, batch_size or 1] = [11 or 1, 17, 2 "
    "or 1]; a [q_len, k_len] mask needs `mask.unsqueeze(-1)` "
    "if True means 'may attend', `masks.from_mha(mask, heads)` if True hides"
)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"query": [[0.0]]}, TypeError, "`query` must be a tensor, but is a list"),
        ({"key": None}, TypeError, "`key` must be a tensor, but is a NoneType"),
        (
            {"value": GOOD["value"].to_sparse()},
            TypeError,
            "`value` is sparse, nested or quantized; pass a dense one",
        ),
        (
            {"query": GOOD["query"].long()},
            TypeError,
            "`query` is torch.int64; use `query.to(torch.float32)`",
        ),
        (
            {"key": GOOD["key"].half()},
            TypeError,
            "`key` is torch.float16; use `key.to(torch.float32)`",
        ),
        (
            {"value": GOOD["value"].to("meta")},
            ValueError,
            "`value` is on meta, `query` on cpu; use `value.to('cpu')`",
        ),
        (
            {"query": GOOD["query"].flatten(-2)},
            ValueError,
            SHAPES.format([11, 2, 15], *SIZES[1:]),
        ),
        (
            {"key": GOOD["key"][:, :1]},
            ValueError,
            SHAPES.format(SIZES[0], [17, 1, 3, 5], SIZES[2]),
        ),
        (
            {"value": GOOD["value"][:, :, :1]},
            ValueError,
            SHAPES.format(*SIZES[:2], [17, 2, 1, 7]),
        ),
        (
            {"value": GOOD["value"][:16]},
            ValueError,
            SHAPES.format(*SIZES[:2], [16, 2, 3, 7]),
        ),
        (
            {"query": GOOD["query"][..., :4]},
            ValueError,
            SHAPES.format([11, 2, 3, 4], *SIZES[1:]),
        ),
        (
            {"query": GOOD["query"][..., :0], "key": GOOD["key"][..., :0]},
            ValueError,
            SHAPES.format([11, 2, 3, 0], [17, 2, 3, 0], SIZES[2]),
        ),
        ({"mask": "causal"}, TypeError, "`mask` must be a tensor, but is a str"),
        (
            {"mask": torch.zeros(11, 17, 2)},
            TypeError,
            "`mask` is torch.float32, not bool with True for 'may attend'; use "
            "`mask.bool()` for 0 and 1, `mask == 0` for 0 and -inf",
        ),
        (
            {"mask": torch.ones(11, 17).bool()},
            ValueError,
            MASK.format([11, 17]),
        ),
        (
            {"mask": torch.ones(11, 1, 2).bool()},
            ValueError,
            MASK.format([11, 1, 2]),
        ),
        (
            {"mask": torch.ones(5, 17, 2).bool()},
            ValueError,
            MASK.format([5, 17, 2]),
        ),
        (
            {"mask": torch.ones(11, 17, 2, device="meta").bool()},
            ValueError,
            "`mask` is on meta, `query` on cpu; use `mask.to('cpu')`",
        ),
        (
            {"is_causal": 1},
            TypeError,
            "`is_causal` (=1) must be True or False",
        ),
        ({"q_block": 0}, ValueError, "`q_block` (=0) must be an int from 1 up"),
        ({"k_block": 2.0}, ValueError, "`k_block` (=2.0) must be an int from 1 up"),
    ],
)
def test_what_does_not_fit_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        online_softmax_attention(**GOOD | changed)


@pytest.mark.parametrize(
    ("scores", "block_size", "error", "message"),
    [
        (torch.ones(3), 0, ValueError, "`block_size` (=0) must be an int from 1 up"),
        (
            torch.ones(3).int(),
            1,
            TypeError,
            "`scores` is torch.int32; use `scores.to(torch.float32)`",
        ),
        (
            torch.ones(()),
            1,
            ValueError,
            "`scores` has shape [], not [k_len > 0]",
        ),
        (
            torch.ones(0),
            1,
            ValueError,
            "`scores` has shape [0], not [k_len > 0]",
        ),
        ([1.0], 1, TypeError, "`scores` must be a tensor, but is a list"),
    ],
    ids=["block", "integer", "scalar", "empty", "list"],
)
def test_a_row_that_cannot_be_read_is_refused(
    scores: Any, block_size: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        running_softmax(scores, block_size)
