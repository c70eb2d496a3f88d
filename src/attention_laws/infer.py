r"""# Finding out how an attention is called

Names say much: a class that wants `embed_dim` and `num_heads` says how to build it, a
`forward(query, key, value, attn_mask)` what it takes. What names leave open, a small
call answers: along which axis do tokens mix? Does hiding a key by True or by False make
it disappear? Everything that was found out stands above the table of results, so that
a wrong guess can be seen; every guess can be replaced by an option.

Source: the [dictionary](names.md) of names, and the probes of [who differs
how](../compare/probes.md).
"""

import inspect
import math
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_laws import names
from attention_laws.adapter import (
    AXES,
    LAYOUTS,
    Adapter,
    CannotBeCalled,
    Fact,
    Mask,
    Options,
    Sizes,
)
from attention_laws.law import Failed
from attention_laws.trial import Question, Trial


class Inquiry:
    """An adapter that grows, fact by fact."""

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self.adapter = adapter
        self.options = options
        self.problem = ""  # why the first call that did not succeed did not

    def learn(self, name: str, value: object, how: str, **fields: Any) -> None:
        """Enter a fact, and the fields of the adapter that it settles."""
        fact = Fact(name, str(value), how)
        self.settle(facts=(*self.adapter.facts, fact), **fields)

    def settle(self, **fields: Any) -> None:
        """Enter what need not be reported."""
        self.adapter = replace(self.adapter, **fields)

    def ask(
        self,
        way: Mask | None = None,
        hide: tuple[slice, int] | None = None,
        k_len: int = 5,
        mode: str = "eval",
        **fields: Any,
    ) -> tuple[Trial, Question] | None:
        """One call of a changed adapter; None where it fails or answers nonsense."""
        options = self.options
        adapter = replace(self.adapter, **fields)
        # Sizes that coincide would let a wrong shape pass.
        batch = 1 if adapter.layout == "ld" else 2 + (adapter.heads == 2)
        sizes = Sizes(batch, 5, k_len, adapter.heads, adapter.d_k)
        try:
            trial = Trial(adapter, sizes, **options.of_trials())
            trial.begin(mode)
            keep = trial.everything()
            if hide is not None:
                keep[hide] = False
            question = trial.ask(keep, way)
            result = trial.get(f"attention({trial.arguments(question)})")
        except Exception as error:
            cause = error.error if isinstance(error, Failed) else error
            self.problem = self.problem or f"raises {Failed(cause)}{raised_at(cause)}"
            return None
        query = trial.get(question.inputs[0])
        output = find_output(result, query)
        if output is None:
            kind = type(result).__name__
            self.problem = self.problem or (
                f"returns {kind}, where a tensor of {list(query.shape)} was awaited"
            )
            return None
        trial.adapter = replace(adapter, output=output)
        return trial, question


def raised_at(error: Exception) -> str:
    """Where an error was raised: the last line that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f for f in frames if not f.filename.startswith(ours)]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def find_output(result: Any, query: Tensor) -> str | None:
    """Where in a result lies what has the shape of the query, but for its width."""
    parts: list[tuple[str, Any]] = [("", result)]
    if isinstance(result, dict):
        parts = [(f"[{key!r}]", value) for key, value in result.items()]
    elif isinstance(result, tuple | list):
        parts = [(f"[{n}]", value) for n, value in enumerate(result)]
    for where, value in parts:
        if isinstance(value, Tensor) and value.shape[:-1] == query.shape[:-1]:
            return where
    return None


def effect(
    trial: Trial, question: Question, change: dict[str, Any], look: dict[str, Any]
) -> float:
    """How far the output moves at `look` if keys and values do at `change`."""
    before = trial.call(question)
    after = trial.call(trial.change(question, **change))
    difference = trial.get(f"({after} - {before}){trial.adapter.at(**look)}")
    return float(difference.detach().abs().nan_to_num(torch.inf).sum())


def refuse_unknown(inquiry: Inquiry) -> None:
    """Raise `CannotBeCalled` where an option names an argument that is not there."""
    adapter, options = inquiry.adapter, inquiry.options
    parameters = names.arguments(adapter.target)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    taken = names.named(parameters)
    wanted = {"mask": [*options.mask], "call": [*options.call]}
    wanted["cache"] = [*(options.cache or ())][:1]
    for option, said in wanted.items():
        for name in said:
            if name not in taken and name != "none":
                raise CannotBeCalled(
                    f"`{option}` names `{name}`, which `{adapter.name}` does not take; "
                    f"it takes {', '.join(taken)}"
                )


def find_heads(inquiry: Inquiry) -> None:
    """How many heads a module has, or a function is to be given."""
    target, options = inquiry.adapter.target, inquiry.options
    fixed = isinstance(target, nn.Module)
    heads = options.heads or names.attribute(target, "{heads}")
    kv_heads = options.kv_heads or names.attribute(target, "{kv_heads}")
    if heads is None:
        heads = 1 if fixed else 2 * kv_heads if kv_heads else 3
    groups = heads // kv_heads if kv_heads else 1
    inquiry.settle(heads=heads, groups=groups, fixed=fixed)
    if kv_heads:
        inquiry.learn("heads", f"{heads}, {kv_heads} of keys and values", "given")


def find_settings(inquiry: Inquiry) -> None:
    """What the constructor wants."""
    target, options = inquiry.adapter.target, inquiry.options
    settings = {name: repr(value) for name, value in options.settings.items()}
    known: dict[str, Any] = {"{heads}": options.heads, "{d_model}": options.d_model}
    known["{kv_heads}"] = options.kv_heads
    meanings = set()
    wanted = names.named(inspect.signature(target).parameters.values())
    for name, required in wanted.items():
        meaning = names.MEANING.get(name, "")
        meanings.add(meaning)
        if name in settings:
            known[meaning] = known.get(meaning) or options.settings[name]
        elif meaning.startswith("{") or (required and meaning):
            settings[name] = meaning
        elif required:
            raise CannotBeCalled(
                f"`{target.__name__}` wants `{name}`, and it is not known what that "
                f"is; say it with `--with {name}=...`, or check a module that is built"
            )
    given = [known.get(name) for name in ("{heads}", "{d_model}", "{kv_heads}")]
    heads, d_model, kv_heads = given
    heads_given = bool(heads)
    if not heads:
        heads = 2 * kv_heads if kv_heads else 3
        if "{heads}" not in meanings or (d_model and d_model % heads):
            heads = 1
    inquiry.settle(
        settings=settings,
        heads=heads,
        d_k=d_model // heads if d_model else 4,
        groups=heads // kv_heads if kv_heads else 1,
        fixed=bool(heads_given or d_model),
    )
    adapter = inquiry.adapter
    shown = adapter.build(Sizes(2, 5, 5, heads, adapter.d_k))
    inquiry.learn("built as", shown, "given" if options.settings else "inferred")


def find_inputs(inquiry: Inquiry) -> None:
    """One input or three, and whether they are passed by name."""
    adapter, options = inquiry.adapter, inquiry.options
    parameters = names.arguments(adapter.target)
    named = names.named(parameters)
    if not parameters and inspect.isbuiltin(adapter.target):
        named = dict.fromkeys(names.INPUTS[0], True)
    order = list(named)
    inputs: tuple[str, ...] = options.inputs or next(
        (roles for roles in names.INPUTS if set(roles) <= set(order)), tuple(order[:1])
    )
    if len(inputs) not in (1, 3):
        raise CannotBeCalled(
            f"`{adapter.name}` takes {', '.join(order) or 'nothing'}; say which are "
            f"its inputs with `--inputs x` or `--inputs query,key,value`"
        )
    keyword = order[: len(inputs)] != list(inputs) and set(inputs) <= set(order)
    keyword |= any(p.kind is p.KEYWORD_ONLY for p in parameters if p.name in inputs)
    # What the signature does not name goes where it takes any name.
    keyword |= not set(inputs) & set(order) and any(
        p.kind is p.VAR_KEYWORD for p in parameters
    )
    call = {
        name: None
        for name, required in named.items()
        if required and name not in inputs and names.LIKE_MASK.search(name)
    }
    inquiry.settle(call=call | dict(options.call))
    how = "given" if options.inputs else "inferred"
    inquiry.learn("inputs", ", ".join(inputs), how, inputs=inputs, keyword=keyword)


# Shapes of masks, those that can say most before those that can say less.
MASKS = ("b1qk", "bhqk", "bqk", "qkb", "nqk", "b11k", "bk", "qk")
WEIGHTS = ("bhqk", "qkbh", "bqk", "qkb", "nqk", "hqk", "qk")


def adapter(attention: Any, name: str, imports: str, options: Options) -> Adapter:
    r"""Find out how `attention` is called, as far as `options` leave it open.

    Raises `CannotBeCalled` where that did not succeed.
    """
    inquiry = Inquiry(Adapter(attention, name, imports, {}), options)
    if isinstance(attention, type):
        find_settings(inquiry)
    else:
        find_heads(inquiry)
    find_inputs(inquiry)
    refuse_unknown(inquiry)
    try:
        find_layout(inquiry)
        find_masks(inquiry)
        find_weights(inquiry)
        find_habits(inquiry)
    except Failed as failure:
        raise CannotBeCalled(
            f"`{name}` answers first, then raises {failure}{raised_at(failure.error)}; "
            f"does it keep something from call to call?"
        ) from failure
    return inquiry.adapter


def mask_candidates(inquiry: Inquiry) -> Iterator[Mask]:
    """All that the masks could be: what names say first, then every kind and shape."""
    adapter, options = inquiry.adapter, inquiry.options
    wanted: dict[str, str] = dict(options.mask)
    if wanted == {"none": ""}:
        return
    if not wanted:
        order = names.named(names.arguments(adapter.target)) or ["attn_mask"]
        free = [n for n in order if n not in (*adapter.inputs, *options.call)]
        wanted = {
            n: "" for n in free if names.LIKE_MASK.search(n) or names.FLAG.match(n)
        }
    for name, said in wanted.items():
        kind, _, axes = said.partition(":")
        kinds = [kind] if kind else ["keep", "hide", "additive"]
        if not kind and names.FLAG.match(name):
            kinds = ["flag"]
        elif not kind and "len" in name:
            kinds = ["lengths"]
        for each in kinds:
            shapes = {"flag": ("",), "lengths": ("bq", "b")}.get(each, MASKS)
            for shape in [axes] if axes else shapes:
                yield Mask(name, each, shape)


def find_layout(inquiry: Inquiry) -> None:
    """Along which axis tokens mix, and along which they do not."""
    adapter, options = inquiry.adapter, inquiry.options
    groups = [["bld", "lbd"], ["bhld", "blhd"], ["ld"]]
    if not adapter.is_module:
        groups = [groups[1], groups[0], groups[2]]
    if options.layout:
        groups = [[LAYOUTS.get(options.layout, options.layout)]]
    widths: list[int | None] = [None]
    if isinstance(adapter.target, nn.Module):
        guesses = names.widths(adapter.target)
        widths = [options.d_model] if options.d_model else [*guesses]
    for always in (None, *mask_candidates(inquiry)):
        for width in widths:
            for group in groups:
                found = {}
                for layout in group:
                    fields: dict[str, Any] = {"layout": layout, "width": width}
                    if width is not None:
                        fields["d_k"] = max(1, width // adapter.heads)
                    asked = inquiry.ask(always=always, **fields)
                    if asked is not None:
                        fields["output"] = asked[0].adapter.output
                        found[mixing(*asked)] = fields
                if found:
                    report_layout(inquiry, found[max(found)], always)
                    return
    raise CannotBeCalled(
        f"`{adapter.name}` could not be called with small random inputs: it "
        f"{inquiry.problem}; say how with `--layout`, `--inputs`, `--mask`, "
        f"`--with`, `--call` or `--d-model`"
    )


def mixing(trial: Trial, question: Question) -> float:
    """How much more tokens move their neighbours than batch items do."""
    tokens = effect(trial, question, {"l": slice(0, 3)}, {"l": slice(3, None)})
    items = effect(trial, question, {"b": slice(0, 1)}, {"b": slice(1, None)})
    return tokens - items * (trial.adapter.layout != "ld")


def report_layout(
    inquiry: Inquiry, fields: dict[str, Any], always: Mask | None
) -> None:
    """Enter what was found."""
    layout = fields["layout"]
    name = next((n for n, letters in LAYOUTS.items() if letters == layout), layout)
    how = "given" if inquiry.options.layout else "inferred"
    inquiry.learn("layout", name.replace("_", " "), how, always=always, **fields)


def find_masks(inquiry: Inquiry) -> None:
    """Which arguments hide keys, and how they say it."""
    given = dict(inquiry.options.mask)
    found: dict[str, list[Mask]] = {}
    least: dict[str, tuple[float, Mask]] = {}
    for mask in mask_candidates(inquiry):
        masks = found.setdefault(mask.name, [])
        if ":" in given.get(mask.name, "") or given.get(mask.name) == "flag":
            masks.append(mask)  # trusted, even if it does not work
        elif mask.kind == "lengths" or mask.kind not in {m.kind for m in masks}:
            leak = leakage(inquiry, mask)
            if leak is not None and leak < 1e-3:
                masks.append(mask)
            elif leak is not None and leak < least.get(mask.name, (math.inf,))[0]:
                least[mask.name] = leak, mask
    for name, masks in found.items():
        if not masks and name in least:
            masks.append(least[name][1])
        for mask in masks:
            report_mask(inquiry, mask)
    inquiry.settle(masks=tuple(mask for masks in found.values() for mask in masks))
    if not inquiry.adapter.masks:
        inquiry.learn("mask", "none", "given" if given else "inferred")


def report_mask(inquiry: Inquiry, mask: Mask) -> None:
    """Enter what was found."""
    meaning = {
        "keep": "True = may be read",
        "hide": "True = hidden",
        "additive": "added to the scores, 0 or minus infinity",
        "minimum": "added to the scores, 0 or the least finite number",
        "lengths": "how many keys may be read",
        "flag": "True = causal",
    }
    axes = ", ".join(AXES.get(axis, axis) for axis in mask.axes)
    how = "given" if inquiry.options.mask else "inferred"
    text = meaning[mask.kind] + (f" [{axes}]" if axes else "")
    inquiry.learn(f"`{mask.name}`", text, how)


def leakage(inquiry: Inquiry, mask: Mask) -> float | None:
    """What of a hidden key still arrives; None where the mask is refused."""
    if mask.kind == "flag":
        asked = inquiry.ask(call={**inquiry.adapter.call, mask.name: True})
        if asked is None:
            return None
        late, early = {"l": slice(3, None)}, {"l": slice(0, 3)}
        return effect(*asked, late, early) / (1e-9 + effect(*asked, early, late))
    # The last key but one of the last batch item, or of all, is hidden from all.
    last = inquiry.adapter.heads == 2
    item = slice(1 + last, None) if set("bn") & set(mask.axes) else slice(None)
    key = 4 if mask.kind == "lengths" else 3
    asked = inquiry.ask(way=mask, hide=(slice(None), slice(key, key + 1), item))  # type: ignore[arg-type]
    if asked is None:
        return None
    look = {"l": slice(7 - key, 8 - key), "b": item}  # the other of the last two
    hidden = effect(*asked, {"l": slice(key, key + 1)}, look)
    return hidden / (1e-9 + effect(*asked, {"l": slice(0, 3)}, look))


def find_weights(inquiry: Inquiry) -> None:
    """Where the weights lie, if they are shown."""
    adapter, options = inquiry.adapter, inquiry.options
    asked = inquiry.ask(k_len=5)
    if asked is None or options.weights == "none":
        return
    trial, question = asked
    trial.do(f"result = attention({trial.arguments(question)})")
    where, _, axes = options.weights.partition(":")
    places = [where] if where else [*weight_places(trial)]
    sizes = {"b": trial.sizes.batch_size, "h": adapter.heads, "q": 5, "k": 5}
    sizes["n"] = sizes["b"] * sizes["h"]
    for place in places:
        value = None
        with suppress(LookupError, AttributeError, TypeError):
            text = ("result" if place.startswith("[") else "attention") + place
            value = trial.get(text)
        for letters in [axes] if axes else WEIGHTS:
            shape = [sizes[letter] for letter in letters]
            if isinstance(value, Tensor) and list(value.shape) == shape:
                text = f"{place} [{', '.join(AXES[axis] for axis in letters)}]"
                how = "given" if options.weights else "inferred"
                inquiry.learn("weights", text, how, weights=place, weights_axes=letters)
                return
        if where:
            seen = list(value.shape) if isinstance(value, Tensor) else "no tensor"
            raise CannotBeCalled(
                f"`weights` (={options.weights!r}) are {seen}, where the sizes are "
                f"{', '.join(f'{letter}={size}' for letter, size in sizes.items())}"
            )


def refuse_unknown_parts(module: nn.Module, options: Options) -> None:
    """Raise `CannotBeCalled` where an option names a part that is not there."""
    learned = dict(module.named_parameters())
    parts = {*learned, *dict(module.named_modules())}
    said = [name.partition(":")[0] for name in options.projections.values()]
    for option, wanted, known in (
        ("projections", said, parts),
        ("unused", options.unused, {*learned}),
    ):
        for name in wanted:
            if name not in known:
                raise CannotBeCalled(
                    f"`{option}` names `{name}`, which is not there; there are "
                    f"{', '.join(sorted(known - {''}))}"
                )


def weight_places(trial: Trial) -> Iterator[str]:
    """Where weights could lie: further parts of the result, attributes."""
    result = trial.get("result")
    if isinstance(result, tuple | list):
        yield from (f"[{n}]" for n in range(len(result)))
    elif isinstance(result, dict):
        yield from (f"[{key!r}]" for key in result)
    if trial.adapter.is_module:
        for path, module in trial.get("attention").named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield f".{path}.{name}" if path else f".{name}"


def find_habits(inquiry: Inquiry) -> None:
    """What it does without being asked: causal, windowed, with positions, a cache."""
    adapter, options = inquiry.adapter, inquiry.options
    asked = inquiry.ask()
    assert asked is not None
    late, early = {"l": slice(3, None)}, {"l": slice(0, 3)}
    how = "inferred"
    causal = "causal" in adapter.name.lower()
    if options.causal is not None:
        causal, how = options.causal, "given"
    elif not causal and adapter.always is None:
        causal = effect(*asked, late, early) < 1e-6 < effect(*asked, early, late)
    inquiry.learn("causal by itself", "yes" if causal else "no", how, causal=causal)
    cross = len(adapter.inputs) == 3 and not causal
    cross = cross and inquiry.ask(k_len=7) is not None
    inquiry.settle(cross=cross, window=options.window, cache=options.cache)
    if options.window is not None:
        inquiry.learn("window", options.window, "given")
    how = "given" if options.positions else "assumed"
    positions = options.positions or "none"
    inquiry.learn("positions", positions, how, positions=positions)
    if adapter.is_module:
        asked = inquiry.ask(mode="train")
        trains = asked is not None and not effect(*asked, {"l": slice(0, 0)}, {})
        inquiry.settle(trains=trains, unused=options.unused)
        if not trains:
            why = "still random with dropout 0; only evaluation is checked"
            inquiry.learn("training", why, "inferred")
        built = inquiry.ask()
        assert built is not None
        module = built[0].get("attention")
        refuse_unknown_parts(module, options)
        found = names.projections(module, options.projections)
        inquiry.settle(projections=found)
