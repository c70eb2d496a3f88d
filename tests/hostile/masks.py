"""Attacks on masks: built, converted and described. Right is what plain loops say."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from headnotes import masks
from hostile.attention import call, need, new_mask, odd_mask, whole
from hostile.dice import FLOATS, Dice
from hostile.outcome import Call
from hostile.registry import attack

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_size(n: Any, least: int = 0) -> bool:
    return type(n) is int and n >= least


def same(
    got: Any, allows: Callable[[int, int, int], bool], device: torch.device
) -> None:
    """A bool mask on the right device, and each pair as `allows(q, k, b)` says."""
    assert isinstance(got, Tensor), f"no tensor, but {got!r}"
    assert got.dtype == torch.bool, f"{got.dtype}"
    assert got.dim() == 3, f"{got.shape}"
    assert got.device.type == device.type, f"on {got.device}"
    if got.is_meta or not got.numel():
        return
    for q, row in enumerate(got.tolist()):
        for k, column in enumerate(row):
            for b, may in enumerate(column):
                assert may == allows(q, k, b), f"query {q}, key {k}, item {b}: {may}"


def place(dice: Dice) -> torch.device:
    return torch.device("meta") if dice.chance(4) else dice.device


def lengths(dice: Dice, device: torch.device) -> dict[str, Any]:
    """Lengths of queries and keys; on "meta" they may be greater than any index."""
    large = (
        (2**31, 2**31 + 1) if device.type == "meta" and dice.chance(3) else (0, 1, 5)
    )
    return {
        "q_len": dice.pick((2, *large)),
        "k_len": dice.pick((None, 3, 0, 1, 4)),
        "device": device,
    }


def fits(dice: Dice, given: dict[str, Any]) -> None:
    """With as many keys as queries, and more than an index can count, nothing does."""
    if given["q_len"] >= 2**31 and given["k_len"] is None:
        dice.tame = False


def without_device(
    dice: Dice, function: Any, given: dict[str, Any], judge: Callable[[Any], None]
) -> Call:
    """The words for devices are those of torch, and it is torch that knows them."""
    device = given.pop("device")
    made = call(dice, function, given, judge)
    made.arguments = {**given, "device": device}
    return made


@attack("masks.build.causal")
def causal(dice: Dice) -> Call:
    device = place(dice)
    given = lengths(dice, device)
    fits(dice, given)
    given["corner"] = dice.pick(("bottom right", "top left"))

    def judge(result: Any) -> None:
        q_len, k_len, corner = given["q_len"], given["k_len"], given["corner"]
        k_len = q_len if k_len is None else k_len
        need(is_size(q_len) and is_size(k_len), "a length is none")
        need(corner in ("bottom right", "top left"), "there is no such corner")
        shift = k_len - q_len if corner == "bottom right" else 0
        assert result.shape == (q_len, k_len, 1)
        same(result, lambda q, k, b: k <= q + shift, device)

    return without_device(dice, masks.causal, given, judge)


@attack("masks.build.sliding_window")
def sliding_window(dice: Dice) -> Call:
    device = place(dice)
    given = {**lengths(dice, device), "window": dice.roll(1, 4)}
    fits(dice, given)

    def judge(result: Any) -> None:
        q_len, k_len, window = given["q_len"], given["k_len"], given["window"]
        k_len = q_len if k_len is None else k_len
        need(is_size(q_len) and is_size(k_len), "a length is none")
        need(is_size(window, 1), "a window is from 1 up")
        shift = k_len - q_len
        assert result.shape == (q_len, k_len, 1)
        same(result, lambda q, k, b: q + shift - window < k <= q + shift, device)

    return without_device(dice, masks.sliding_window, given, judge)


def odd_lengths(dice: Dice) -> Callable[[Any], Any]:
    """By one too long or too short, as floats, as a mask."""

    def spoil(lens: Any) -> Any:
        if not isinstance(lens, Tensor):
            return None
        return dice.pick((lens + 5, lens - 1, lens.float(), lens > 1, -lens))

    return spoil


def listed_lens(lens: Any, axes: tuple[int, ...], k_len: int | None) -> Any:
    """Lengths as lists, if they are lengths; None on "meta"."""
    whole(lens, lens)
    need(lens.dtype != torch.bool, "lengths are bool")
    need(lens.dim() in axes, "lengths have another number of axes")
    if lens.is_meta:
        return None
    flat = lens.flatten().tolist()
    need(all(n >= 0 and (k_len is None or n <= k_len) for n in flat), "out of bounds")
    return lens.tolist()


@attack("masks.build.padding")
def padding(dice: Dice) -> Call:
    q_len, k_len, batch_size = dice.roll(0, 3), dice.roll(0, 4), dice.roll(0, 3)
    shape = (batch_size, q_len) if dice.chance(2) else (batch_size,)
    lens = dice.ints(0, k_len, *shape).to(dice.pick(INTEGERS))
    given: dict[str, Any] = {"valid_lens": lens, "k_len": k_len}

    def judge(result: Any) -> None:
        lens, k_len = given.values()
        need(is_size(k_len), "a length is none")
        rows = listed_lens(lens, (1, 2), k_len)
        q_len = 1 if lens.dim() == 1 else lens.shape[1]
        assert result.shape == (q_len, k_len, len(lens))
        flat = lens.dim() == 1
        same(result, lambda q, k, b: k < (rows[b] if flat else rows[b][q]), lens.device)

    return call(dice, masks.padding, given, judge, valid_lens=odd_lengths(dice))


@attack("masks.build.prefix_lm")
def prefix_lm(dice: Dice) -> Call:
    k_len, batch_size = dice.roll(0, 4), dice.roll(0, 3)
    q_len = dice.pick((k_len, 2, 0, 5))
    lens = dice.ints(0, k_len, batch_size).to(dice.pick(INTEGERS))
    given: dict[str, Any] = {"prefix_lens": lens, "q_len": q_len, "k_len": k_len}
    if q_len == k_len and dice.chance(2):
        given["k_len"] = None

    def judge(result: Any) -> None:
        lens, q_len, k_len = given.values()
        k_len = q_len if k_len is None else k_len
        need(is_size(q_len) and is_size(k_len), "a length is none")
        rows = listed_lens(lens, (1,), k_len)
        assert result.shape == (q_len, k_len, len(lens))
        shift = k_len - q_len
        same(result, lambda q, k, b: k <= q + shift or k < rows[b], lens.device)

    return call(dice, masks.prefix_lm, given, judge, prefix_lens=odd_lengths(dice))


@attack("masks.build.block_diagonal")
def block_diagonal(dice: Dice) -> Call:
    documents = dice.roll(0, 3)
    given: dict[str, Any] = {"lengths": dice.ints(0, 3, documents)}
    if dice.chance(2):
        given["k_lengths"] = dice.ints(0, 3, documents).to(dice.pick(INTEGERS))

    def judge(result: Any) -> None:
        lens = given["lengths"]
        k_lens = given.get("k_lengths")
        k_lens = lens if k_lens is None else k_lens
        rows, columns = (listed_lens(each, (1,), None) for each in (lens, k_lens))
        need(rows is not None and columns is not None, "there are no values")
        need(len(rows) == len(columns), "the numbers of documents differ")
        need(lens.device == k_lens.device, "devices differ")
        of_q, of_k = (
            [d for d, n in enumerate(e) for _ in range(n)] for e in (rows, columns)
        )
        assert result.shape == (len(of_q), len(of_k), 1)
        same(result, lambda q, k, b: of_q[q] == of_k[k], lens.device)

    spoil = odd_lengths(dice)
    return call(
        dice, masks.block_diagonal, given, judge, lengths=spoil, k_lengths=spoil
    )


RULES: dict[str, Callable[..., Any]] = {
    "past": lambda b, q, k: k <= q,
    "all of it": lambda b, q, k: (k + q + b) % 2 == 0,
    "keys only": lambda b, q, k: k > 0,
    "items only": lambda b, q, k: b > 0,
    "a constant": lambda b, q, k: torch.tensor(True),
}
WRONG_RULES = (
    lambda b, q, k: k,
    lambda b, q, k: True,
    lambda b, q, k: None,
    lambda b, q, k: torch.ones(7, 7, 7, dtype=torch.bool),
    lambda b, q, k: torch.ones(1, 1, 1, 1, dtype=torch.bool),
    3,
    None,
    "k <= q",
)


@attack("masks.build.from_function")
def from_function(dice: Dice) -> Call:
    name = dice.pick(list(RULES))
    device = torch.device("cpu") if name == "a constant" else place(dice)
    given = {**lengths(dice, device), "allows": RULES[name]}
    given |= {"batch_size": dice.roll(0, 3), "q_len": dice.roll(0, 3)}
    rule = given["allows"]

    def judge(result: Any) -> None:
        sizes = given["q_len"], given["k_len"], given["batch_size"]
        sizes = (sizes[0], sizes[0] if sizes[1] is None else sizes[1], sizes[2])
        need(all(is_size(n) for n in sizes), "a size is none")
        need(given["allows"] is rule, "it is no rule")
        assert result.shape[1] == sizes[1]
        fits = zip(result.shape, sizes, strict=True)
        assert all(n in (1, m) for n, m in fits), f"{result.shape}"
        same(result, lambda q, k, b: bool(rule(*map(torch.tensor, (b, q, k)))), device)

    def wrong(_: Any) -> Any:
        return dice.pick(WRONG_RULES)

    given.pop("device")
    made = call(dice, masks.from_function, given, judge, allows=wrong)
    if given["allows"] is Tensor:  # what can be called may raise what it likes
        given["allows"] = None
    made.arguments = {**given, "device": device}
    return made


@attack("masks.build.combine")
def combine(dice: Dice) -> Call:
    full = dice.roll(0, 3), dice.roll(0, 4), dice.roll(0, 3)
    given: dict[str, Any] = {
        f"masks{n}": new_mask(dice, *full) for n in range(dice.roll(0, 3))
    }
    given = {
        name: dice.bools(1, full[1], 1) if m is None else m for name, m in given.items()
    }

    def gathered(**masks_by_name: Any) -> Tensor:
        return masks.combine(*masks_by_name.values())

    def judge(result: Any) -> None:
        parts = list(given.values())
        need(bool(parts), "there are no masks")
        need(isinstance(parts[0], Tensor), "it is no tensor")
        for each in parts:
            whole(each, parts[0])
            need(each.dim() == 3, "a mask has three axes")
            need(each.shape[1] == parts[0].shape[1], "lengths of keys differ")
        shape = tuple(
            max(sizes) if 0 not in sizes else 0
            for sizes in zip(*(p.shape for p in parts), strict=True)
        )
        for each in parts:
            need(
                all(n in (1, m) for n, m in zip(each.shape, shape, strict=True)),
                "shapes",
            )
            if not each.is_meta:
                need(set(each.flatten().tolist()) <= {0, 1}, "more than 0 and 1")
        assert result.shape == shape
        if not result.is_meta:
            spread = [part.expand(shape).tolist() for part in parts]
            same(
                result, lambda q, k, b: all(s[q][k][b] for s in spread), parts[0].device
            )

    spoilers = {name: odd_mask(dice) for name in given}
    made = call(dice, gathered, given, judge, "masks", **spoilers)
    made.tame = made.tame and bool(given)
    return made


# There and back --------------------------------------------------------------------


def sensible(mask: Any, axes: int | None = 3) -> Tensor:
    """A mask of this house, in full or not."""
    need(isinstance(mask, Tensor), "it is no tensor")
    whole(mask, mask)
    need(axes in (None, mask.dim()), "it has another number of axes")
    if not mask.is_meta:
        need(set(mask.flatten().tolist()) <= {0, 1}, "it holds more than 0 and 1")
    return mask


def given_mask(dice: Dice) -> dict[str, Any]:
    full = dice.roll(0, 3), dice.roll(0, 4), dice.roll(0, 3)
    mask = new_mask(dice, *full)
    return {"mask": dice.bools(1, full[1], 1) if mask is None else mask}


def round_trip(
    name: str,
    there: Callable[..., Any],
    back: Callable[..., Any],
    *,
    exact: bool = True,
) -> None:
    """Attack `there`; its answer, brought back, is the mask again.

    Not `exact` is what can say less than a mask, and then may refuse a good one.
    """

    def attack_it(dice: Dice) -> Call:
        given = given_mask(dice)
        settings: dict[str, Any] = {}
        if name in ("conventions.to_mha",):
            given["heads"] = settings["heads"] = dice.roll(1, 3)
        if name.rsplit(".", 1)[1] in ("to_mha", "to_key_padding_mask", "to_sdpa"):
            settings["dtype"] = dice.pick((None, *FLOATS))
        if name.rsplit(".", 1)[1] in ("to_huggingface", "to_additive"):
            settings["dtype"] = dice.pick(FLOATS)

        def judge(result: Any) -> None:
            any_shape = name == "conventions.to_additive"
            mask = sensible(given["mask"], None if any_shape else 3)
            if "heads" in given:
                need(is_size(given["heads"], 1), "there are no heads")
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, Tensor):
                    assert x.device == mask.device
            if mask.is_meta or given.get("heads", 1) > 2**29:
                return
            again = back(result, **{k: v for k, v in given.items() if k == "heads"})
            wanted = mask.detach().bool().as_subclass(Tensor)
            assert again.dtype == torch.bool
            assert again.expand_as(wanted).equal(wanted), (
                f"came back as {again.tolist()}"
            )

        made = call(dice, there, given, judge, mask=odd_mask(dice))
        made.arguments = settings | given
        made.tame = made.tame and exact
        return made

    attack(f"masks.{name}")(attack_it)


CONVENTIONS = (
    ("mha", masks.to_mha, masks.from_mha, True),
    ("key_padding_mask", masks.to_key_padding_mask, masks.from_key_padding_mask, False),
    ("sdpa", masks.to_sdpa, masks.from_sdpa, True),
    ("keras", masks.to_keras, masks.from_keras, True),
    ("key_mask", masks.to_key_mask, masks.from_key_mask, False),
    ("huggingface", masks.to_huggingface, masks.from_huggingface, True),
    ("additive", masks.to_additive, masks.from_additive, True),
)
for convention, there, back, exact in CONVENTIONS:
    round_trip(f"conventions.to_{convention}", there, back, exact=exact)


def from_others(name: str, there: Callable[..., Any], back: Callable[..., Any]) -> None:
    """Attack `back` with what `there` gave: it must know it, or say what is wrong."""
    parameter = {
        "mha": "attn_mask",
        "sdpa": "attn_mask",
        "keras": "attention_mask",
        "huggingface": "attention_mask",
        "additive": "mask",
        "key_mask": "key_mask",
        "key_padding_mask": "key_padding_mask",
    }[name]

    def attack_it(dice: Dice) -> Call:
        k_len, batch_size = dice.roll(0, 4), dice.roll(0, 3)
        full = (1 if name.startswith("key") else dice.roll(0, 3), k_len, batch_size)
        mask = dice.bools(*full)
        settings = {"heads": dice.roll(1, 3)} if name == "mha" else {}
        with_dtype = name in ("mha", "sdpa", "key_padding_mask") and dice.chance(2)
        extra = {"dtype": dice.pick(FLOATS)} if with_dtype else {}
        given = {parameter: there(mask, **settings, **extra), **settings}
        plain = given[parameter]

        def judge(result: Any) -> None:
            theirs = given[parameter]
            need(isinstance(theirs, Tensor), "it is no tensor")
            need(theirs.layout == torch.strided and not theirs.is_nested, "not dense")
            need(not theirs.is_complex() and not theirs.is_quantized, "no mask")
            if name == "mha":
                need(is_size(given["heads"], 1), "there are no heads")
            assert result.dtype == torch.bool
            assert result.device == theirs.device
            if theirs.is_meta:
                return
            if theirs.is_floating_point():
                lows = {torch.finfo(d).min for d in FLOATS} | {-torch.inf, 0.0}
                values = set(theirs.double().flatten().tolist())
                need(values <= lows, "it is a bias")
            elif theirs.dtype != torch.bool:
                need(set(theirs.flatten().tolist()) <= {0, 1}, "more than 0 and 1")
            if theirs is plain:
                assert result.expand(full).equal(mask)

        return call(dice, back, given, judge)

    attack(f"masks.conventions.from_{name}")(attack_it)


for convention, there, back, _ in CONVENTIONS:
    from_others(convention, there, back)


@attack("masks.conventions.to_valid_lens")
def to_valid_lens(dice: Dice) -> Call:
    given = given_mask(dice)

    def judge(result: Any) -> None:
        mask = sensible(given["mask"])
        if not mask.is_meta:
            again = masks.padding(result, mask.shape[1])
            assert again.equal(mask.detach().bool().as_subclass(Tensor))

    made = call(dice, masks.to_valid_lens, given, judge, mask=odd_mask(dice))
    made.tame = False  # most masks are more than lengths
    return made


@attack("masks.conventions.to_is_causal")
def to_is_causal(dice: Dice) -> Call:
    q_len, k_len = dice.roll(0, 4), dice.roll(0, 4)
    given = given_mask(dice)
    if dice.chance(2):
        given = {
            "mask": masks.causal(q_len, k_len, corner="top left", device=dice.device)
        }

    def judge(result: Any) -> None:
        mask = sensible(given["mask"])
        need(not mask.is_meta, "there are no values")
        assert result is True
        same(mask.bool(), lambda q, k, b: k <= q, mask.device)

    made = call(dice, masks.to_is_causal, given, judge, mask=odd_mask(dice))
    made.tame = False
    return made


@attack("masks.conventions.to_cu_seqlens")
def to_cu_seqlens(dice: Dice) -> Call:
    given = given_mask(dice)
    if not dice.chance(3):
        n = dice.roll(0, 3)
        lens = dice.ints(0, 2, n), dice.ints(0, 2, n)
        given = {"mask": masks.block_diagonal(*lens)}

    def judge(result: Any) -> None:
        mask = sensible(given["mask"])
        need(not mask.is_meta, "there are no values")
        cu_q, cu_k = result
        assert cu_q.dtype == cu_k.dtype == torch.int32
        again = masks.from_cu_seqlens(cu_q, cu_k)
        assert again.equal(mask.detach().bool().as_subclass(Tensor))

    made = call(dice, masks.to_cu_seqlens, given, judge, mask=odd_mask(dice))
    made.tame = False
    return made


@attack("masks.conventions.from_cu_seqlens")
def from_cu_seqlens(dice: Dice) -> Call:
    n = dice.roll(0, 3)
    dtype = dice.pick((torch.int32, torch.int64))

    def places() -> Tensor:
        steps = torch.cat([torch.zeros(1, dtype=torch.int64), dice.ints(0, 2, n).cpu()])
        return steps.cumsum(0).to(dice.device, dtype)

    given: dict[str, Any] = {"cu_seqlens": places()}
    if dice.chance(2):
        given["cu_seqlens_k"] = places()

    def judge(result: Any) -> None:
        cu_q = given["cu_seqlens"]
        cu_k = given.get("cu_seqlens_k")
        cu_k = cu_q if cu_k is None else cu_k
        steps = []
        for cu in (cu_q, cu_k):
            whole(cu, cu_q)
            need(cu.dtype in (torch.int32, torch.int64), "no places")
            need(not cu.is_meta and cu.dim() == 1 and len(cu) > 0, "no places")
            numbers = cu.tolist()
            need(numbers[0] == 0 and numbers == sorted(numbers), "they fall")
            pairs = pairwise(numbers)
            steps.append([d for d, (a, z) in enumerate(pairs) for _ in range(z - a)])
        need(len(cu_q) == len(cu_k), "the numbers of documents differ")
        assert result.shape == (len(steps[0]), len(steps[1]), 1)
        same(result, lambda q, k, b: steps[0][q] == steps[1][k], cu_q.device)

    return call(dice, masks.from_cu_seqlens, given, judge)


@attack("masks.flex.to_mask_mod")
def to_mask_mod(dice: Dice) -> Call:
    given = given_mask(dice)

    def judge(result: Any) -> None:
        mask = sensible(given["mask"])
        if mask.is_meta:
            return
        q_len, k_len, batch_size = mask.shape
        axes = torch.arange(batch_size), torch.arange(q_len), torch.arange(k_len)
        b, q, k = (axis.to(mask.device) for axis in axes)
        got = result(b, torch.tensor(0), q[:, None, None], k[:, None])
        assert got.equal(mask.detach().bool().as_subclass(Tensor))

    return call(dice, masks.to_mask_mod, given, judge, mask=odd_mask(dice))


MODS: dict[str, Callable[..., Any]] = {
    "past": lambda b, h, q, k: k <= q,
    "all": lambda b, h, q, k: (k + q + b) % 2 == 0,
    "heads": lambda b, h, q, k: (k + q + h) % 2 == 0,
    "number": lambda b, h, q, k: k,
}


@attack("masks.flex.from_mask_mod")
def from_mask_mod(dice: Dice) -> Call:
    name = dice.pick(list(MODS))
    rule = MODS[name]
    names = ("q_len", "k_len", "batch_size", "heads")
    given: dict[str, Any] = {each: dice.roll(1, 3) for each in names}
    given["mask_mod"] = rule

    def judge(result: Any) -> None:
        *sizes, heads, mod = given.values()
        need(all(is_size(n, 1) for n in (*sizes, heads)), "a size is none")
        need(mod is rule and name != "number", "it is no rule")
        need(name != "heads" or heads == 1, "heads differ")
        assert result.shape == tuple(sizes)
        same(result, lambda q, k, b: rule(b, 0, q, k), dice.device)

    made = call(dice, masks.from_mask_mod, given, judge)
    if given["mask_mod"] is Tensor:  # what can be called may raise what it likes
        given["mask_mod"] = None
    made.tame = made.tame and name in ("past", "all")
    made.arguments = {**given, "device": dice.device}
    return made


@attack("masks.flex.to_block_mask")
def to_block_mask(dice: Dice) -> Call:
    given = {**given_mask(dice), "block_size": dice.pick((128, 1, 2))}

    def judge(result: Any) -> None:
        mask = sensible(given["mask"])
        need(bool(mask.numel()) and not mask.is_meta, "there are no values")
        need(is_size(given["block_size"], 1), "it is no size")
        assert isinstance(result, BlockMask)
        again = masks.from_block_mask(result)
        assert again.equal(mask.detach().bool().as_subclass(Tensor))

    made = call(dice, masks.to_block_mask, given, judge, mask=odd_mask(dice))
    made.tame = made.tame and given["mask"].numel() > 0
    return made


@attack("masks.flex.from_block_mask")
def from_block_mask(dice: Dice) -> Call:
    mask = dice.bools(dice.roll(1, 3), dice.roll(1, 4), dice.roll(1, 3))
    given: dict[str, Any] = {
        "block_mask": masks.to_block_mask(mask, dice.pick((128, 2)))
    }
    block_mask = given["block_mask"]

    def judge(result: Any) -> None:
        need(given["block_mask"] is block_mask, "it is no BlockMask")
        assert result.equal(mask)

    return call(dice, masks.from_block_mask, given, judge)


@attack("masks.describe.describe")
def describe(dice: Dice) -> Call:
    given = given_mask(dice)
    if dice.roll(0, 2):
        text = dice.ints(1, 3, dice.roll(1, 3))
        rules: list[Callable[[], Tensor]] = [
            lambda: masks.block_diagonal(text),
            lambda: (
                masks.block_diagonal(text)
                & masks.causal(int(text.sum()), device=dice.device)
            ),
            lambda: masks.causal(3, dice.roll(1, 4), device=dice.device),
            lambda: masks.sliding_window(4, window=2, device=dice.device),
            lambda: masks.prefix_lm(text, 3),
        ]
        given = {"mask": dice.pick(rules)()}

    def judge(result: Any) -> None:
        mask = given["mask"]
        need(isinstance(mask, Tensor), "it is no tensor")
        need(mask.layout == torch.strided and not mask.is_nested, "it is not dense")
        need(not mask.is_meta and not mask.is_complex(), "there is nothing to read")
        need(not mask.is_quantized and mask.dim() == 3, "it is no mask")
        if not mask.is_floating_point():
            need(set(mask.flatten().tolist()) <= {0, 1}, "it holds more than 0 and 1")
        assert isinstance(result, str)
        assert result
        if mask.dtype == torch.bool and not mask.any() and mask.numel():
            assert "no query sees any key" in result

    return call(dice, masks.describe, given, judge, mask=odd_mask(dice))
