r"""# Calls with a cache

A law that decodes calls an attention with some tokens and with the cache of those
before. The cache may be an argument, which a call modifies or returns anew, or a part
of the module, of which a sequence then needs a copy. A beam search reorders its items.

Source: the decoding loops of public code. [Another module](infer_cache.md) infers how
the cache is passed.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from attention_laws import caches, names
from attention_laws.adapter import Adapter, MaskArgument
from attention_laws.script import CallArguments, Script, find_output


def restart_with_cache(script: Script, mode: str = "eval") -> None:
    """Restart, and keep a copy of a module that stores its cache.

    In evaluation, a path of its own for a cache must not drop anything either.
    """
    script.restart(mode, dropout=0.0 if mode == "train" else 0.5)
    if script.adapter.cache == ("", ""):
        script.exec_line("unused = copy.deepcopy(attention)")


def empty_cache(script: Script) -> str:
    """What the first call gets as its cache; a module that stores it begins anew.

    Such a module may have a method that has to be called before.
    """
    if script.adapter.cache == ("", ""):
        script.exec_line("attention = copy.deepcopy(unused)")
    sizes = script.adapter.named_sizes(script.sizes)
    given = {"dtype": script.dtype, "device": repr(script.device)}
    text = script.adapter.empty_cache.format(**sizes, **given)
    if script.adapter.cache == ("", "") and text != "None":
        script.exec_line(text)
        text = "None"
    return text if text == "None" else script.assign("cache", text)


def cache_arguments(script: Script, start: int, stop: int) -> dict[str, str]:
    """The arguments beside the cache, for the tokens from `start` to `stop`."""
    return {
        name: text.format(start=start, stop=stop, device=script.to_device())
        for name, text in script.adapter.cache_args.items()
    }


def call_with_cache(
    script: Script,
    args: CallArguments,
    start: int,
    count: int,
    cache: str,
    mask: MaskArgument | None = None,
    only_new: bool = False,
) -> tuple[str, str]:
    """Compute `count` tokens from `start` on; return the output and the new cache.

    The mask is for all keys so far, or for those of this call only.
    """
    adapter = script.adapter
    assert adapter.cache is not None
    single_from = adapter.single_from
    if single_from is not None and start >= single_from and count > 1:
        outputs = []
        for place in range(start, start + count):
            output, cache = call_with_cache(
                script, args, place, 1, cache, mask, only_new
            )
            outputs.append(output)
        return script.concatenate(*outputs), cache
    argument, cache_index = adapter.cache
    stop = start + count
    index = adapter.index(l=slice(start, stop))
    inputs = tuple(script.assign(name, f"{name}{index}") for name in args.inputs)
    allowed = script.all_allowed(count, stop)
    if mask is not None:
        allowed = args.allowed[start:stop, start * only_new : stop]
    more = cache_arguments(script, start, stop)
    if argument:
        more[argument] = cache
    encoded = script.encode_mask(allowed, mask)
    method = f".{adapter.decode_method}" if adapter.decode_method else ""
    if adapter.prompted and not start:
        method = ""
    elif mask and not takes_in_steps(adapter, mask):
        encoded = None  # the padding so far is in the cache
    source = script.argument_source(
        CallArguments(inputs, encoded, allowed), start, **more
    )
    usual, script.context = script.context, script.context or adapter.cache_context
    try:
        result = script.assign("result", f"attention{method}({source})")
    finally:
        script.context = usual
    found = find_output(script.namespace[result], script.evaluate(inputs[0]), adapter)
    output = script.assign("y", f"{result}{found or ''}")
    if cache_index:
        cache = script.assign("cache", f"{result}{cache_index}")
    return output, cache


def takes_in_steps(adapter: Adapter, mask: MaskArgument) -> bool:
    """Whether the calls behind a prompt take a mask, too."""
    if not adapter.prompted:
        return True
    parameters = names.parameters_of_method(adapter.target, adapter.decode_method)
    return mask.name in {p.name for p in parameters}


def flip_cache(script: Script, cache: str, argument: str) -> str:
    """Reverse the batch items of a cache; return its variable, "" where it cannot be.

    A part of a cache that was returned is reordered along the axis that has the batch
    size. A module that stores its cache has a method for it, named as fairseq's, and so
    may the cache.
    """
    batch_size = script.sizes.batch_size
    methods = reorder_methods(script.namespace["attention"])
    order = f"torch.arange({batch_size}).flip(0){script.to_device()}"
    of_cache = reorder_methods(script.evaluate(cache)) if cache else []
    if of_cache:
        moved = script.assign("moved", f"{cache}.{of_cache[0]}({order})")
        return moved if script.evaluate(f"{moved} is not None") else cache
    if argument and methods:
        method = f"attention.{methods[0]}"
        given = [*inspect.signature(script.evaluate(method)).parameters]
        is_order = names.ORDER_PATTERN.fullmatch
        texts = [order if is_order(name) else cache for name in given]
        with script.attempt():
            moved = script.assign("moved", f"{method}({', '.join(texts)})")
            is_moved = script.evaluate(f"{moved} is not None")
            return moved if is_moved else cache
    if argument:
        if not script.evaluate(f"can_flip_items({cache}, {batch_size})"):
            return ""
        return script.assign("cache", f"flip_items({cache}, {batch_size})")
    if not methods:
        return ""
    script.exec_line(f"attention.{methods[0]}({order})")
    return cache


def reorder_methods(owner: Any) -> list[str]:
    """The names of methods of a module or cache that reorder batch items.

    That of a cache may have another name, and takes the items in their new order.
    """
    found = [name for name in dir(owner) if "reorder" in name]
    if not isinstance(owner, Tensor):
        for name, method in inspect.getmembers(type(owner), inspect.isfunction):
            arguments = [*inspect.signature(method).parameters][1:]
            is_one = len(arguments) == 1 and not name.startswith("_")
            is_one = is_one and not caches.RESET_PATTERN.fullmatch(name)
            is_one = is_one and name != "forward" and not hasattr(nn.Module, name)
            if is_one and names.ORDER_PATTERN.fullmatch(arguments[0]):
                found.append(name)
    return found


def owned_tensors(value: Any) -> list[Tensor]:
    r"""The tensors in a value, and in the attributes of its objects.

    >>> from types import SimpleNamespace
    >>> owned_tensors([SimpleNamespace(keys=Tensor([0, 0])), None])
    [tensor([0., 0.])]
    """
    seen: set[int] = set()

    def tensors(part: Any) -> Iterator[Tensor]:
        if isinstance(part, Tensor):
            yield part
        elif id(part) not in seen:
            seen.add(id(part))
            parts = part if isinstance(part, list | tuple) else ()
            owned = part if isinstance(part, dict) else getattr(part, "__dict__", {})
            for other in (*parts, *owned.values()):
                yield from tensors(other)

    return [*tensors(value)]
