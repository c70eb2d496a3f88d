r"""# Caches of a context

Cross-attention projects a context once, and keeps its keys and values: in the module,
in a cache of the caller, or as what a method prepares. The law of
[incremental decoding](decoding.md#incremental_decoding) tests each of these.

Source: the beam search of [fairseq](https://arxiv.org/abs/1904.01038) and the caches of
public encoder-decoder models.
"""

from dataclasses import replace

from torch import Tensor

from attention_laws import documented, names
from attention_laws.adapter import MaskArgument
from attention_laws.cached_calls import (
    empty_cache,
    flip_cache,
    reorder_methods,
)
from attention_laws.law import (
    LawViolation,
    ScriptError,
    skip_unless,
)
from attention_laws.prepared import takes_memory_too
from attention_laws.script import (
    CallArguments,
    Script,
)


def assert_equal_with_context_cache(script: Script) -> None:
    """With a cache of the context, outputs are those without, also of a padded context.

    The caller gives the mask each time, though it may be cached as well.
    """
    for allowed, mask in context_masks(script):
        script.restart()
        args = script.make_arguments(allowed, mask)
        given = {script.adapter.context_cache: begin_context_cache(script, args)}
        for _ in range(2):
            message = "{place} differs with a cache of the context"
            script.assert_close(script.call(args), script.call(args, **given), message)
        name = mask.name if mask else ""
        if name and documented.is_left_out_later(script.adapter.target, name):
            later = script.call(replace(args, mask=None), **given)
            message = f"{{place}} differs in a later call, without `{name}`"
            script.assert_close(script.call(args), later, message)


def context_masks(script: Script) -> list[tuple[Tensor, MaskArgument | None]]:
    """No mask, and masks that hide the last token of a context, if it has two."""
    last = slice(max(1, script.sizes.k_len - 1), None)
    unmasked = script.all_allowed(), script.adapter.required_mask
    return [unmasked, *script.padding_cases(last)]


def begin_context_cache(script: Script, args: CallArguments) -> str:
    """An empty cache for the context, or what a first call has returned of it."""
    index = script.adapter.context_cache_index
    if not index:
        return empty_cache(script)
    source = script.call_source(args, **script.adapter.cache_args)
    return script.assign("cache", f"{source}{index}")


def reorder_context_cache(script: Script) -> None:
    """If it has a method that reorders a cache of the context, it reorders all of it.

    The batch items, some with a padded context, change places after the first step.
    """
    argument, batch_size = script.adapter.context_cache, script.sizes.batch_size
    for allowed, mask in context_masks(script):
        script.restart()
        args = script.make_arguments(allowed, mask)
        cache = begin_context_cache(script, args)
        owners = [script.namespace["attention"], script.evaluate(cache)]
        is_reordered = any(map(reorder_methods, owners))
        if batch_size < 2 or not is_reordered or "b" not in script.adapter.layout:
            return
        script.call(args, **{argument: cache})
        cache = flip_cache(script, cache, argument)
        other = flip_arguments(script, args, allowed, mask)
        message = "{place} differs if the batch items of the cache are reordered"
        after = script.call(other, **{argument: cache})
        script.assert_close(script.call(other), after, message)


def flip_arguments(
    script: Script, args: CallArguments, allowed: Tensor, mask: MaskArgument | None
) -> CallArguments:
    """The arguments and their mask, with the batch items in the reverse order."""
    index = script.adapter.index(b=[*range(script.sizes.batch_size)][::-1])
    inputs = tuple(script.assign(name, f"{name}{index}") for name in args.inputs)
    encoded = script.encode_mask(allowed.flip(2), mask)
    return replace(args, inputs=inputs, allowed=allowed.flip(2), mask=encoded)


def assert_prepared_memory_is_kept(script: Script) -> None:
    """A second call without preparing gives the same, and reordered all items move.

    The memory is prepared by a method; items may have a padded one.
    """
    batch_size = script.sizes.batch_size
    for allowed, mask in context_masks(script):
        script.restart()
        args = script.make_arguments(allowed, mask)
        first = script.call(args)
        again = call_again(script, args)
        message = "{place} differs in a second call with the same memory"
        script.assert_close(first, again, message)
        if takes_memory_too(script.adapter.target):
            message = "{place} differs if the memory is given and not prepared"
            usual = script.call(args, function="attention.unprepared")
            script.assert_close(usual, first, message)
        returned = script.evaluate("attention.prepared")
        owners = [script.namespace["attention"], *returned.values()]
        is_reordered = any(map(reorder_methods, owners))
        if batch_size < 2 or not is_reordered or "b" not in script.adapter.layout:
            continue
        for argument in returned:
            cache = f"attention.prepared[{argument!r}]"
            script.exec_line(f"{cache} = {flip_cache(script, cache, argument)}")
        if not returned:
            flip_cache(script, "", "")  # the module stores it
        other = flip_arguments(script, args, allowed, mask)
        moved = call_again(script, other)
        message = "{place} differs if the batch items of the memory are reordered"
        script.assert_close(script.call(other), moved, message)


def call_again(script: Script, args: CallArguments) -> str:
    """A call with the memory that is prepared already, and its own mask, if any."""
    _prepared, plain, *_bases = script.adapter.target.__mro__
    given = args.inputs[0]
    if args.mask is not None and args.mask[0] in names.parameters_by_name(plain):
        given += f", {'='.join(args.mask)}"
    return script.assign_output(f"attention.again({given})", args)


def assert_other_context_is_noticed(script: Script) -> None:
    """With the cache of another context, outputs are those without.

    An implementation that notices a context of another length has to notice one with
    other content, unless it documents that the caller begins with an empty cache.
    """
    argument, length = script.adapter.context_cache, script.sizes.k_len
    script.restart()
    first, other = script.make_arguments(), script.make_arguments()
    longer = script.make_arguments(script.all_allowed(k_len=length + 1))
    cache = empty_cache(script)
    given = {argument: cache}
    script.call(first, **given)
    try:
        with script.rollback():
            script.assert_close(script.call(longer), script.call(longer, **given), "")
    except (LawViolation, ScriptError):
        return  # it keeps the first context by intention
    skip_unless(
        not documented.begins_empty(script.adapter.target, argument),
        f"`{argument}` is documented to be empty for each context",
    )
    script.exec_line(f"{cache}.clear()")
    script.call(first, **given)
    message = "{place} differs with the cache of another context"
    script.assert_close(script.call(other), script.call(other, **given), message)
