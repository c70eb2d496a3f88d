r"""# Inferring how to build a module

A constructor's arguments are recognized by their names: widths, numbers of heads,
lengths, dropout, and configs that hold these. What remains unknown gets a value of its
type, or the error names it. An instance is checked at its own sizes.

Source: the [dictionary](names.md) of names, and the constructors of public code.
"""

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from attention_laws import configs, documented, names, structure
from attention_laws.adapter import CallError, Fact, Sizes, check_divisible
from attention_laws.calling import CallProbe
from attention_laws.embedded import small_config, small_sizes, takes_ids
from attention_laws.patches import SMALL_VISION, takes_patches
from attention_laws.script import Script
from attention_laws.source import source_with_bases

# Heads and their widths with which a class is built. Most accept the first; some
# require a power of two, or a width that is a multiple of 8.
# Behind them is the longest length, which may have to be small, and whether all widths
# are the same, also that of a context.
SIZES = (
    (3, 4, 320, False),
    (3, 4, 320, True),
    (4, 8, 320, False),
    (2, 32, 320, False),
    (2, 64, 320, False),
    (4, 4, 16, False),
)

# Query heads that share one head of keys and values, where the constructor takes both.
GROUP_SIZE = 2


def infer_heads(probe: CallProbe) -> None:
    """The number of heads that a module has, or that a function is called with."""
    target, options = probe.built or probe.adapter.target, probe.options
    is_instance = isinstance(target, nn.Module)
    heads = options.heads or structure.size_attribute(target, "{heads}")
    kv_heads = options.kv_heads or structure.size_attribute(target, "{kv_heads}")
    if heads is None:
        heads = kv_heads or 1 if is_instance else 2 * kv_heads if kv_heads else 3
        heads = default_heads(probe) or heads
    group_size = max(1, heads // kv_heads) if kv_heads else 1
    probe.update(heads=heads, group_size=group_size, fixed_size=is_instance)
    if kv_heads:
        source = "given" if options.kv_heads else "inferred"
        probe.record("heads", f"{heads}, {kv_heads} of keys and values", source)


def default_heads(probe: CallProbe) -> int:
    """The number of heads that a class has by default; 0 if none is named."""
    adapter = probe.adapter
    named = [name for name, text in adapter.init_args.items() if text == "{heads}"]
    default = (
        inspect.signature(adapter.target).parameters[named[0]].default if named else 0
    )
    return default if type(default) is int else 0


def infer_heads_of_function(probe: CallProbe) -> None:
    """One head, where neither the layout of a function nor an argument has more."""
    adapter = probe.adapter
    has_heads = "h" in adapter.layout or "{heads}" in str(adapter.extra_args)
    if not (adapter.is_module or has_heads or probe.options.heads):
        code = structure.identifiers(adapter.target)
        if not any("head" in name.lower() for name in code):
            probe.update(heads=1, d_k=adapter.heads * adapter.d_k)


def correct_group_size(probe: CallProbe) -> None:
    """As many heads of keys and values as the module states, once it is built.

    A config may have a field for their number that its attention ignores.
    """
    adapter, call = probe.adapter, probe.try_call()
    is_of_config = isinstance(adapter.target, type) and adapter.namespace
    if call is None or not is_of_config or adapter.group_size == 1:
        return
    kv_heads = structure.size_attribute(call[0].evaluate("attention"), "{kv_heads}")
    if kv_heads and adapter.heads % kv_heads == 0:
        probe.update(group_size=adapter.heads // kv_heads)


def infer_init_args(
    probe: CallProbe,
    heads: int = 3,
    d_k: int = 4,
    longest: int = 320,
    tie: bool = False,
    fill: bool = False,
) -> None:
    """Which arguments the constructor needs, and which sizes they leave.

    `heads`, `d_k` and the longest length are the sizes to build with, where no option
    gives them. With `tie`, all widths are the same. With `fill`, arguments of known
    names are given, such as the index of the layer, though they are None by default.
    """
    target, options = probe.adapter.target, probe.options
    # Braces stand for sizes, so those of a dict are doubled.
    init_args = {
        name: repr(value).replace("{", "{{").replace("}", "}}")
        for name, value in options.init_args.items()
    }
    sizes: dict[str, Any] = {
        "{heads}": options.heads,
        "{d_model}": options.d_model,
        "{kv_heads}": options.kv_heads,
    }
    present = set()
    namespace: dict[str, Any] = {}
    parameters = inspect.signature(target).parameters
    required_by_name = names.required_by_name(parameters.values())
    values = names.argument_values(required_by_name)
    values |= names.tied_widths(parameters, values, options, tie)
    values |= documented_widths(target, values)
    small = small_sizes(parameters.values()) if takes_ids(target) else {}
    if takes_patches(target):
        small = small_sizes(parameters.values(), SMALL_VISION)
    values |= small
    for name, required in required_by_name.items():
        value = values[name].replace("320", str(longest))
        value = names.pair_of(target, name, value) if value else value
        if not required and is_left_out(parameters[name].default, value):
            continue
        present.add(value)
        if name in init_args:
            sizes[value] = sizes.get(value) or options.init_args[name]
        else:
            text, scope = init_argument(probe, parameters[name], value, fill)
            if longest < 320:  # several windows, where a small image is not one
                text = text.replace("(3, 3)", "(8, 8)")
            init_args |= {name: text} if text else {}
            namespace |= scope
            present |= {*re.findall(r"{\w+}", text)}

    imports = [names.import_source(each) for each in namespace.values()]
    probe.update(
        init_args={**small, **init_args},
        namespace=namespace,
        imports="".join([probe.adapter.imports, *imports]),
    )
    infer_sizes(probe, sizes, present, heads, d_k)
    free_given_sizes(probe, values)
    adapter = probe.adapter
    built_as = adapter.build_expression(Sizes(2, 5, 5, adapter.heads, adapter.d_k))
    probe.record("built as", built_as, "given" if options.init_args else "inferred")


def documented_widths(target: Any, values: Mapping[str, str]) -> dict[str, str]:
    r"""The arguments of a constructor that name the features of a documented input.

    >>> class Forecaster(nn.Module):
    ...     def __init__(self, n_series, d_model=8):
    ...         super().__init__()
    ...     def forward(self, x): "x: (batch, time, n_series)"
    >>> documented_widths(Forecaster, {"n_series": "", "d_model": "{d_model}"})
    {'n_series': '{d_model}'}
    """
    features = {axes[-1] for axes in documented.shapes(target).values() if axes[2:]}
    return {
        name: "{d_model}"
        for name, value in values.items()
        if name in features and not value.startswith("{")
    }


def init_argument(
    probe: CallProbe, parameter: inspect.Parameter, value: str, fill: bool
) -> tuple[str, dict[str, Any]]:
    """Source text for an argument of the constructor, and the classes that it names.

    It is "" for an argument that is left out. `value` is the one for its name, and with
    `fill`, it may replace None.
    """
    target, name = probe.adapter.target, parameter.name
    required = parameter.default is parameter.empty
    if value.startswith("{") or (required and value):
        return value, {}
    given = names.small_side(parameter, value)
    if fill and not given:
        given = names.needed_default(parameter, value)
    if required and not given:
        given = names.first_choice(source_with_bases(target), name)
    is_config = name == "config" or configs.is_plain_config(parameter.default)
    if not given and (required or is_config):
        config = configs.config_source(target, parameter)
        if config is not None:
            return small_config(*config) if takes_ids(target) else config
    if required and not given:
        if (part := names.part_named(target, name)) is not None:
            return f"{part.__name__}()", {part.__name__: part}
        given = guessed_by_type(probe, parameter)
    return given, {}


def is_left_out(default: Any, value: str) -> bool:
    """Whether an argument named after a size is a flag, or a part that is absent."""
    if value == "{window}":
        return type(default) is not int
    if isinstance(default, tuple | list):
        return value.startswith("{")  # several sizes, where one has this name
    return type(default) is bool or (type(default) is int and default == 0)


def guessed_by_type(probe: CallProbe, parameter: inspect.Parameter) -> str:
    """A value for an argument of the constructor whose meaning is unknown."""
    probe.guessed = probe.guessed or parameter.name
    guess = names.GUESSED_TYPES.get(parameter.annotation)
    if guess is None:
        raise unknown_argument(probe.adapter.target, parameter.name)
    return guess


def unknown_argument(target: Any, name: str) -> CallError:
    """The error of a required argument, with which it is built, that is unknown."""
    return CallError(
        f"`{target.__name__}` requires `{name}`, whose meaning is unknown; give it "
        f"with `--init-args {name}=...`, or check an instance: write `built = "
        f"{target.__name__}(...)` in the file, and name `built`"
    )


def free_given_sizes(probe: CallProbe, values: Mapping[str, str]) -> None:
    """Let the sizes that are given vary, as examples, if the heads may.

    `values` has the size that each argument of the constructor is. A given number that
    is none, and equals one, may have to equal it.
    """
    adapter, init_args = probe.adapter, dict(probe.adapter.init_args)
    named = adapter.named_sizes(Sizes(2, 5, 5, adapter.heads, adapter.d_k))
    is_free = adapter.fixed_size
    for name, value in probe.options.init_args.items():
        size = values.get(name, "")
        if size.startswith("{") and named.get(size[1:-1]) == value:
            init_args[name] = size
        elif type(value) is int and value in named.values():
            is_free = False
    is_free = is_free and "{heads}" in str(init_args)
    probe.update(init_args=init_args, free_heads=is_free)


def infer_sizes(
    probe: CallProbe, given: dict[str, Any], present: set[str], heads: int, d_k: int
) -> None:
    """The sizes to build with: those that are `given`, and how many heads there are.

    `present` are the sizes that the constructor takes, such as "{heads}".
    """
    d_model, kv_heads = given["{d_model}"], given["{kv_heads}"]
    d_k = given.get("{d_k}") or d_k
    heads_given = bool(given["{heads}"])
    most_heads = heads
    if heads_given:
        heads = given["{heads}"]
    elif kv_heads:
        heads = GROUP_SIZE * kv_heads
    elif "{kv_heads}" in present and not d_model and heads == SIZES[0][0]:
        heads, kv_heads = 2 * GROUP_SIZE, 2
    elif "{heads}" not in present or (d_model and d_model % heads):
        heads = 1
    if d_model and "{d_k}" not in present:
        check_divisible("d_model", d_model, "heads", heads)
    if d_model and not given.get("{d_k}"):
        d_k = d_model // heads
    probe.update(
        heads=heads,
        d_k=d_k,
        d_model=d_model if d_model != heads * d_k else None,
        context_width=context_width(probe, d_model),
        group_size=heads // kv_heads if kv_heads else 1,
        fixed_size=bool(heads_given or d_model),
    )
    # Another width than that of all heads may be given under a name of its own.
    may_differ = probe.options.init_args and "{d_k}" not in present
    if d_model or (heads_given and not may_differ):
        return
    with suppress(Exception):
        if not {"{heads}", "{kv_heads}"} & present and "{d_k}" in present:
            # As many heads of the given width as fit.
            built = build(probe, most_heads)
            if structure.size_attribute(built, "{heads}") == most_heads:
                probe.update(heads=most_heads)
        if "{d_model}" not in present:
            # Its sizes are its own, such as those of a config without arguments.
            built = build(probe, heads)
            if any(True for _ in built.parameters()):
                probe.built = built
                if not heads_given:
                    infer_heads(probe)


def context_width(probe: CallProbe, d_model: int | None) -> int | None:
    """The width of the context, where an option gives another than that of queries."""
    given = probe.options.init_args.items()
    widths = {
        value
        for name, value in given
        if type(value) is int and names.CONTEXT_WIDTH_PATTERN.fullmatch(name)
    } - {d_model}
    return widths.pop() if d_model and len(widths) == 1 else None


def build_with(probe: CallProbe, init_args: dict[str, str]) -> None:
    """Build the class with these arguments from now on, and correct the fact."""
    probe.update(init_args=init_args)
    adapter = probe.adapter
    built_as = adapter.build_expression(Sizes(2, 5, 5, adapter.heads, adapter.d_k))
    facts = [f for f in adapter.facts if f.name != "built as"]
    source = "given" if probe.options.init_args else "inferred"
    probe.update(facts=(Fact("built as", built_as, source), *facts))


def build(probe: CallProbe, heads: int) -> nn.Module:
    """An instance of the class, with this number of heads."""
    sizes = Sizes(2, 5, 5, heads, probe.adapter.d_k)
    script = Script(probe.adapter, sizes, **probe.options.script_options())
    script.restart()
    built: nn.Module = script.evaluate("attention")
    return built
