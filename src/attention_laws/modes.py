r"""# Laws of how it is run

The same attention is trained and evaluated, in float32 and in half precision, eagerly
and compiled, saved and loaded. None of this may change what it computes, beyond stated
tolerances.

Source: the promises are those of [PyTorch's
modules](https://docs.pytorch.org/docs/stable/notes/modules.html).
"""

import torch

from attention_laws.law import Failed, NotApplicable, law, need
from attention_laws.trial import Question, Trial


@law
def eval_without_dropout(trial: Trial) -> None:
    r"""Evaluation is training with dropout 0.

    $$y_{\text{eval}} = y_{\text{train}}\big|_{p = 0}$$

    What only one of the two modes does, a mask, a scale, a fast path, is a model that
    was never trained. Evaluation runs with dropout 0.5 set, recording gradients and
    not; training with 0.
    """
    need(trial.adapter.is_module, "is a function, and has no modes")
    need(trial.adapter.trains, "training is random even with dropout 0")
    for keep, way in trial.cases():
        trial.begin("eval", dropout=0.5)
        question = trial.ask(keep, way)
        output = trial.call(question)
        trial.quietly = True
        quiet = trial.call(question)
        trial.quietly = False
        trial.do("set_dropout(attention, 0.0)")
        trial.do("attention.train()")
        trained = trial.call(question)
        said = "the output at {place} is another in evaluation"
        trial.same(trained, output, said)
        said += ", under torch.no_grad()"
        trial.same(trained, quiet, said)


@law
def deterministic(trial: Trial) -> None:
    r"""Evaluated twice, it says the same twice.

    $$y_{\text{eval}} = y_{\text{eval}}$$

    Dropout that is handed to a function as a number is not switched off by `eval`; the
    module has to do it.
    """
    for keep, way in trial.cases():
        trial.begin("eval", dropout=0.5)
        question = trial.ask(keep, way)
        one, other = trial.call(question), trial.call(question)
        said = "two calls in evaluation differ at {place}"
        trial.same(one, other, said, relative=0.0)


@law
def nothing_modified(trial: Trial) -> None:
    r"""Inputs, masks, parameters and buffers are left as they were.

    $$x_{\text{after}} = x_{\text{before}}$$

    A tensor that was handed in belongs to someone else, who may use it in the next
    layer. A mask that is changed in place is right in the first layer only. (Buffers
    may count what they see, in training.)
    """
    for mode in trial.gradient_modes():
        for keep, way in trial.cases():
            trial.begin(mode)
            question = trial.ask(keep, way)
            watched = list(question.inputs)
            if question.mask is not None and question.mask[1] in trial.names:
                watched.append(question.mask[1])
            for name in watched:
                trial.do(f"{name}_before = {name}.clone(), {name}._version")
            if trial.adapter.is_module:
                kept = "parameters" if mode == "train" else "parameters buffers"
                kept = " ".join(f"*attention.named_{each}()," for each in kept.split())
                trial.do(f"state = [{kept.rstrip(',')}]")
                trial.do("state_before = {n: t.clone() for n, t in state}")
            trial.call(question)
            for name in watched:
                same = f"({name}, {name}_before[0])"
                trial.holds(f"torch.equal{same}", f"`{name}` is changed in place")
                said = f"`{name}` is written to, though its values are the same"
                trial.holds(f"{name}._version == {name}_before[1]", said)
            if trial.adapter.is_module:
                for name in trial.get("list(state_before)"):
                    same = f"(dict(state)[{name!r}], state_before[{name!r}])"
                    trial.holds(f"torch.equal{same}", f"`{name}` is changed by a call")


@law
def dtype_and_device(trial: Trial) -> None:
    r"""The output has the dtype and the device of the input.

    $$\operatorname{dtype}(y) = \operatorname{dtype}(x)$$

    Tables made in float32, masks made on the CPU and fills that half precision does not
    have show here.
    """
    usual = trial.dtype
    try:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            trial.dtype = dtype
            for keep, way in trial.cases():
                try:
                    trial.begin()
                    question = trial.ask(keep, way)
                    output = trial.call(question)
                except Failed as failure:
                    if "not implemented for" in str(failure):
                        continue
                    raise
                name = question.inputs[0]
                said = f"the output is not {dtype}, as its input is"
                trial.holds(f"{output}.dtype == {name}.dtype", said)
                said = "the output is on another device than its input"
                trial.holds(f"{output}.device == {name}.device", said)
    finally:
        trial.dtype = usual


@law(once=True)
def compiled(trial: Trial) -> None:
    r"""Compiled, it computes the same.

    $$y_{\text{compiled}} = y_{\text{eager}}$$

    `torch.compile` traces the call once and replays it; what depended on values, or was
    kept on the side, may be lost.
    """
    backend = "inductor" if trial.thorough else "aot_eager"
    *_, (keep, way) = trial.cases()
    trial.begin()
    question = trial.ask(keep, way)
    eager = trial.call(question)
    # Who has been compiled often is run eagerly, which would prove nothing.
    torch.compiler.reset()
    trial.do(f"compiled = torch.compile(attention, backend={backend!r})")
    try:
        output = trial.call(question, by="compiled")
    except Failed as failure:
        if "No working C++ compiler" in str(failure):
            raise NotApplicable("there is no C++ compiler here") from failure
        raise
    said = "compiled, the output at {place} is another"
    trial.same(eager, output, said)


@law(once=True)
def vmapped(trial: Trial) -> None:
    r"""Mapped over a further axis, it computes the same for each.

    $$\operatorname{vmap}(y)(x_1, x_2) = \big(y(x_1),\, y(x_2)\big)$$

    Ensembles and gradients for each example are computed by `torch.func.vmap`. It
    cannot follow decisions that depend on values; who makes them is not asked.
    """
    *_, (keep, way) = trial.cases()
    trial.begin()
    first = trial.ask(keep, way)
    second = trial.ask(keep)
    second = Question(second.inputs, first.mask, keep)
    one, other = trial.call(first), trial.call(second)
    names = ", ".join(first.inputs)
    pairs = zip(first.inputs, second.inputs, strict=True)
    stacked = ", ".join(f"torch.stack([{a}, {b}])" for a, b in pairs)
    asked = f"attention({trial.arguments(first)}){trial.adapter.output}"
    try:
        both = trial.let("both", f"torch.func.vmap(lambda {names}: {asked})({stacked})")
    except Failed as failure:
        raise NotApplicable(f"vmap cannot follow it: {failure}") from failure
    for n, output in enumerate((one, other)):
        said = "under vmap, the output at {place} is another"
        trial.same(output, f"{both}[{n}]", said)


@law
def autocast(trial: Trial) -> None:
    r"""Under autocast, it computes the same within a tenth.

    $$|y_{\text{bfloat16}} - y| \le 0.1 \max |y|$$

    Autocast runs products in bfloat16, which keeps 8 bits, and leaves the rest. A tenth
    of the largest entry is far above its rounding, and far below what a mask of the
    wrong size or dtype does.
    """
    for keep, way in trial.cases():
        trial.begin()
        question = trial.ask(keep, way)
        usual = trial.call(question)
        asked = f"attention({trial.arguments(question)}){trial.adapter.output}"
        device = trial.device.partition(":")[0]
        with_cast = f"with torch.autocast({device!r}, torch.bfloat16): "
        trial.do(f"{with_cast}cast = {asked}")
        said = "under autocast, the output at {place} is another"
        trial.same(usual, "cast", said, relative=0.1)


@law(once=True)
def state(trial: Trial) -> None:
    r"""What is saved and loaded, or copied, computes the same.

    $$y_{\text{loaded}} = y_{\text{saved}}$$

    A tensor that is neither parameter nor buffer is in no checkpoint. The state goes
    through bytes into a module that was built, or overwritten, differently.
    """
    adapter = trial.adapter
    need(adapter.is_module, "is a function, and has no state")
    trial.begin()
    question = trial.ask()
    output = trial.call(question)
    twin = trial.call(question, by="copy.deepcopy(attention)")
    said = "a deep copy computes something else at {place}"
    trial.same(output, twin, said)
    trial.do("import io")
    trial.do("torch.save(attention.state_dict(), file := io.BytesIO())")
    trial.do(f"torch.manual_seed({trial.seed + 1})")
    trial.do(f"loaded = {trial.build()}.eval()")
    trial.do("set_dropout(loaded, 0.0)")
    if not isinstance(adapter.target, type):
        trial.do("for weight in loaded.parameters(): weight.data.fill_(0.5)")
    trial.do("file.seek(0)")
    trial.do("loaded.load_state_dict(torch.load(file))")
    after = trial.call(question, by="loaded")
    said = "loaded from its state, it computes something else at {place}"
    trial.same(output, after, said)
