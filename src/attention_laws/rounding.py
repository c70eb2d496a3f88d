r"""# What half precision rounds

Bfloat16 has 8 significant bits, so that it knows no odd position above 256. What is
rounded of an attention decides whether that is a bug: positions are integers, and have
to be exact. Two habits of published models round less than that: they count in the
dtype of their frequencies, which stay in float32 where the weights alone are converted,
or add a linear bias in the dtype of the scores.

Source: the [laws of positions](positions.md) and of [decoding](decoding.md) ask for it.
"""

import torch

from attention_laws import documented, recorders
from attention_laws.law import LawViolation, ScriptError, skip_unless
from attention_laws.recorded import (
    make_equal_tokens,
    record_equal_tokens,
    record_weights,
)
from attention_laws.script import Script


def rounds_with_buffers(script: Script, dtype: torch.dtype) -> bool:
    """Whether in float32, too, the outputs change with the dtype of the buffers alone.

    The buffers have the same numbers in both calls. Many libraries count positions in
    the dtype of the frequencies, and rely on it that these are not in half precision.
    """
    if not script.adapter.is_module:
        return False
    try:
        with script.using(dtype=torch.float32):
            script.restart()
            script.exec_line(f"convert_buffers(attention, {dtype})")
            script.exec_line("exact = copy.deepcopy(attention)")
            script.exec_line("convert_buffers(exact, torch.float32)")
            args = script.make_arguments()
            with recorders.MixedDtypes():
                rounded = script.call(args)
            exact = script.call(args, function="exact")
            # Far above what the rounding of their results changes.
            script.assert_close(exact, f"{rounded}.float()", "", relative=0.02)
    except LawViolation:
        return True
    return False


def assert_weights_are_exact(script: Script, length: int) -> bool:
    """The first weights of a model in bfloat16 are those of float32, for equal tokens.

    Its outputs tell less: the errors of all layers add up. Return whether the weights
    were found.
    """
    try:
        with script.using(dtype=torch.bfloat16, q_len=length, k_len=length):
            script.restart()
            args, logs = script.make_arguments(), []
            for dtype in (torch.bfloat16, torch.float32):
                script.exec_line(f"attention.to({dtype})")
                for name in args.inputs:
                    script.exec_line(f"{name} = {name}.to({dtype})")
                script.dtype = dtype
                if not (weights := record_equal_tokens(script, args)):
                    return False
                # Those in front of a window are zero.
                seen = script.evaluate(f"({weights}[0, -1] > 0).sum().item()")
                last = f"{weights}[:, -1, -{seen} :]"
                logs.append(script.assign("logs", f"{last}.float().log()"))
            rounded, exact = (f"({x} - {x}.mean(dim=-1, keepdim=True))" for x in logs)
            message = f"in bfloat16, the weights of {length} equal tokens differ"
            claim = f"({rounded} - {exact}).abs().max() <= 0.2 * {exact}.abs().max()"
            script.assert_true(claim, message)
    except LawViolation:
        skip_if_of_buffers(script, torch.bfloat16)
        raise
    except ScriptError as failure:
        if not script.is_unsupported(failure):
            raise
    return True


def skip_if_of_buffers(script: Script, dtype: torch.dtype) -> None:
    """Excuse positions in half precision that are so with the buffers of the module."""
    reason = (
        f"counts positions in the dtype of a buffer, which is rounded with the "
        f"module: keep it in float32 where the module is in {dtype}"
    )
    insists = script.insist or documented.works_in_half(script.adapter.target)
    skip_unless(insists or not rounds_with_buffers(script, dtype), reason)


def has_coarse_bias(script: Script, length: int) -> bool:
    """Whether a linear bias is rounded in a long sequence as in published models."""
    try:
        assert_bias_is_exact(script, length)
    except LawViolation:
        if script.insist or not rounds_bias(script, torch.bfloat16):
            raise
        return True
    return False


def assert_bias_is_exact(script: Script, length: int) -> None:
    """In bfloat16, too, the weights of the last keys fall by nearly one factor.

    A bias by the distance is exact for near keys. One by the position grows with the
    length, is rounded, and is the same for several keys.
    """
    try:
        with script.using(dtype=torch.bfloat16, q_len=length, k_len=length):
            script.restart()
            args = script.make_arguments()
            weights = record_weights(script, make_equal_tokens(script, args))
            if weights:
                logs = script.assign("logs", f"{weights}[:, -1, -12:].float().log()")
                steps = script.assign("steps", f"{logs}.diff(dim=-1)")
                message = (
                    f"in bfloat16, the bias of {length} tokens has coarse steps: "
                    f"compute it and add it in float32"
                )
                claim = f"({steps} - {steps}.mean(dim=-1, keepdim=True)).abs().max()"
                script.assert_true(f"not {claim} > 0.5", message)
    except ScriptError as failure:
        if not script.is_unsupported(failure):
            raise


def rounds_bias(script: Script, dtype: torch.dtype) -> bool:
    """Whether weights are off by no more than a linear bias by the position is rounded.

    It is as large as the slope times the length, and is rounded; so are position and
    slope, or product and sum. A wrong position changes the weights by more, unless
    slopes are powers of two; published models count positions in integers.
    """
    if script.adapter.positions != "alibi" or counts_in_half(script, dtype):
        return False
    found = []
    for each in (torch.float32, dtype):
        with script.using(dtype=each):
            script.restart()
            args = script.make_arguments()
            weights = record_weights(script, make_equal_tokens(script, args))
            if weights:
                found.append(script.evaluate(f"{weights}.detach().float()"))
    if len(found) < 2:
        return False
    # Smaller weights are not exact.
    exact, rounded = (w.clamp(min=torch.finfo(dtype).tiny).log() for w in found)
    slopes = found[0][:, -1].log().diff().nan_to_num(0, 0, 0).abs().amax(dim=-1)
    largest = 2 * torch.finfo(dtype).eps * slopes * script.sizes.k_len
    error = (rounded - exact).abs().amax(dim=(-2, -1))
    return bool((error <= largest + 0.1).all())


def counts_in_half(script: Script, dtype: torch.dtype) -> bool:
    """Whether positions are counted in this dtype, so that neighbors have the same."""
    with script.using(dtype=dtype):
        script.restart()
        args = script.make_arguments()
        with recorders.Ranges() as ranges:
            script.call(args)
    return bool(ranges.repeat)
