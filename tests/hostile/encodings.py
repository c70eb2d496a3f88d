"""Attacks on the variants with positions in the scores, and with fewer key heads."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headnotes.variants import alibi, grouped_query, latent, relative, rotary
from hostile.attention import (
    awake,
    call,
    compare,
    dense,
    item_order,
    need,
    whole,
)
from hostile.dice import FLOATS, Dice
from hostile.forward import by_loops, forward, wide
from hostile.outcome import Call
from hostile.registry import ATTACKS, attack
from hostile.settings import constructor
from loops import Pair, dot

# Grouped heads --------------------------------------------------------------------


def new_grouped(dice: Dice) -> Any:
    kv_heads, group, d_k = (dice.roll(1, 2) for _ in range(3))
    heads = kv_heads * group
    return grouped_query.GroupedQueryAttention(
        heads, heads * d_k, 0.0, dice.chance(2), kv_heads=kv_heads
    )


ATTACKS |= {
    "variants.grouped_query.GroupedQueryAttention": constructor(
        grouped_query.GroupedQueryAttention,
        heads=1,
        d_model=2,
        dropout_prob=0.1,
        bias=True,
        kv_heads=1,
    ),
    "variants.grouped_query.GroupedQueryAttention.forward": forward(
        new_grouped, by_loops()
    ),
}


# Rotary ---------------------------------------------------------------------------


def positions_of(dice: Dice, length: int, batch_size: int) -> Tensor:
    shape = (length, batch_size if dice.chance(2) else 1)
    at = dice.ints(-20, 20, *shape)
    return at.to(dice.pick((torch.int64, torch.int32, torch.float32, torch.float64)))


def rotary_positions(
    dice: Dice, q_len: int, k_len: int, batch_size: int
) -> dict[str, Any]:
    return {"key_positions": positions_of(dice, k_len, batch_size)}


def counted(positions: Any, full: tuple[int, ...], device: torch.device) -> Tensor:
    """Positions that can be right, `[seq_len, batch_size]`, in float64."""
    need(isinstance(positions, Tensor), "positions are no tensor")
    need(positions.layout == torch.strided and not positions.is_nested, "not dense")
    need(not positions.is_quantized and positions.device == device, "another device")
    need(positions.dtype != torch.bool, "positions are bool")
    need(not positions.is_complex(), "positions are complex")
    real = positions.is_floating_point()
    need(not real or positions.dtype in (torch.float32, torch.float64), "too coarse")
    need(tuple(positions.shape) in (full, (*full[:1], 1)), "positions do not fit")
    return positions.detach().double().expand(full)


def rotate_one(x: Tensor, angles: Tensor, pairing: str) -> Tensor:
    """One vector; the angles are those of its pairs."""
    pairs = len(angles)
    parts = list(x)
    for n, angle in enumerate(angles):
        first, second = (n, n + pairs) if pairing == "halves" else (2 * n, 2 * n + 1)
        parts[first] = x[first] * angle.cos() - x[second] * angle.sin()
        parts[second] = x[first] * angle.sin() + x[second] * angle.cos()
    return torch.stack(parts)


def of_rotary(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    query, key, at = given["query"], given["key"], given["key_positions"]
    if at is None:
        at = torch.arange(len(key), device=key.device).unsqueeze(1)
    else:
        need(len(query) <= len(key), "queries have no positions")
    at = counted(at, (len(key), key.shape[1]), key.device)
    at = at if at.is_meta else at.cpu()
    frequencies = torch.tensor(module.frequencies, dtype=torch.float64)
    behind = len(key) - len(query)

    def score(q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        i, j, b, _ = pair
        # Without positions there may be more queries than keys: the first lie before.
        place = at[i + behind, b] if i + behind >= 0 else at[0, b] + i + behind
        q = rotate_one(q, place * frequencies, module.pairing)
        k = rotate_one(k, at[j, b] * frequencies, module.pairing)
        return dot(q, k)

    return {"score": score}


def new_rotary(dice: Dice) -> Any:
    heads, d_k = dice.roll(1, 2), dice.roll(2, 5)
    return rotary.RotaryAttention(
        heads,
        heads * d_k,
        0.0,
        frequencies=rotary.rotary_frequencies(2 * dice.roll(1, d_k // 2)),
        pairing=dice.pick(rotary.PAIRINGS),
    )


ATTACKS |= {
    "variants.rotary.RotaryAttention": constructor(
        rotary.RotaryAttention,
        heads=1,
        d_model=2,
        dropout_prob=0.1,
        bias=True,
        frequencies=torch.zeros(0),
    ),
    "variants.rotary.RotaryAttention.forward": forward(
        new_rotary, by_loops(of_rotary), rotary_positions
    ),
}


@attack("variants.rotary.rotate")
def rotate(dice: Dice) -> Call:
    seq_len, batch_size, heads = (dice.roll(0, 2) for _ in range(3))
    pairs, rest = dice.roll(0, 2), dice.roll(0, 2)
    x = dice.floats(seq_len, batch_size, heads, 2 * pairs + rest)
    x = x.to(dice.pick(FLOATS))
    angles = dice.floats(seq_len, dice.pick((1, batch_size)), pairs)
    angles = angles.to(dice.pick((torch.float64, torch.float32)))
    pairing = dice.pick(rotary.PAIRINGS)
    given: dict[str, Any] = {"x": x, "angles": angles, "pairing": pairing}

    def judge(result: Any) -> None:
        x, angles, pairing = given.values()
        dense(x, x, 4)
        need(x.dtype in FLOATS, "they are no vectors")
        need(isinstance(angles, Tensor) and angles.is_floating_point(), "no angles")
        dense(angles, angles, 3)
        need(angles.dtype.itemsize > 1 and x.device == angles.device, "no angles")
        need(pairing in rotary.PAIRINGS, "an unknown pairing")
        seq_len, batch_size, heads, d_k = x.shape
        fits = tuple(angles.shape[:2]) in ((seq_len, 1), (seq_len, batch_size))
        need(fits and 2 * angles.shape[2] <= d_k, "sizes differ")
        if x.is_meta:
            return compare(result, x, x)
        wide = angles.detach().double().expand(seq_len, batch_size, -1)
        expected = x.detach().double().clone()
        for t in range(seq_len):
            for b in range(batch_size):
                for h in range(heads if d_k else 0):
                    turned = rotate_one(expected[t, b, h], wide[t, b], pairing)
                    expected[t, b, h] = turned
        # Angles in half precision give sines in half precision.
        coarse = angles if angles.dtype.itemsize < x.dtype.itemsize else x
        compare(result.to(coarse.dtype), expected, coarse)

    return call(dice, rotary.rotate, given, judge)


@attack("variants.rotary.rotary_angles")
def angles(dice: Dice) -> Call:
    given: dict[str, Any] = {
        "positions": positions_of(dice, dice.roll(0, 3), dice.roll(0, 2)),
        "frequencies": rotary.rotary_frequencies(4),
    }

    def judge(result: Any) -> None:
        at, frequencies = given.values()
        need(isinstance(at, Tensor), "positions are no tensor")
        expected = counted(at, tuple(at.shape), at.device).unsqueeze(-1)
        dense(frequencies, frequencies, 1)
        need(frequencies.dtype in (torch.float32, torch.float64), "no frequencies")
        need(not frequencies.is_meta, "no values")
        compare(result, expected * frequencies.detach().to(expected), expected)

    return call(dice, rotary.rotary_angles, given, judge)


@attack("variants.rotary.convert_pairing")
def convert_pairing(dice: Dice) -> Call:
    heads, d_k = dice.roll(1, 3), 2 * dice.roll(1, 3)
    weight = (
        dice.floats(heads * d_k, 2) if dice.chance(2) else dice.ints(0, 9, heads * d_k)
    )
    given: dict[str, Any] = {
        "weight": weight,
        "heads": heads,
        "to": dice.pick(rotary.PAIRINGS),
        "rotary_dim": dice.pick((None, 2)),
    }

    def judge(result: Any) -> None:
        weight, heads, to, rotary_dim = given.values()
        need(isinstance(weight, Tensor) and weight.dim() > 0, "no weight")
        need(weight.layout == torch.strided and not weight.is_nested, "not dense")
        need(not weight.is_quantized, "quantized")
        need(type(heads) is int and heads > 0, "heads are no number")
        need(len(weight) % heads == 0 and to in rotary.PAIRINGS, "does not fit")
        d_k = len(weight) // heads
        width = d_k if rotary_dim is None else rotary_dim
        need(type(width) is int and 2 <= width <= d_k and width % 2 == 0, "no pairs")
        order = []
        for row in range(len(weight)):
            head, d = divmod(row, d_k)
            if d < width:
                pairs = width // 2
                back = pairs * (d % 2) + d // 2, 2 * (d % pairs) + d // pairs
                d = back[0] if to == "neighbors" else back[1]
            order.append(head * d_k + d)
        assert result.shape == weight.shape
        assert result.dtype == weight.dtype
        if not weight.is_meta:
            assert str(result.tolist()) == str(weight[order].tolist())

    return call(dice, rotary.convert_pairing, given, judge)


def scaling(function: Any, **own: Any) -> Callable[[Dice], Call]:
    """An attack on what scales frequencies: fast ones stay, slow ones become slower."""

    def attack(dice: Dice) -> Call:
        frequencies = rotary.rotary_frequencies(2 * dice.roll(2, 4), base=100.0)
        given: dict[str, Any] = {"frequencies": frequencies, "factor": 2.0, **own}

        def judge(result: Any) -> None:
            before, factor = given["frequencies"], given["factor"]
            need(isinstance(before, Tensor) and before.dim() == 1, "no frequencies")
            dense(before, before, 1)
            need(before.dtype in (torch.float32, torch.float64), "no frequencies")
            need(not before.is_meta, "no values")
            number = type(factor) in (int, float)
            need(number and 1 <= factor < math.inf, "no factor")
            length = given.get("trained_length", 1)
            need(type(length) is int and length > 0, "no length")
            assert result.shape == before.shape
            ratio = (before / result)[(before > 0) & before.isfinite()]
            assert (ratio >= 1 - 1e-5).all()
            assert (ratio <= factor * (1 + 1e-5)).all()

        return call(dice, function, given, judge)

    return attack


ATTACKS |= {
    "variants.rotary.linear_scaling": scaling(rotary.linear_scaling),
    "variants.rotary.ntk_scaling": scaling(rotary.ntk_scaling),
    "variants.rotary.yarn_scaling": scaling(rotary.yarn_scaling, trained_length=64),
    "variants.rotary.llama3_scaling": scaling(rotary.llama3_scaling, trained_length=64),
}


@attack("variants.rotary.rotary_frequencies")
def frequencies(dice: Dice) -> Call:
    given: dict[str, Any] = {"rotary_dim": 2 * dice.roll(1, 4), "base": 10_000.0}

    def judge(result: Any) -> None:
        width, base = given.values()
        need(type(width) is int and width > 0 and width % 2 == 0, "no width")
        need(type(base) in (int, float) and 1 <= base < math.inf, "no base")
        expected = [base ** (-2 * n / width) for n in range(width // 2)]
        compare(result, torch.tensor(expected, dtype=torch.float64), result)

    return call(dice, rotary.rotary_frequencies, given, judge)


@attack("variants.rotary.yarn_attention_factor")
def yarn_factor(dice: Dice) -> Call:
    given: dict[str, Any] = {"factor": 1.0 + dice.roll(0, 7), "mscale": 1.0}

    def judge(result: Any) -> None:
        numbers = [type(x) in (int, float) for x in given.values()]
        need(all(numbers) and given["factor"] >= 1, "no factor")
        need(given["mscale"] >= 0, "no factor")
        assert result == 1 + 0.1 * given["mscale"] * math.log(given["factor"])

    return call(dice, rotary.yarn_attention_factor, given, judge)


# Linear biases, and learned relative positions ------------------------------------


def behind(given: dict[str, Any]) -> int:
    return len(given["key"]) - len(given["query"])


def of_alibi(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        return dot(q, k) - module.slopes[at.h] * abs(at.i + behind(given) - at.j)

    return {"score": score}


def of_shaw(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    limit = module.max_distance

    def row(at: Pair) -> int:
        distance: int = max(-limit, min(limit, at.j - at.i - behind(given)))
        return distance + limit

    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        return dot(q, k + module.key_table[row(at)])

    def value_of(v: Tensor, at: Pair) -> Tensor:
        moved: Tensor = v + module.value_table[row(at)]
        return moved

    return {"score": score, "value_of": value_of}


def of_xl(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    weight, heads = module.position.linear.weight, module.heads

    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        distance, width = at.i + behind(given) - at.j, weight.shape[1]
        angles = [distance / 10000 ** (n / width) for n in range(0, width, 2)]
        sinusoid = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        whole = weight @ torch.tensor(sinusoid[:width], dtype=torch.float64)
        by_distance = whole.view(heads, -1)[at.h]
        content = dot(q + module.content_bias[at.h], k)
        return content + dot(q + module.position_bias[at.h], by_distance)

    return {"score": score}


def of_t5(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    def score(q: Tensor, k: Tensor, at: Pair) -> Tensor:
        # At most four tokens: each distance has a bucket of its own.
        position = at.j - at.i - behind(given)
        after = 16 if module.bidirectional else None
        bucket = -position if position <= 0 else after and after + position
        bias: Tensor = module.relative_bias.weight[bucket or 0, at.h]
        return torch.dot(q, k) + bias

    return {"score": score}


def plain(kind: Any, **own: Callable[[Dice], Any]) -> Callable[[Dice], Any]:
    """Build a module of a random size, with settings of its own."""

    def build(dice: Dice) -> Any:
        heads, d_k = dice.roll(1, 2), dice.roll(1, 3)
        settings = {name: pick(dice) for name, pick in own.items()}
        return kind(heads, heads * d_k, 0.0, dice.chance(2), **settings)

    return build


SIZES: dict[str, Any] = {"heads": 1, "d_model": 2, "dropout_prob": 0.1, "bias": True}
ALIBI, XL = alibi.AlibiAttention, relative.TransformerXLAttention
SHAW, T5 = relative.ShawAttention, relative.T5Attention
ATTACKS |= {
    "variants.alibi.AlibiAttention": constructor(ALIBI, **SIZES),
    "variants.alibi.AlibiAttention.forward": forward(plain(ALIBI), by_loops(of_alibi)),
    "variants.relative.ShawAttention": constructor(SHAW, **SIZES, max_distance=1),
    "variants.relative.ShawAttention.forward": forward(
        plain(SHAW, max_distance=lambda dice: dice.roll(1, 3)), by_loops(of_shaw)
    ),
    "variants.relative.TransformerXLAttention": constructor(XL, **SIZES),
    "variants.relative.TransformerXLAttention.forward": forward(
        plain(XL), by_loops(of_xl)
    ),
    "variants.relative.T5Attention": constructor(T5, **SIZES),
    "variants.relative.T5Attention.forward": forward(
        plain(T5, bidirectional=lambda dice: dice.chance(2)), by_loops(of_t5)
    ),
}


@attack("variants.alibi.alibi_slopes")
def slopes(dice: Dice) -> Call:
    given: dict[str, Any] = {"heads": dice.roll(1, 20)}

    def judge(result: Any) -> None:
        heads = given["heads"]
        need(type(heads) is int and heads > 0, "no heads")
        power = 2 ** (heads.bit_length() - 1)
        expected = [2 ** (-8 * n / power) for n in range(1, power + 1)]
        expected += [2 ** (-4 * n / power) for n in range(1, 2 * power, 2)]
        wanted = torch.tensor(expected[:heads], dtype=torch.float64)
        compare(result, wanted, wanted)

    return call(dice, alibi.alibi_slopes, given, judge)


@attack("variants.relative.relative_shift")
def shift(dice: Dice) -> Call:
    q_len, k_len = dice.roll(0, 3), dice.roll(0, 3)
    shape = (q_len, q_len + k_len, dice.roll(1, 2))
    given: dict[str, Any] = {"x": dice.floats(*shape[: dice.pick((2, 3))])}

    def judge(result: Any) -> None:
        x = given["x"]
        need(isinstance(x, Tensor) and x.dim() > 1, "no matrix")
        need(x.layout == torch.strided and not x.is_nested, "not dense")
        need(not x.is_quantized and x.shape[1] >= len(x), "no distances")
        q_len, k_len = len(x), x.shape[1] - len(x)
        assert result.shape == (q_len, k_len, *x.shape[2:])
        if x.is_meta:
            return
        for i in range(q_len):
            row = x[i, q_len - 1 - i :][:k_len]
            assert str(result[i].tolist()) == str(row.tolist())

    return call(dice, relative.relative_shift, given, judge)


@attack("variants.relative.xl_sinusoids")
def xl_sinusoids(dice: Dice) -> Call:
    given: dict[str, Any] = {
        "distances": dice.ints(-9, 9, dice.roll(0, 4)),
        "d_model": dice.roll(1, 5),
    }

    def judge(result: Any) -> None:
        distances, width = given.values()
        need(isinstance(distances, Tensor) and distances.dim() == 1, "no distances")
        dense(distances, distances, 1)
        need(not distances.is_complex() and distances.dtype != torch.bool, "no numbers")
        need(not distances.is_quantized, "quantized")
        need(type(width) is int and width > 0, "no width")
        assert result.shape == (len(distances), width)
        if not distances.is_meta:
            angle = distances.detach().double()
            compare(result[:, 0], angle.sin(), angle)

    return call(dice, relative.xl_sinusoids, given, judge)


@attack("variants.relative.relative_buckets")
def buckets(dice: Dice) -> Call:
    given: dict[str, Any] = {
        "positions": dice.ints(-300, 300, dice.roll(0, 4), dice.roll(0, 4)),
        "buckets": dice.pick((32, 8)),
        "max_distance": dice.pick((128, 20)),
        "bidirectional": dice.chance(2),
    }

    def judge(result: Any) -> None:
        positions, count, farthest, both = given.values()
        whole(positions, positions)
        need(positions.dtype != torch.bool and type(both) is bool, "no positions")
        need(all(type(n) is int for n in (count, farthest)), "no numbers")
        side = count // 2 if both else count
        need(side > 1 and farthest > side // 2, "no buckets")
        need(not both or count % 2 == 0, "no halves")
        assert result.shape == positions.shape
        assert result.dtype == torch.int64
        if positions.is_meta:
            return
        flat = zip(positions.flatten().tolist(), result.flatten().tolist(), strict=True)
        for position, bucket in flat:
            start = side if both and position > 0 else 0
            distance = abs(position) if both else max(0, -position)
            assert start <= bucket < start + side
            assert distance >= side // 2 or bucket == start + distance
            assert distance < farthest or bucket == start + side - 1

    return call(dice, relative.relative_buckets, given, judge)


@attack("variants.relative.relative_positions")
def relative_positions(dice: Dice) -> Call:
    given: dict[str, Any] = {"q_len": dice.roll(0, 4), "k_len": dice.roll(0, 4)}

    def judge(result: Any) -> None:
        q_len, k_len = given.values()
        assert result.tolist() == [
            [j - i for j in range(k_len)] for i in range(k_len - q_len, k_len)
        ]

    return Call(
        lambda q_len, k_len: relative.relative_positions(q_len, k_len, dice.device),
        given,
        judge,
    )


# Latents --------------------------------------------------------------------------


def new_latent(dice: Dice) -> Any:
    heads, d_k = dice.roll(1, 2), dice.roll(1, 3)
    return latent.LatentAttention(
        heads,
        heads * d_k,
        0.0,
        dice.chance(2),
        kv_rank=dice.roll(1, 3),
        rotary_dim=2,
        query_rank=dice.pick((None, 2)),
        norm=False,
    )


class OnePair(latent.LatentAttention):
    """The frequencies of 2**31 pairs lie on the CPU also where the module is "meta"."""

    def __init__(
        self, heads: int, d_model: int, dropout_prob: float, bias: bool, kv_rank: int
    ) -> None:
        sizes: dict[str, Any] = {"kv_rank": kv_rank, "rotary_dim": 2}
        super().__init__(heads, d_model, dropout_prob, bias, **sizes)


ATTACKS["variants.latent.LatentAttention"] = constructor(OnePair, **SIZES, kv_rank=1)


def of_latent(module: Any, given: dict[str, Any], may: Tensor) -> Tensor | None:
    """The module itself in float64: the loops have not its projections."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if query.is_meta:
        return None
    output: Tensor = module(
        query=wide(query), key=wide(key), value=wide(value), mask=may
    )
    return output


ATTACKS["variants.latent.LatentAttention.forward"] = forward(
    new_latent, of_latent, coarse=True
)


@attack("variants.latent.LatentAttention.decode")
def latent_decode(dice: Dice) -> Call:
    module = awake(dice, new_latent(dice)).eval()
    weight, d_model = module.output.weight, module.output.out_features
    batch_size, past_len = dice.roll(1, 3), dice.roll(0, 2)
    cache = module.cache(batch_size, dice.roll(1, 3))
    shape = past_len + dice.roll(0, 3), batch_size, d_model
    x = dice.floats(*shape, dtype=weight.dtype)
    module.decode(x[:past_len], cache)
    given: dict[str, Any] = {"x": x[past_len:], "cache": cache}

    def judge(result: Any) -> None:
        piece, cache = given.values()
        dense(piece, weight, 3)
        need(piece.shape[1:] == x.shape[1:], "a size differs")
        need(isinstance(cache, latent.LatentCache), "there is no cache")
        assert result[0].shape == piece.shape
        together = torch.cat([x[:past_len], piece])
        assert len(cache) == len(together)
        # However it is cut, it is the causal pass.
        if not x.is_meta and weight.dtype.itemsize > 3:
            n = len(together)
            mask = torch.ones(n, n, device=x.device).bool().tril().unsqueeze(-1)
            expected = module(query=together, key=together, value=together, mask=mask)
            compare(result[0], wide(expected[past_len:]), weight)

    return call(dice, module.decode, given, judge)


@attack("variants.latent.LatentAttention.cache")
def empty_latent_cache(dice: Dice) -> Call:
    module = new_latent(dice)
    given: dict[str, Any] = {"batch_size": dice.roll(1, 3), "capacity": dice.roll(1, 3)}

    def judge(cache: Any) -> None:
        need(all(type(n) is int and n > 0 for n in given.values()), "no size")
        width = module.kv_rank + module.rotary_dim
        assert cache.buffer.shape == (given["capacity"], given["batch_size"], width)

    return call(dice, module.cache, given, judge)


def new_latent_cache(dice: Dice) -> tuple[latent.LatentCache, Tensor]:
    """A cache, and what it holds already."""
    batch_size, width, length = (dice.roll(1, 3) for _ in range(3))
    dtype = dice.pick((torch.float32, torch.bfloat16))
    cache = latent.LatentCache(
        batch_size, width, dice.roll(1, 3), dtype=dtype, device=dice.device
    )
    held = dice.floats(length, batch_size, width, dtype=dtype)
    cache.append(held)
    return cache, held


@attack("variants.latent.LatentCache")
def latent_cache(dice: Dice) -> Call:
    names = ("batch_size", "width", "capacity")
    given: dict[str, Any] = {name: dice.roll(1, 3) for name in names}

    def judge(made: Any) -> None:
        need(all(type(n) is int and n > 0 for n in given.values()), "no size")
        batch_size, width, capacity = given.values()
        assert (len(made), made.capacity) == (0, capacity)
        assert made.latents.shape == (0, batch_size, width)

    return call(dice, latent.LatentCache, given, judge)


@attack("variants.latent.LatentCache.append")
def latent_append(dice: Dice) -> Call:
    cache, held = new_latent_cache(dice)
    shape = dice.roll(0, 5), *held.shape[1:]
    given: dict[str, Any] = {"x": dice.floats(*shape, dtype=held.dtype)}

    def judge(result: Any) -> None:
        dense(given["x"], held, 3)
        need(given["x"].shape[1:] == shape[1:], "a size differs")
        compare(cache.latents, wide(torch.cat([held, given["x"]])), held)

    return call(dice, cache.append, given, judge)


@attack("variants.latent.LatentCache.reorder")
def latent_reorder(dice: Dice) -> Call:
    cache, held = new_latent_cache(dice)
    batch_size = held.shape[1]
    given: dict[str, Any] = {"index": dice.ints(0, batch_size - 1, dice.roll(1, 4))}
    dice.tame = not given["index"].is_meta  # there is nothing to be read of

    def judge(result: Any) -> None:
        order = item_order(given["index"], held, batch_size)
        compare(cache.latents, wide(held[:, order]), held)

    return call(dice, cache.reorder, given, judge)
