r"""# Laws of order and distance

Attention sees a set, not a sequence: without positions, nothing but the mask tells one
place from another. What an attention declares beyond that, a window, a bias that grows
with distance, a rotation, is held to its own law.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 3.5;
[ALiBi](https://arxiv.org/abs/2108.12409), section 3;
[RoFormer](https://arxiv.org/abs/2104.09864), section 3.
"""

from dataclasses import replace

import torch

from attention_laws.law import NotApplicable, law, need
from attention_laws.trial import Question, Trial


def reorder(trial: Trial, name: str, order: list[int]) -> str:
    """The same tokens in another order."""
    return trial.let(name, f"{name}{trial.adapter.at(l=order)}")


@law
def key_order(trial: Trial) -> None:
    r"""Without positions, the order of keys does not matter.

    $$\textstyle\sum_j a_{ij} v_j = \sum_j a_{i\pi(j)} v_{\pi(j)}$$

    A sum does not know in which order it was taken. Who reshapes before transposing
    mixes tokens with heads, and the order begins to count.
    """
    adapter, length = trial.adapter, trial.sizes.k_len
    need(adapter.positions == "none", f"has positions: {adapter.positions}")
    need(adapter.window is None, "has a window, so order counts")
    need(length > 2, "needs three tokens")
    for mode in trial.modes():
        trial.begin(mode)
        if not (adapter.alone or adapter.causal):
            question = trial.ask()
            order, look = [*range(1, length), 0], slice(None)
        else:
            # Whoever asks must stay where it is. If it is causal, it comes last.
            question = trial.ask(trial.everything(length, length))
            order, look = [*range(1, length - 1), 0, length - 1], slice(-1, None)
        before = trial.call(question)
        inputs = list(question.inputs)
        for role in [0] if adapter.alone else [1, 2]:
            inputs[role] = reorder(trial, inputs[role], order)
        after = trial.call(replace(question, inputs=tuple(inputs)))
        said = f"{{place}} changes if keys come in the order {order}"
        trial.same(before, after, said, l=look)


@law
def query_order(trial: Trial) -> None:
    r"""Each query is answered by itself, and in its place.

    $$y_i(q_{\pi(1)}, \dots, q_{\pi(n)}) = y(q_{\pi(i)})$$

    Queries know nothing of one another. A softmax over the wrong axis makes them
    compete, and a `view` that mixes positions and heads makes them change places.
    """
    adapter = trial.adapter
    need(adapter.positions == "none", f"has positions: {adapter.positions}")
    need(not adapter.causal, "is causal by itself, so the order of queries counts")
    need(adapter.window is None, "has a window, so order counts")
    length = trial.sizes.k_len if adapter.alone else trial.sizes.q_len
    need(length > 1, "needs two queries")
    for mode in trial.modes():
        trial.begin(mode)
        question = trial.ask(trial.everything(length))
        together = trial.call(question)
        order = [*range(1, length), 0]
        with trial.attempt():
            query = reorder(trial, question.inputs[0], order)
            inputs = (query, *question.inputs[1:])
            after = trial.call(replace(question, inputs=inputs))
            before = reorder(trial, together, order)
            said = f"{{place}} changes if queries come in the order {order}"
            trial.same(before, after, said)
        if adapter.cross:
            query = reorder(trial, question.inputs[0], [0])
            inputs = (query, *question.inputs[1:])
            mask = trial.spell(question.keep[:1], adapter.always)
            alone = trial.call(Question(inputs, mask, question.keep[:1]))
            first = reorder(trial, together, [0])
            trial.same(first, alone, "{place} changes if others ask, too")


@law
def prefill(trial: Trial) -> None:
    r"""A sequence read in pieces gives what it gives in one.

    $$y(x_{1 \dots n}) = \left[\, y(x_{1 \dots m}),\; y(x_{m+1 \dots n} \mid x_{1 \dots
    m}) \,\right]$$

    While generating, the past is kept and only new tokens ask. The causal corner then
    belongs at the *last* key: aligned to the first, new queries see less the longer the
    past is.
    """
    adapter, length = trial.adapter, trial.sizes.k_len
    need(length > 1, "needs two tokens")
    for first in range(1, length):
        if adapter.cache is not None:
            in_pieces(trial, first)
            continue
        # Without a cache of its own it may be given one: new queries, and all keys.
        need(not adapter.alone and not adapter.causal, "declares no cache")
        keep = trial.everything(length, length).permute(2, 0, 1).tril().permute(1, 2, 0)
        ways = [way for way in trial.ways(keep) if way and way.can_say(keep[first:])]
        need(ways and adapter.cross, "takes no mask for new queries over old keys")
        for way in ways:
            trial.begin()
            question = trial.ask(keep, way)
            whole = trial.call(question)
            query = trial.let(
                "query", f"{question.inputs[0]}{adapter.at(l=slice(first, None))}"
            )
            inputs = (query, *question.inputs[1:])
            piece = trial.call(Question(inputs, trial.spell(keep[first:], way), keep))
            whole = trial.let("y", f"{whole}{adapter.at(l=slice(first, None))}")
            said = f"after the first {first} alone, {{place}} reads something else"
            trial.same(whole, piece, said)


def in_pieces(trial: Trial, first: int) -> None:
    """The first tokens, then the others with what the cache kept."""
    adapter, length = trial.adapter, trial.sizes.k_len
    assert adapter.cache is not None
    argument, place = adapter.cache
    trial.begin()
    question = trial.ask(trial.everything(length, length))
    whole = trial.call(question)
    pieces, state = [], "None"
    for piece in (slice(0, first), slice(first, None)):
        index = adapter.at(l=piece)
        inputs = tuple(trial.let(name, f"{name}{index}") for name in question.inputs)
        asked = trial.arguments(
            Question(inputs, None, question.keep), **{argument: state}
        )
        result = trial.let("result", f"attention({asked})")
        pieces.append(trial.let("y", f"{result}{adapter.output}"))
        state = trial.let("state", f"{result}{place}")
    said = f"after the first {first} alone, {{place}} reads something else"
    trial.same(whole, trial.join(*pieces), said)


@law
def window(trial: Trial) -> None:
    r"""Within a window of $w$, a query reads itself and what is less than $w$ away.

    $$a_{ij} = 0 \iff |i - j| \ge w$$

    A window off by one passes every test of shapes. Both edges are asked: the key just
    outside must not be read, and the key just inside must be.
    """
    adapter = trial.adapter
    width = adapter.window
    if width is None:
        raise NotApplicable("declares no window")
    length = max(trial.sizes.k_len, width + 1)
    trial.sizes = replace(trial.sizes, q_len=length, k_len=length)
    keep = trial.everything(length, length)
    for mode in trial.modes():
        trial.begin(mode)
        question = trial.ask(keep, adapter.always)
        before = trial.call(question)
        for n in range(length):
            with trial.attempt():
                after = trial.call(trial.change(question, l=slice(n, n + 1)))
                far = [i for i in range(length) if abs(i - n) >= width]
                said = f"{{place}} reads key {n}, outside its window of {width}"
                trial.same(before, after, said, l=far)
        # The farthest key that is still inside, for each query that has one.
        for query in range(width - 1, length):
            edge = query - width + 1
            with trial.attempt():
                after = trial.call(trial.change(question, l=slice(edge, edge + 1)))
                index = adapter.at(l=slice(query, query + 1))
                said = (
                    f"query {query} does not read key {edge}, in its window of {width}"
                )
                trial.holds(f"not torch.equal({after}{index}, {before}{index})", said)


def begin_alone(trial: Trial, length: int) -> None:
    """Begin with one head where weights are not shown, and the sizes are free."""
    sizes = replace(trial.sizes, q_len=length, k_len=length)
    if not trial.adapter.weights and not trial.adapter.fixed:
        sizes = replace(sizes, heads=trial.adapter.groups)
    trial.sizes = sizes
    trial.begin()


def alike(trial: Trial, length: int) -> Question:
    """A question in which all tokens are the same, so that only positions count."""
    question = trial.ask(trial.everything(length, length), trial.adapter.always)
    inputs = []
    for name in question.inputs:
        first = trial.adapter.at(l=slice(0, 1))
        inputs.append(trial.let(name, f"{name}{first}.expand_as({name}).clone()"))
    return replace(question, inputs=tuple(inputs))


def read_out(trial: Trial, length: int) -> str:
    """The weights of the first batch item and head, `[q_len, k_len]`.

    Shown by the attention, or read from the values: if the value of each key is a
    different unit vector, the output is the weights.
    """
    adapter = trial.adapter
    question = alike(trial, length)
    if adapter.weights:
        weights = trial.weights(question)
        index = [":" if letter in "qk" else "0" for letter in adapter.weights_axes]
        return trial.let("weights", f"{weights}[{', '.join(index)}]")
    if not adapter.alone and "h" in adapter.layout:
        return by_unit_vectors(trial, question, length)
    # With all tokens alike the weights do not depend on any one of them, so the output
    # moves with a token by its weight times one matrix. One head has but one.
    need(trial.sizes.heads == 1, "shows no weights, and cannot be built with one head")
    name = question.inputs[0 if adapter.alone else 2]
    trial.do(f"{name}.requires_grad_()")
    output = trial.call(question)
    trial.do("rows = []")
    for query in range(length):
        one = adapter.at(l=slice(query, query + 1), b=slice(0, 1))
        grad = trial.gradient(f"{output}{one}", name) + adapter.at(b=slice(0, 1))
        along = f"{grad}.movedim({adapter.layout.index('l')}, 0)"
        trial.do(f"rows.append({along}.flatten(1).norm(dim=1))")
    return trial.let("weights", "torch.stack(rows)")


def by_unit_vectors(trial: Trial, question: Question, length: int) -> str:
    """Each key in turn has a value of ones, and all others zeros."""
    adapter = trial.adapter
    query, key, value = question.inputs
    trial.do("columns = []")
    unit = ["0"] * 4
    unit[adapter.layout.index("l")] = ":"
    for n in range(length):
        ones = trial.let("value", f"torch.zeros_like({value})")
        trial.do(f"{ones}{adapter.at(l=slice(n, n + 1))} = 1")
        inputs = (query, key, ones)
        output = trial.call(replace(question, inputs=inputs))
        trial.do(f"columns.append({output}[{', '.join(unit)}])")
    return trial.let("weights", "torch.stack(columns, dim=1)")


def coarse(trial: Trial) -> float:
    """How far a ratio of weights may be from another, rounding included."""
    return max(1e-3, 32 * torch.finfo(trial.dtype).eps)


@law
def distance(trial: Trial) -> None:
    r"""With a linear bias, what is farther away counts less, by a constant factor.

    $$a_{ij} \propto e^{-m\,|i - j|}, \quad m \gt 0$$

    All tokens are made alike, so that scores differ by the bias only. With the sign of
    the bias wrong, the farthest token counts most; the loss still falls.
    """
    adapter = trial.adapter
    need(adapter.positions == "alibi", "declares no linear bias")
    length = max(3, trial.sizes.k_len)
    begin_alone(trial, length)
    weights = read_out(trial, length)
    last = f"{weights}[-1]"
    said = f"the last of {length} equal tokens reads the first one more than itself"
    trial.holds(f"{last}[-1] > {last}[0]", said)
    ratio = trial.let("ratio", f"{last}[1:] / {last}[:-1]")
    said = "the weights of equal tokens do not fall by a constant factor"
    claim = f"({ratio} / {ratio}[0] - 1).abs().max() <= {coarse(trial)}"
    trial.holds(claim, said)


@law
def relative(trial: Trial) -> None:
    r"""Only the difference of positions counts.

    $$\frac{a_{ij}}{a_{ij'}} = \frac{a_{i+1,\,j+1}}{a_{i+1,\,j'+1}}$$

    Rotated queries and keys meet at the angle between their positions; so it is for
    every relative scheme. A table for one layout of the pairs and a rotation for
    another (halves, or neighbours) is no rotation, and the place itself counts.
    """
    adapter = trial.adapter
    shift = adapter.positions in ("rotary", "alibi")
    need(shift, "declares no relative positions")
    if shifted(trial):
        return
    length = max(4, trial.sizes.k_len)
    begin_alone(trial, length)
    weights = read_out(trial, length)
    # The ratio of neighbouring keys, where all positions are shifted by one.
    ratio = trial.let("ratio", f"{weights}[:, 1:] / {weights}[:, :-1]")
    for query in range(2, length - 1):
        here = f"{ratio}[{query}, :{query}]"
        there = f"{ratio}[{query + 1}, 1:{query + 1}]"
        claim = f"({here} / {there} - 1).abs().max() <= {coarse(trial)}"
        said = f"queries {query} and {query + 1} weigh equal distances differently"
        trial.holds(claim, said)


def shifted(trial: Trial) -> bool:
    """Ask the same behind two hidden tokens, if a mask can hide them."""
    adapter, length = trial.adapter, trial.sizes.k_len
    longer = trial.everything(length + 2, length + 2)
    longer[:, :2] = False
    ways = trial.ways(longer)
    for way in ways:
        trial.begin()
        question = trial.ask(trial.everything(length, length), adapter.always)
        here = trial.call(question)
        sizes = replace(trial.sizes, q_len=2, k_len=2)
        inputs = tuple(
            trial.join(trial.draw("hidden", *adapter.shape(sizes, role)), name)
            for role, name in enumerate(question.inputs)
        )
        later = trial.call(Question(inputs, trial.spell(longer, way), longer))
        later = trial.let("y", f"{later}{adapter.at(l=slice(2, None))}")
        said = "{place} reads something else behind two hidden tokens"
        trial.same(here, later, said, relative=coarse(trial))
    return bool(ways)
