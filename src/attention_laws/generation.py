r"""# Laws of generation

A language model continues a text with a method of its own, often with a KV cache: it
chooses one token after the other, and gives each back to the model. This path is seldom
called in training, and an error in it only makes texts worse. The tokens that it
chooses have to be those that the model rates highest behind the same text. Where a
search chooses them, such as a beam search, it calls methods for the beginning, for the
next tokens and for another order of the batch items; these have to give the logits of a
usual call.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3, for decoding one token at a time.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention_laws import documented, names
from attention_laws.adapter import Adapter, MaskArgument
from attention_laws.cached_calls import owned_tensors
from attention_laws.calling import context_of_all_items
from attention_laws.embedded import FIRST_ID, id_of_padding, takes_ids
from attention_laws.law import LawViolation, NotApplicable, law, skip_unless
from attention_laws.script import Script, parts_of

METHOD_PATTERN = re.compile(
    r"generate|greedy\w*|sample|complete|translate|decode_greedy"
)
# Arguments of such a method: how many tokens it makes, and with which ids.
COUNT_PATTERN = re.compile(
    r"n|((max|num|n)_?)?(new_?)?(tokens|steps|len(gth)?)|max_(gen|decode)\w*|n_new"
)
START_PATTERN = re.compile(
    r"((bos|sos|start|begin|decoder_start)_?(token)?_?(id|idx)?)"
)
SPECIAL_PATTERN = re.compile(r"(eos|end|stop|pad(ding)?|mask|unk)_?(token)?_?(id|idx)?")
# Arguments with which the largest logit is not what is chosen.
OTHER_CHOICE_PATTERN = re.compile("penalt|repeat|repetition|beam|ngram|min_")
# Arguments with which the largest logit is chosen, if it is not by default.
GREEDY: tuple[dict[str, str], ...] = (
    *({}, {"top_k": "1"}, {"greedy": "True"}, {"do_sample": "False"}),
    *({"sample": "False"}, {"temperature": "0.0"}),
)

# Tokens of the texts that are continued, one after the other, and of what is added. The
# second one has the shape of the first.
TEXT_LENGTHS = (5, 5, 3, 7)
NEW_TOKENS = 8


@law(slow=True)
def generated_tokens(script: Script) -> None:
    r"""Each generated token is the one that the model rates highest.

    $$t_{n+1} = \operatorname{argmax}_t \; y_n(t_1, \dots, t_n)_t$$

    A method that generates has a path of its own: a cache, which may still hold an
    earlier text, the positions of new tokens, or a cut of what is too long. It is
    called for several texts in turn, of equal and of other lengths, and each token is
    compared with the logits that a usual call gives for the tokens before it. This
    needs a method that takes the largest logit; one that draws tokens may have an
    option.
    """
    start_with_ids(script)
    methods = [*filter(METHOD_PATTERN.fullmatch, dir(script.adapter.target))]
    skip_unless(methods, "has no method that is named as one that generates")
    script.exec_line("zero_biases(attention)")
    calls = [each for name in methods for each in greedy_calls(script, name)]
    skip_unless(calls, "no method was found that takes the largest logit")
    for number, length in enumerate(TEXT_LENGTHS):
        assert_largest_is_chosen(script, *calls[0], length, number)


def start_with_ids(script: Script) -> None:
    """Build a model of token ids; skip others."""
    skip_unless(takes_ids(script.adapter.target), "takes no token ids")
    script.adapter = adapter = with_text(script.adapter)
    needs_more = bool(adapter.extra_args or adapter.position_args)
    skip_unless(not needs_more, "needs more than token ids")
    script.restart()
    script.call(script.make_arguments())  # which finds the embeddings of the ids


def with_text(adapter: Adapter) -> Adapter:
    """The adapter of a model that translates, also if its text is a constant else.

    So it is where the tokens of the translation may be padding, whose mask is no mask
    of the text.
    """
    given = [*adapter.extra_args.items()]
    is_text = len(given) == 1 and given[0][1] == context_of_all_items(adapter)
    if not (is_text and adapter.single_input):
        return adapter
    inputs = (*adapter.inputs, given[0][0])
    return replace(adapter, inputs=inputs, by_keyword=True, extra_args={}, masks=())


def greedy_calls(script: Script, method: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The method with arguments that give the same tokens for each seed."""
    given: dict[str, str] = {}
    parameters = names.parameters_of_method(script.adapter.target, method)[1:]
    for parameter in parameters:
        name, default = parameter.name, parameter.default
        if COUNT_PATTERN.fullmatch(name):
            given[name] = "{count}"
        elif OTHER_CHOICE_PATTERN.search(name) and default not in (None, 0, 1):
            return
        elif default is parameter.empty:
            if not (START_PATTERN.fullmatch(name) or SPECIAL_PATTERN.fullmatch(name)):
                return
            given[name] = "1" if START_PATTERN.fullmatch(name) else "2"
    known = {parameter.name for parameter in parameters}
    for choice in GREEDY:
        if {*choice} <= known and "{count}" in given.values():
            with script.rollback(), script.attempt():
                text = text_of_ids(script, TEXT_LENGTHS[0])
                found = []
                for seed in range(2):
                    script.exec_line("copied = copy.deepcopy(attention)")
                    script.exec_line(f"torch.manual_seed({seed})")
                    call = method, {**given, **choice}
                    found.append(generate(script, *call, text, "copied"))
                if all_equal(script, *found):
                    yield call


def all_equal(script: Script, *names_of_ids: str) -> bool:
    """Whether the values are tensors of integers, and the same."""
    first, second = map(script.evaluate, names_of_ids)
    return is_ids(first) and torch.equal(first, second)


def text_of_ids(script: Script, length: int, number: int = 0) -> str:
    """A variable of token ids, `[batch_size, length]`, which are all different.

    Texts of another `number` have others at the same places.
    """
    shape = f"{script.sizes.batch_size}, {length}"
    count = script.sizes.batch_size * length
    usual = min(vocabularies(script)) - 2 * FIRST_ID
    order = f"torch.arange({number}, {number + count})"
    ids = f"(7 * {order} % {usual} + {FIRST_ID}).view({shape})"
    return script.assign("text", ids + script.to_device())


def vocabularies(script: Script) -> set[int]:
    """How many ids the embeddings of the model have."""
    model = script.evaluate("attention")
    _count, tables = script.adapter.target.found_tables
    return {model.get_submodule(name).num_embeddings for name in tables}


def generate(
    script: Script,
    method: str,
    given: dict[str, str],
    text: str,
    model: str = "attention",
) -> str:
    """Continue a text; return the variable of the ids that the method returns."""
    count = script.evaluate(text).shape[1] + NEW_TOKENS
    parts = [text, *(f"{n}={value.format(count=count)}" for n, value in given.items())]
    tokens = script.assign("tokens", f"{model}.{method}({', '.join(parts)})")
    beside = [
        index for index, x in parts_of(script.evaluate(tokens)).items() if is_ids(x)
    ]
    return script.assign("tokens", f"{tokens}{beside[0]}") if beside else tokens


def is_ids(value: Any) -> bool:
    """Whether a value is the ids of the tokens of each batch item."""
    is_tensor = isinstance(value, Tensor) and value.dtype == torch.int64
    return is_tensor and value.dim() == 2


def assert_largest_is_chosen(
    script: Script, method: str, given: dict[str, str], length: int, number: int
) -> None:
    """Each token behind a text of this length has the largest logit there."""
    text = text_of_ids(script, length, number)
    tokens = generate(script, method, given, text)
    if translates(script):  # behind a first token, which may be returned, too
        length, start = 1, start_id(script, method)
        if not script.evaluate(f"({tokens}[:, 0] == {start}).all()"):
            first = f"torch.full_like({tokens}[:, :1], {start})"
            tokens = script.assign("tokens", f"torch.cat([{first}, {tokens}], dim=1)")
    elif not script.evaluate(f"torch.equal({tokens}[:, :{length}], {text})"):
        tokens = script.assign("tokens", f"torch.cat([{text}, {tokens}], dim=1)")
    special = special_ids(script, method)
    ids = script.assign("special", f"torch.tensor({special}){script.to_device()}")
    for n in range(length, min(script.evaluate(tokens).shape[1], length + NEW_TOKENS)):
        logits = logits_behind(script, f"{tokens}[:, :{n}]", text)
        logits = script.assign("logits", logits)
        usual = f"{logits}.index_fill(-1, {ids}, -torch.inf)"
        largest = f"torch.stack([{usual}.amax(-1), {logits}.amax(-1)], -1)"
        # Special tokens may be excluded; what follows one may fill the text.
        token = f"{tokens}[:, {n}:{n + 1}]"
        largest = f"{largest}.gather(-1, torch.isin({token}, {ids}).long())"
        is_over = f"torch.isin({tokens}[:, {length}:{n}], {ids}).any(1, keepdim=True)"
        is_largest = f"({logits}.gather(-1, {token}) > {largest} - 1e-3)"
        claim = f"({is_over} | {is_largest}).all()"
        message = f"token {n} that `{method}` gives has not the largest logit"
        script.assert_true(claim, message)


def logits_behind(script: Script, tokens: str, text: str) -> str:
    """Source text of the logits of the next token, `[batch_size, ids]`."""
    return f"{logits_of(script, tokens, text)}[:, -1]"


def logits_of(script: Script, tokens: str, text: str, **more: str) -> str:
    """Source text of the logits of a usual call, `[batch_size, tokens, ids]`."""
    adapter = script.adapter
    ids = [tokens, text][: len(adapter.inputs)]
    pairs = zip(adapter.inputs, ids, strict=True)
    parts = [f"{n}={each}" for n, each in pairs] if adapter.by_keyword else ids
    given = {name: repr(value) for name, value in adapter.call_args.items()} | more
    parts += [f"{name}={value}" for name, value in given.items()]
    result = script.assign("result", f"attention({', '.join(parts)})")
    index = index_of_logits(script.evaluate(result), vocabularies(script))
    skip_unless(index is not None, "returns no logits")
    return f"{result}{index}"


def index_of_logits(result: Any, sizes: set[int], axes: int = 3) -> str | None:
    r"""Where a result has logits of one of these numbers of ids, for each token.

    They have two axes if they are of one token.

    >>> index_of_logits((torch.zeros(2, 3, 8), None), {8})
    '[0]'
    """
    parts = parts_of(result).items() or [("", result)]
    for index, part in parts:
        if isinstance(part, Tensor) and part.dim() == axes and part.shape[-1] in sizes:
            return index
    return None


def start_id(script: Script, method: str) -> int:
    """The id with which a translation begins, by its name or the documentation."""
    stated = documented.first_id(script.adapter.target)
    found = ids_named(script, method, START_PATTERN) or stated
    skip_unless(len(found) == 1, "the id with which a text begins is not known")
    return found.pop()


def special_ids(script: Script, method: str) -> list[int]:
    """The ids that may end a text, or fill what is behind its end."""
    found = {*range(FIRST_ID)} | ids_named(script, method, SPECIAL_PATTERN)
    return sorted(n for n in found if n < min(vocabularies(script)))


def ids_named(script: Script, method: str, pattern: re.Pattern[str]) -> set[int]:
    """The ids of such names among the defaults of a method, and in the model."""
    parameters = names.parameters_of_method(script.adapter.target, method)
    owners = [{each.name: each.default for each in parameters}]
    for part in script.evaluate("attention").modules():
        owners += [vars(part), getattr(vars(part).get("config"), "__dict__", {})]
    return {
        value
        for owner in owners
        for name, value in owner.items()
        if pattern.fullmatch(name) and type(value) is int and value >= 0
    }


# Methods that prepare the decoding of a text, and that decode the next tokens.
BEGIN_PATTERN = re.compile("(start|begin|init|prefill|prepare|encode|precompute)\\w*")
NEXT_PATTERN = re.compile(
    r"(decode|step|next|predict|advance|incremental)"
    r"(_?(one|step|tokens?|next|logits|incremental|with_cache|cached))*"
)

NEW_PAST_PATTERN = re.compile(
    r"(new|init(ial)?|empty|make|create|start)_\w*(state|cache|past)\w*"
)
REORDER_PATTERN = re.compile("reorder|select_beams|permute_(batch|cache|state)")

# Tokens that are decoded, in pieces of several lengths.
PIECES = ([2, 1, 1, 2], [1, 3, 2], [1] * 6)


@dataclass(frozen=True)
class Decoding:
    """The methods of a model that decode, and the arguments that they take.

    `begin` makes a state of a text, and `step` takes it behind the new tokens. What
    `step` returns beside logits is the next state, or is given as `past`, unless that
    is one that it fills, made by the source text `new_past`. The text is another one,
    which is translated, or the first tokens. `step` may need it, too, and may take one
    token of each, `[batch_size]`.
    """

    begin: str
    step: str
    past: str = ""
    new_past: str = ""
    needs_text: bool = False
    takes_one: bool = False


@law(slow=True)
def decoding_methods(script: Script) -> None:
    r"""Methods that decode a text give the logits of a usual call.

    $$y(t_{m+1 \dots n} \mid t_{1 \dots m}) = y(t_{1 \dots n})_{m+1 \dots n}$$

    A search chooses the tokens itself: it calls a method that encodes the text, one for
    the next tokens, and one that reorders the batch items of the state. That may be in
    pieces of any length, with padding in the text, and with other texts in between. It
    is tested for methods that give the logits of a usual call for one token.
    """
    start_with_ids(script)
    found = next(decodings(script), None)
    if found is None:
        raise NotApplicable("no methods were found that encode a text and decode")
    masks = [m for m in script.adapter.masks if {*m.axes} <= {*"bk1"}]
    for mask in [None, *(masks[:1] if translates(script) else [])]:
        all_pieces = PIECES[-1:] if found.takes_one else PIECES
        for pieces in all_pieces:
            assert_pieces_give_logits(script, found, pieces, mask)
        given = script, found, all_pieces[0], mask
        methods = [*filter(REORDER_PATTERN.search, dir(script.adapter.target))]
        for method in methods:
            assert_pieces_give_logits(*given, method)
        for method in methods if methods and decodes_padding(*given) else ():
            assert_pieces_give_logits(*given, method, is_padded=True)


def decodes_padding(
    script: Script, found: Decoding, pieces: list[int], mask: MaskArgument | None
) -> bool:
    """Whether the new tokens may have padding among them, which is kept with them."""
    if padding_id(script) is None:
        return False
    try:
        assert_pieces_give_logits(script, found, pieces, mask, is_padded=True)
    except LawViolation:
        return False
    return True


def padding_id(script: Script) -> int | None:
    """The id of padding, if the model has one."""
    tables = script.adapter.target.found_tables
    if tables is None:
        return None
    model = script.evaluate("attention")
    return id_of_padding(model, model.get_submodule(tables[1][0]))


def translates(script: Script) -> bool:
    """Whether there is an encoder of another text."""
    return len(script.adapter.inputs) == 2


def decodings(script: Script) -> Iterator[Decoding]:
    """Pairs of methods that give the logits of a usual call for one token."""
    target = script.adapter.target
    begins = [n for n in dir(target) if BEGIN_PATTERN.fullmatch(n)]
    steps = [n for n in dir(target) if NEXT_PATTERN.fullmatch(n)]
    for begin, step in itertools.product(begins, steps):
        _tokens, *rest = names.parameters_of_method(target, step)
        optional = [p.name for p in rest[1:] if p.default is None]
        past = next(filter(names.CACHE_PATTERN.match, optional), "")
        source = script.adapter.inputs[-1] if translates(script) else ""
        needs_text = source in {parameter.name for parameter in rest[1:]}
        for takes_one in (False, True):
            found = Decoding(begin, step, past, "", needs_text, takes_one)
            with script.rollback(), script.attempt():
                if agrees_on_token(script, found):
                    ways = new_pasts(script) if past else []
                    made = (way for way in ways if fills_past(script, found, way))
                    yield replace(found, new_past=next(made, ""))


def agrees_on_token(script: Script, found: Decoding) -> bool:
    """Whether methods give the logits of a usual call for one token, without a past."""
    tokens, text = text_of_ids(script, 2), text_of_ids(script, 5)
    first = 0 if translates(script) else 1
    text = text if translates(script) else script.assign("text", f"{tokens}[:, :1]")
    usual = logits_of(script, f"{tokens}[:, : {first + 1}]", text)
    state, _past = begin_text(script, found, text, {})
    new = f"{tokens}[:, {first}:{first + 1}]"
    seen, _last = decode(script, found, new, text, state, {}, "")
    claim = f"torch.allclose({usual}[:, {first}:], {seen}, atol=1e-4)"
    return bool(seen and script.evaluate(claim))


def new_pasts(script: Script) -> list[str]:
    """Source texts of an empty past: a dict, or what a method makes of nothing."""
    target = script.adapter.target
    methods = [
        name
        for name in filter(NEW_PAST_PATTERN.fullmatch, dir(target))
        if not any(
            parameter.default is parameter.empty
            for parameter in names.parameters_of_method(target, name)
        )
    ]
    return ["{}", *(f"attention.{name}()" for name in methods)]


def fills_past(script: Script, found: Decoding, new_past: str) -> bool:
    """Whether a past of the caller, which is empty at first, is filled by a step."""
    found, text = replace(found, new_past=new_past), text_of_ids(script, 1)
    with script.rollback(), script.attempt():
        state, past = begin_text(script, found, text, {})
        decode(script, found, text, text, state, {}, past)
        return bool(owned_tensors([script.evaluate(past)]))
    return False


def mask_of_method(script: Script, method: str, given: dict[str, str]) -> str:
    """The mask of the text as an argument of a method; "" if it takes none."""
    parameters = names.parameters_of_method(script.adapter.target, method)
    known = {parameter.name for parameter in parameters}
    return "".join(f", {name}={text}" for name, text in given.items() if name in known)


def begin_text(
    script: Script, found: Decoding, text: str, given: dict[str, str]
) -> tuple[str, str]:
    """Encode a text; return source texts of its state, and of the past."""
    mask = mask_of_method(script, found.begin, given)
    past = script.assign("past", found.new_past) if found.new_past else ""
    state = script.assign("state", f"attention.{found.begin}({text}{mask})")
    logits, rest = logits_and_rest(script, state)
    return rest if logits and rest else state, past


def decode(
    script: Script,
    found: Decoding,
    tokens: str,
    text: str,
    state: str,
    given: dict[str, str],
    past: str,
) -> tuple[str, str]:
    """Decode tokens; return source texts of their logits, and of what is next."""
    more = mask_of_method(script, found.step, given)
    more += f", {script.adapter.inputs[-1]}={text}" if found.needs_text else ""
    more += f", {found.past}={past}" if past else ""
    tokens += ".squeeze(1)" * found.takes_one
    call = f"attention.{found.step}({tokens}, {state}{more})"
    result = script.assign("result", call)
    logits, last = logits_and_rest(script, result, axes=2 if found.takes_one else 3)
    if not logits:
        return "", ""
    logits += "[:, None]" * found.takes_one
    return logits, past if found.new_past else last


def logits_and_rest(script: Script, name: str, axes: int = 3) -> tuple[str, str]:
    """Source texts of the logits in a result, and of what is first beside them."""
    value = script.evaluate(name)
    index = index_of_logits(value, vocabularies(script), axes)
    others = [f"{name}{each}" for each in parts_of(value) if each != index]
    return "" if index is None else f"{name}{index}", others[0] if others else ""


def assert_pieces_give_logits(
    script: Script,
    found: Decoding,
    pieces: list[int],
    mask: MaskArgument | None,
    reorder: str = "",
    is_padded: bool = False,
) -> None:
    """Decode in pieces; with a method that reorders, items are flipped after one.

    The second token of the first item may be padding.
    """
    script.restart()
    text, other = text_of_ids(script, 5), text_of_ids(script, 7)
    tokens = script.assign("tokens", text_of_ids(script, sum(pieces)))
    if is_padded:
        script.exec_line(f"{tokens}[0, 1] = {padding_id(script)}")
    given = {}
    if mask is not None:
        allowed = script.all_allowed(5, 5)
        allowed[:, 3:, 0] = False
        name, value = script.encode_mask(allowed, mask) or ("", "")
        given = {name: value}
    start = 0
    if not translates(script):
        start, *pieces = pieces
        text = script.assign("text", f"{tokens}[:, :{start}]")
    with script.attempt():  # it may take one token only
        state, past = begin_text(script, found, text, given)
        begin_text(script, found, other, {})  # which changes nothing
        for number, n in enumerate(pieces):
            if reorder and number == 1:
                state, past = reordered(script, reorder, state, past)
                tokens = script.assign("tokens", f"{tokens}.flip(0)")
                text = script.assign("text", f"{text}.flip(0)")
                given = {n: f"{value}.flip(0)" for n, value in given.items()}
            piece = f"{tokens}[:, {start}:{start + n}]"
            seen, last = decode(script, found, piece, text, state, given, past)
            usual = logits_of(script, f"{tokens}[:, : {start + n}]", text, **given)
            message = f"`{found.step}` gives other logits for tokens {start} and later"
            claim = f"torch.allclose({usual}[:, {start}:], {seen}, atol=1e-3)"
            script.assert_true(claim, message)
            state, past = (state, last) if found.past else (last or state, "")
            skip_unless(past or not found.past, "how its past is made is not known")
            start += n


def reordered(script: Script, method: str, state: str, past: str) -> tuple[str, str]:
    """The state and the past, whose batch items a method has flipped.

    It takes one of them or both, and returns the first or changes them in place.
    """
    flip = f"torch.arange({script.sizes.batch_size}).flip(0)"
    parameters = names.parameters_of_method(script.adapter.target, method)
    takes_both = len(parameters) == 3 and bool(past)
    given = f"{state}, {past}" if takes_both else past or state
    moved = script.assign("state", f"attention.{method}({given}, {flip})")
    is_in_place = script.evaluate(moved) is None
    if takes_both or not past:
        return state if is_in_place else moved, past
    return f"{state}.flip(0)", past if is_in_place else moved
