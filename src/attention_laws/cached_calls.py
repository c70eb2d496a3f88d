r"""# Calls with a cache

A law that decodes calls an attention with some tokens and with the cache of those
before. The cache may be an argument, which a call modifies or returns anew, or a part
of the module, of which a sequence then needs a copy.

Source: [how the cache is passed](infer_cache.md) is inferred.
"""

from attention_laws import names
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
