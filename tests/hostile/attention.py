"""Attacks on every attention of the package; `oracle` knows the right answers."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import oracle
from headnotes import mha
from headnotes.implementations import batch_first, causal, stages, valid_lens
from headnotes.variants import online_softmax
from hostile.dice import FLOATS, Dice
from hostile.outcome import Call, Meaningless
from hostile.registry import attack

Weights = dict[str, tuple[Tensor, Tensor | None]]


def need(condition: bool, why: str) -> None:
    """What a sensible call has; without it there is no right answer."""
    if not condition:
        raise Meaningless(why)


def dense(x: Any, like: Tensor, axes: int) -> None:
    """`x` can be computed with: real numbers in memory, as those of the module."""
    need(isinstance(x, Tensor), "an argument is no tensor")
    need(x.layout == torch.strided and not x.is_nested, "a tensor is not dense")
    need(x.device == like.device, "devices differ")
    need(x.dtype == like.dtype, "dtypes differ")
    need(x.dim() == axes, f"a tensor has not {axes} axes")


def whole(x: Any, like: Tensor) -> None:
    """`x` holds whole numbers, or True and False."""
    need(isinstance(x, Tensor), "a mask, or lengths, are no tensor")
    need(x.layout == torch.strided and not x.is_nested, "a tensor is not dense")
    need(x.device == like.device, "devices differ")
    need(not x.is_floating_point() and not x.is_complex(), "they are not whole")
    need(not x.is_quantized, "they are quantised")


def item_order(index: Any, like: Tensor, batch_size: int) -> list[int]:
    """The batch items that `index` names, for the reordering of a cache."""
    whole(index, like)
    need(index.dtype in (torch.int32, torch.int64), "they are no integers")
    need(index.dim() == 1 and len(index) > 0, "it is no list of items")
    need(not index.is_meta, "there are no values")
    order: list[int] = index.tolist()
    need(all(0 <= n < batch_size for n in order), "there is no such item")
    return order


def allowed(mask: Tensor | None, full: tuple[int, ...]) -> Tensor:
    """A mask `[q_len or 1, k_len, batch_size or 1]` as bool, in full, on the CPU."""
    if mask is None:
        return torch.ones(full, dtype=torch.bool)
    need(mask.dim() == 3, "the mask has not three axes")
    need(mask.shape[1] == full[1], "the mask has not the length of the keys")
    need(all(n in (1, m) for n, m in zip(mask.shape, full, strict=True)), "mask shape")
    if mask.is_meta:
        return torch.ones(full, dtype=torch.bool)
    mask = mask.detach().cpu()
    if mask.dtype != torch.bool:
        values = set(mask.flatten().tolist())
        need(values <= {0, 1}, "the mask holds more than 0 and 1")
    return (mask != 0).expand(full)


def right(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    weights: Weights,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Output and weights by the oracle; everything lies sequence first."""
    need(query.shape[1] == key.shape[1] == value.shape[1], "batch sizes differ")
    need(len(key) == len(value), "keys and values differ in length")
    for name, x in (("query", query), ("key", key), ("value", value)):
        need(x.shape[-1] == weights[name][0].shape[1], "a width differs")
    full = (len(query), len(key), query.shape[1])
    may = allowed(mask, full)
    d_out = len(weights["output"][0])
    shapes = (full[0], full[2], d_out), (*full, heads)
    if query.is_meta:
        output, attn = (torch.empty(shape, device="meta") for shape in shapes)
        return output, attn
    lists: dict[str, Any] = {
        name: (listed(weight), None if bias is None else listed(bias))
        for name, (weight, bias) in weights.items()
    }
    xs = [listed(x) for x in (query, key, value)]
    output, attn = oracle.attention(*xs, may.tolist(), lists, heads)
    return nest(output, shapes[0]), nest(attn, shapes[1])


def listed(x: Tensor) -> Any:
    return x.detach().cpu().double().tolist()


def nest(rows: Any, shape: tuple[int, ...]) -> Tensor:
    """Lists as a tensor; they do not know the shape of what is empty."""
    return torch.tensor(rows, dtype=torch.float64).reshape(shape)


def compare(got: Any, expected: Tensor, like: Tensor) -> None:
    """The same shape, dtype, device; and the same values, wherever they are finite."""
    assert isinstance(got, Tensor), f"no tensor, but {got!r}"
    assert got.shape == expected.shape, f"{got.shape}, not {expected.shape}"
    assert got.dtype == like.dtype, f"{got.dtype}, not {like.dtype}"
    assert got.device == like.device, f"{got.device}, not {like.device}"
    if got.is_meta:
        return
    seen, expected = got.detach().cpu().double(), expected.cpu()
    finite = expected.isfinite()
    largest = float(expected[finite].abs().max()) if finite.any() else 0.0
    # A few roundings of each entry and of each step; TF32 is off.
    near = 60 * torch.finfo(like.dtype).eps * max(1.0, largest)
    apart = (seen - expected)[finite].abs()
    assert (apart <= near).all(), f"should be {expected.tolist()}"


def awake(dice: Dice, module: Any, *, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Any:
    """The module in some dtype, on the device, with weights that make rows differ."""
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(dice.floats(*parameter.shape).cpu() * 0.6)
    # On "meta" there is nothing but shapes: tensors from elsewhere are refused there.
    device = torch.device("meta") if dice.chance(8) else dice.device
    dice.device = device
    return module.to(device, dice.pick(dtypes)).train(not dice.chance(2))


def linear(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return layer.weight, layer.bias


def eye(width: int) -> tuple[Tensor, None]:
    return torch.eye(width, dtype=torch.float64), None


def sizes(dice: Dice) -> tuple[int, int, int]:
    """Lengths of queries and keys, and of the batch; each is 0 once in eight.

    Nothing is compared where one is 0, and with one key all weights are 1.
    """
    lengths = (3, 2, 4, 1, 2, 3, 4, 0)
    return dice.pick(lengths), dice.pick(lengths), dice.pick(lengths)


def inputs(dice: Dice, *shapes: tuple[int, ...], like: Tensor) -> list[Tensor]:
    """A tensor for each shape; where shapes agree, perhaps the same one."""
    made = [dice.floats(*shape, dtype=like.dtype) for shape in shapes]
    if len(set(shapes)) == 1 and dice.chance(3):
        made = made[:1] * len(shapes)
    return made


def call(
    dice: Dice,
    function: Callable[..., Any],
    given: dict[str, Any],
    judge: Callable[[Any], None],
    *words: str,
    **spoilers: Callable[[Any], Any],
) -> Call:
    """Spoil the arguments, and make a call of them."""
    dice.arguments(given, **spoilers)
    return Call(function, given, judge, dice.tame, dice.notes, words)


def odd_mask(dice: Dice) -> Callable[[Any], Any]:
    """What people take for a mask: additive, 0/1 in floats, inverted, or turned."""

    def spoil(mask: Any) -> Any:
        if not isinstance(mask, Tensor):
            return None
        wrongs: list[Callable[[], Tensor]] = [
            lambda: torch.zeros(mask.shape, device=mask.device),
            lambda: mask.float(),
            lambda: mask.int() * 2,
            lambda: -mask.int(),
            lambda: mask.transpose(0, -1) if mask.dim() else mask,
            lambda: mask[..., 0] if mask.dim() and mask.shape[-1] else mask,
            lambda: mask[:, :1] if mask.dim() > 1 else mask,
            lambda: torch.zeros_like(mask),
            lambda: torch.cat([mask, mask], dim=-1),
            lambda: torch.cat([mask, mask], dim=0),
        ]
        with torch.no_grad():
            wrong: Tensor = dice.pick(wrongs)()
            return wrong

    return spoil


def new_mask(dice: Dice, *full: int) -> Tensor | None:
    """No mask, or one in which some axes have size 1; all of it may be False."""
    if dice.chance(4):
        return None
    shape = [1 if axis != 1 and dice.chance(3) else n for axis, n in enumerate(full)]
    mask = dice.bools(*shape)
    whole_numbers = (torch.int64, torch.int32, torch.uint8, torch.int8)
    return mask.to(dice.pick(whole_numbers)) if dice.chance(3) else mask


# The core -------------------------------------------------------------------------


@attack("mha.PrepareForMultiHeadAttention.forward")
def prepare(dice: Dice) -> Call:
    d_model, heads, d_k = dice.roll(1, 4), dice.roll(1, 3), dice.roll(1, 3)
    made = mha.PrepareForMultiHeadAttention(d_model, heads, d_k, not dice.chance(2))
    module = awake(dice, made)
    weight, bias = linear(module.linear)
    given = {"x": dice.floats(*sizes(dice)[: dice.roll(0, 3)], d_model).to(weight)}

    def judge(result: Any) -> None:
        x = given["x"]
        dense(x, weight, x.dim() if isinstance(x, Tensor) else 0)
        need(x.dim() > 0 and x.shape[-1] == d_model, "it has another width")
        parts = [each.detach().double() for each in (x, weight)]
        expected = parts[0] @ parts[1].T
        expected = expected if bias is None else expected + bias.detach().double()
        expected = expected.reshape(*x.shape[:-1], heads, d_k)
        compare(result, expected if x.is_meta else expected.cpu(), weight)

    return call(dice, module, given, judge)


@attack("mha.MultiHeadAttention.forward")
def core(dice: Dice) -> Call:
    heads, d_k = dice.roll(1, 3), dice.roll(1, 3)
    made = mha.MultiHeadAttention(heads, heads * d_k, 0.0, bias=not dice.chance(2))
    module = awake(dice, made)
    weight = module.output.weight
    weights: Weights = {
        name: linear(getattr(module, name).linear) for name in ("query", "key", "value")
    }
    weights["output"] = linear(module.output)
    q_len, k_len, batch_size = sizes(dice)
    shapes = [(n, batch_size, heads * d_k) for n in (q_len, k_len, k_len)]
    xs = inputs(dice, *shapes, like=weight)
    given = dict(zip(("query", "key", "value"), xs, strict=True))
    given |= {"mask": new_mask(dice, q_len, k_len, batch_size)}

    def judge(result: Any) -> None:
        *xs, mask = given.values()
        for x in xs:
            dense(x, weight, 3)
        if mask is not None:
            whole(mask, weight)
        output, attn = right(*xs, mask, weights, heads)
        compare(result, output, weight)
        compare(module.attn, attn, weight)

    return call(dice, module, given, judge, mask=odd_mask(dice))


# Variants -------------------------------------------------------------------------


@attack("variants.online_softmax.running_softmax")
def running(dice: Dice) -> Call:
    k_len = dice.roll(0, 5)
    scores = dice.floats(k_len, dtype=dice.pick(FLOATS))
    given: dict[str, Any] = {"scores": scores, "block_size": dice.roll(1, 4)}
    dice.tame = k_len > 0  # nothing is not a row

    def judge(result: Any) -> None:
        scores, block_size = given.values()
        need(isinstance(scores, Tensor) and scores.dtype in FLOATS, "no floats")
        dense(scores, scores, 1)
        need(len(scores) > 0, "there is no score")
        need(type(block_size) is int and block_size > 0, "no size of a block")
        ends = [*range(block_size, len(scores), block_size), len(scores)]
        wide = scores.detach().double().cpu() if not scores.is_meta else scores.double()
        largest = torch.stack([wide[:n].amax() for n in ends])
        log_sum = torch.stack([wide[:n].logsumexp(0) for n in ends])
        compare(result[0], largest, scores)
        compare(result[1], (log_sum - largest).exp(), scores)

    return call(dice, online_softmax.running_softmax, given, judge)


@attack("variants.online_softmax.online_softmax_attention")
def in_blocks(dice: Dice) -> Call:
    if dice.chance(8):
        dice.device = torch.device("meta")
    heads, d_k, d_v = (dice.roll(1, 3) for _ in range(3))
    q_len, k_len, batch_size = sizes(dice)
    like = dice.floats(1, dtype=dice.pick(FLOATS))
    shapes = [(q_len, d_k), (k_len, d_k), (k_len, d_v)]
    xs = inputs(dice, *((n, batch_size, heads, d) for n, d in shapes), like=like)
    given: dict[str, Any] = dict(zip(("query", "key", "value"), xs, strict=True))
    mask = new_mask(dice, q_len, k_len, batch_size)
    given |= {"mask": mask if mask is None else mask.bool()}
    given |= {"is_causal": dice.chance(3)}
    given |= {name: dice.roll(1, 4) for name in ("q_block", "k_block")}

    def judge(result: Any) -> None:
        query, key, value, mask, is_causal, *blocks = given.values()
        need(isinstance(query, Tensor) and query.dtype in FLOATS, "no floats")
        for x in (query, key, value):
            dense(x, query, 4)
        need(query.shape[2] == key.shape[2] == value.shape[2], "heads differ")
        d_k, d_v = query.shape[-1], value.shape[-1]
        need(d_k == key.shape[-1] and d_k > 0, "widths differ, or there is none")
        need(type(is_causal) is bool, "no bool")
        need(all(type(n) is int and n > 0 for n in blocks), "no size of a block")
        full = (len(query), len(key), query.shape[1])
        if mask is not None:
            whole(mask, query)
            need(mask.dtype == torch.bool, "the mask is not bool")
        may = allowed(mask, full)
        if is_causal:
            may = may.permute(2, 0, 1).tril(full[1] - full[0]).permute(1, 2, 0)
        # The oracle has one width for all: the missing columns are zero. It divides by
        # the root of that width.
        heads, width = query.shape[2], max(d_k, d_v)
        xs = [
            nn.functional.pad(x, (0, width - x.shape[-1])).flatten(-2)
            for x in (query, key, value)
        ]
        weights: Weights = dict.fromkeys(
            ("query", "key", "value", "output"), eye(heads * width)
        )
        weights["query"] = (eye(heads * width)[0] * math.sqrt(width / d_k), None)
        output, _ = right(*xs, may.to(query.device), weights, heads)
        output = output.unflatten(-1, (heads, width))[..., :d_v]
        compare(result, output, query)

    function = online_softmax.online_softmax_attention
    return call(dice, function, given, judge, mask=odd_mask(dice))


# As others write it ---------------------------------------------------------------


@attack("implementations.batch_first.MultiHeadAttention.forward")
def batches(dice: Dice) -> Call:
    heads, d_k = dice.roll(1, 3), dice.roll(1, 3)
    module = awake(dice, batch_first.MultiHeadAttention(heads * d_k, heads, 0.0))
    weight = module.Wo.weight
    names = {"query": "Wq", "key": "Wk", "value": "Wv", "output": "Wo"}
    weights = {name: linear(getattr(module, own)) for name, own in names.items()}
    q_len, k_len, batch_size = sizes(dice)
    shapes = [(batch_size, n, heads * d_k) for n in (q_len, k_len, k_len)]
    xs = inputs(dice, *shapes, like=weight)
    given = dict(zip(("query", "key", "value"), xs, strict=True))
    mask = new_mask(dice, q_len, k_len, batch_size)
    if mask is not None:
        mask = mask.permute(2, 0, 1).unsqueeze(1)
        if mask.shape[:3] == (1, 1, q_len) and dice.chance(2):
            mask = mask[0, 0]
        elif dice.chance(3):
            mask = mask.expand(-1, heads, -1, -1)
    given |= {"mask": mask}

    def judge(result: Any) -> None:
        query, key, value, mask = given.values()
        for x in (query, key, value):
            dense(x, weight, 3)
        xs = [x.transpose(0, 1) for x in (query, key, value)]
        full = (query.shape[0], heads, query.shape[1], key.shape[1])
        if mask is not None:
            whole(mask, weight)
            need(mask.dim() in (2, 4), "a mask has two axes, or four")
            plain = mask.shape == full[2:] or mask.dim() == 4
            need(plain and mask.shape[-1] == full[3], "the mask does not fit")
            fits = zip(mask.shape, full[-mask.dim() :], strict=True)
            need(all(n in (1, m) for n, m in fits), "the mask does not fit")
            mask = mask.expand(full)
        output, attn = merged(xs, mask, weights, heads)
        compare(result[0], output.transpose(0, 1), weight)
        compare(result[1], attn.permute(2, 3, 0, 1), weight)

    return call(dice, module, given, judge, mask=odd_mask(dice))


def merged(
    xs: list[Tensor], mask: Tensor | None, weights: Weights, heads: int
) -> tuple[Tensor, Tensor]:
    """As `right`, with a mask for each head: `[batch_size, heads, q_len, k_len]`."""
    query, key, value = xs
    if mask is None or query.is_meta:
        return right(query, key, value, None, weights, heads)
    # The oracle has one mask for all heads. So ask it head by head, and add up: the
    # output is a sum over heads, as each has its own columns of the last weight.
    weight, bias = weights["output"]
    d_k = weight.shape[1] // heads
    outputs, attns = [], []
    for head in range(heads):
        only = torch.zeros_like(weight)
        rows = slice(head * d_k, (head + 1) * d_k)
        only[:, rows] = weight.detach()[:, rows]
        part: Weights = weights | {"output": (only, bias if not head else None)}
        each = mask[:, head].permute(1, 2, 0)
        output, attn = right(query, key, value, each, part, heads)
        outputs.append(output)
        attns.append(attn[..., head])
    return torch.stack(outputs).sum(0), torch.stack(attns, -1)


def in_bounds(lens: Tensor, q_len: int, k_len: int, batch_size: int) -> Tensor:
    """Lengths as a mask `[q_len, k_len, batch_size]`, on the CPU."""
    shapes = ((batch_size,), (batch_size, q_len))
    need(tuple(lens.shape) in shapes, "lengths have another shape")
    need(lens.dtype != torch.bool, "lengths are bool")
    if lens.is_meta:
        return torch.ones(q_len, k_len, batch_size, dtype=torch.bool)
    lens = lens.detach().cpu().long()
    need(bool(((lens >= 0) & (lens <= k_len)).all()), "a length is out of bounds")
    lens = lens.unsqueeze(1) if lens.dim() == 1 else lens
    lens = lens.expand(batch_size, q_len)
    return torch.arange(k_len)[:, None] < lens.T[:, None]


def new_lens(dice: Dice, q_len: int, k_len: int, batch_size: int) -> Tensor | None:
    if dice.chance(4):
        return None
    shape = (batch_size, q_len) if dice.chance(2) else (batch_size,)
    lens = dice.ints(0, k_len, *shape)
    return lens.to(dice.pick((torch.int64, torch.int32, torch.uint8)))


def odd_lens(dice: Dice, k_len: int) -> Callable[[Any], Any]:
    """Lengths by one too long, too short, negative, as floats, or as a mask."""

    def spoil(lens: Any) -> Any:
        if not isinstance(lens, Tensor):
            return None
        lens = lens.detach().long()
        long = lens.clamp(min=k_len) + 1
        return dice.pick((long, lens - 1, lens.float(), lens > 1, -lens))

    return spoil


def all_lens(lens: Any, like: Tensor, full: tuple[int, int, int]) -> Tensor | None:
    if lens is None:
        return None
    whole(lens, like)
    return in_bounds(lens, *full)


@attack("implementations.valid_lens.masked_softmax")
def lens_softmax(dice: Dice) -> Call:
    q_len, k_len, batch_size = sizes(dice)
    x = dice.floats(batch_size, q_len, k_len, dtype=dice.pick(FLOATS))
    given: dict[str, Any] = {
        "X": x,
        "valid_lens": new_lens(dice, q_len, k_len, batch_size),
    }

    def judge(result: Any) -> None:
        x, lens = given.values()
        need(isinstance(x, Tensor) and x.dtype in FLOATS, "no floats")
        dense(x, x, 3)
        batch_size, q_len, k_len = x.shape
        mask = all_lens(lens, x, (q_len, k_len, batch_size))
        if x.is_meta:
            return compare(result, x, x)
        may = allowed(mask, (q_len, k_len, batch_size)).permute(2, 0, 1)
        rows = zip(listed(x.flatten(0, 1)), may.flatten(0, 1).tolist(), strict=True)
        expected = nest([oracle.weights_of_row(s, m) for s, m in rows], tuple(x.shape))
        compare(result, expected, x)

    return call(
        dice, valid_lens.masked_softmax, given, judge, valid_lens=odd_lens(dice, k_len)
    )


@attack("implementations.valid_lens.DotProductAttention.forward")
def dot_product(dice: Dice) -> Call:
    module = valid_lens.DotProductAttention(0.0).train(not dice.chance(2))
    q_len, k_len, batch_size = sizes(dice)
    d_k, d_v, dtype = dice.roll(0, 3), dice.roll(1, 3), dice.pick(FLOATS)
    given: dict[str, Any] = {
        "queries": dice.floats(batch_size, q_len, d_k, dtype=dtype),
        "keys": dice.floats(batch_size, k_len, d_k, dtype=dtype),
        "values": dice.floats(batch_size, k_len, d_v, dtype=dtype),
        "valid_lens": new_lens(dice, q_len, k_len, batch_size),
    }
    dice.tame = d_k > 0  # in no dimensions there are no directions to compare

    def judge(result: Any) -> None:
        queries, keys, values, lens = given.values()
        need(isinstance(queries, Tensor) and queries.dtype in FLOATS, "no floats")
        for x in (queries, keys, values):
            dense(x, queries, 3)
        d_k, d_v = keys.shape[-1], values.shape[-1]
        need(queries.shape[-1] == d_k > 0, "widths differ, or there is none")
        full = (queries.shape[1], keys.shape[1], len(queries))
        mask = all_lens(lens, queries, full)
        # The oracle has one width for all: the missing columns are zero.
        width = max(d_k, d_v)
        xs = [
            nn.functional.pad(x, (0, width - x.shape[-1]))
            for x in (queries, keys, values)
        ]
        xs = [x.transpose(0, 1) for x in xs]
        weights: Weights = dict.fromkeys(
            ("query", "key", "value", "output"), eye(width)
        )
        # It also divides by the root of that width.
        weights["query"] = (eye(width)[0] * math.sqrt(width / d_k), None)
        output, attn = right(*xs, mask, weights, 1)
        compare(result, output.transpose(0, 1)[..., :d_v], queries)
        compare(module.attention_weights, attn[..., 0].permute(2, 0, 1), queries)

    return call(dice, module, given, judge, valid_lens=odd_lens(dice, k_len))


@attack("implementations.valid_lens.MultiHeadAttention.forward")
def folded(dice: Dice) -> Call:
    heads, d_k = dice.roll(1, 3), dice.roll(1, 3)
    module: Any = valid_lens.MultiHeadAttention(heads * d_k, heads, 0.0, dice.chance(2))
    widths = [dice.roll(1, 4) for _ in range(3)]
    lazy = dice.chance(4)
    if not lazy:
        module(*(torch.zeros(1, 1, n) for n in widths), None)
        module = awake(dice, module)
    else:
        module = module.to(dice.device)
    q_len, k_len, batch_size = sizes(dice)
    like = module.W_q.weight
    dtype = torch.float32 if lazy else like.dtype
    shapes = [
        (batch_size, n, w) for n, w in zip((q_len, k_len, k_len), widths, strict=True)
    ]
    given: dict[str, Any] = {
        name: dice.floats(*shape, dtype=dtype)
        for name, shape in zip(("queries", "keys", "values"), shapes, strict=True)
    }
    given |= {"valid_lens": new_lens(dice, q_len, k_len, batch_size)}

    def judge(result: Any) -> None:
        queries, keys, values, lens = given.values()
        like = module.W_q.weight
        for x in (queries, keys, values):
            dense(x, like, 3)
        full = (queries.shape[1], keys.shape[1], len(queries))
        mask = all_lens(lens, like, full)
        own = zip(("query", "key", "value", "output"), "qkvo", strict=True)
        weights = {name: linear(getattr(module, f"W_{part}")) for name, part in own}
        xs = [x.transpose(0, 1) for x in (queries, keys, values)]
        output, attn = right(*xs, mask, weights, heads)
        compare(result, output.transpose(0, 1), like)
        kept = module.attention.attention_weights
        assert kept.shape == (full[2] * heads, *full[:2])
        compare(kept, attn.permute(2, 3, 0, 1).reshape(kept.shape), like)

    return call(dice, module, given, judge, valid_lens=odd_lens(dice, k_len))


def self_attention(
    dice: Dice, module: Any, weights: Weights, heads: int, *, limit: int | None
) -> Call:
    """The staged classes: `x` alone, with a batch and a limit, or with neither."""
    weight, _ = weights["query"]
    d_in = weight.shape[1]
    q_len, _, batch_size = sizes(dice)
    shape = (q_len, d_in) if limit is None else (batch_size, q_len, d_in)
    given: dict[str, Any] = {"x": dice.floats(*shape).to(weight)}
    if limit is not None and q_len > limit:
        dice.tame = False

    def judge(result: Any) -> None:
        x = given["x"]
        dense(x, weight, len(shape))
        need(x.shape[-1] == d_in, "it has another width")
        if limit is None:
            x, mask = x.unsqueeze(1), None
        else:
            need(x.shape[1] <= limit, "it is too long")
            x = x.transpose(0, 1)
            mask = torch.ones(len(x), len(x), device=x.device).tril().bool()
            mask = mask.unsqueeze(-1)
        output, _ = right(x, x, x, mask, weights, heads)
        output = output.squeeze(1) if limit is None else output.transpose(0, 1)
        compare(result, output, weight)

    return call(dice, module, given, judge)


def staged(module: Any, d_out: int) -> Weights:
    weights = {n: linear(getattr(module, f"W_{n}")) for n in ("query", "key", "value")}
    return weights | {"output": eye(d_out)}


@attack("implementations.stages.SelfAttention_v1.forward")
def v1(dice: Dice) -> Call:
    d_out = dice.roll(1, 3)
    module = awake(dice, stages.SelfAttention_v1(dice.roll(1, 4), d_out))
    weights: Weights = {
        n: (getattr(module, f"W_{n}").T, None) for n in ("query", "key", "value")
    }
    return self_attention(dice, module, weights | {"output": eye(d_out)}, 1, limit=None)


@attack("implementations.stages.SelfAttention_v2.forward")
def v2(dice: Dice) -> Call:
    d_out = dice.roll(1, 3)
    made = stages.SelfAttention_v2(dice.roll(1, 4), d_out, qkv_bias=dice.chance(2))
    module = awake(dice, made)
    return self_attention(dice, module, staged(module, d_out), 1, limit=None)


@attack("implementations.stages.CausalAttention.forward")
def causal_head(dice: Dice) -> Call:
    d_out, limit = dice.roll(1, 3), dice.roll(1, 4)
    made = stages.CausalAttention(dice.roll(1, 4), d_out, limit, 0.0, dice.chance(2))
    module = awake(dice, made)
    return self_attention(dice, module, staged(module, d_out), 1, limit=limit)


@attack("implementations.stages.MultiHeadAttentionWrapper.forward")
def wrapper(dice: Dice) -> Call:
    d_in, d_out, limit, heads = (dice.roll(1, 3) for _ in range(4))
    made = stages.MultiHeadAttentionWrapper(
        d_in, d_out, limit, 0.0, heads, dice.chance(2)
    )
    module = awake(dice, made)
    weights: Weights = {"output": eye(heads * d_out)}
    for name in ("query", "key", "value"):
        layers = [getattr(head, f"W_{name}") for head in module.heads]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        weight = torch.cat([layer.weight for layer in layers])
        weights[name] = (weight, torch.cat(biases) if biases else None)
    return self_attention(dice, module, weights, heads, limit=limit)


@attack("implementations.causal.MultiHeadAttention.forward")
def one_class(dice: Dice) -> Call:
    d_in, d_k, limit, heads = (dice.roll(1, 3) for _ in range(4))
    made = causal.MultiHeadAttention(
        d_in, heads * d_k, limit, 0.0, heads, dice.chance(2)
    )
    module = awake(dice, made)
    weights = staged(module, heads * d_k) | {"output": linear(module.out_proj)}
    return self_attention(dice, module, weights, heads, limit=limit)
