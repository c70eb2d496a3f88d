"""The check of shape comments, on attention that others wrote.

Each file is copied as it is installed, with our claims beside its lines and an example
at its end. Nothing of theirs is kept here but how those lines begin.
"""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import resolve_name
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.torch_version import TorchVersion

from alterations import alterations
from sidenotes.shapes import Axes, Claim, claims, verify
from sidenotes.split import read, scope_of_lines
from sidenotes.trace import Trace, trace

# All weights are random: nothing is to be downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"

NOTES = Path(__file__).parent.parent / "data" / "public"
MODULES = {
    "gpt2": "transformers.models.gpt2.modeling_gpt2",
    "bert": "transformers.models.bert.modeling_bert",
    "llama": "transformers.models.llama.modeling_llama",
    "activation": "torch.nn.modules.activation",
    "functional": "torch.nn.functional",
}


def notes_of(name: str) -> dict[str, list[str]]:
    """The lines of an example, and by function how lines begin, each with its claim."""
    sections: dict[str, list[str]] = {}
    for line in (NOTES / f"{name}.txt").read_text(encoding="utf-8").split("\n"):
        if line.endswith(":") and not line.startswith(" "):
            lines = sections[line[:-1]] = []
        elif line:
            lines.append(line.strip())
    return sections


def source_of(name: str) -> str:
    """An installed file, as one that stands alone and has no examples of its own."""
    module = import_module(MODULES[name])
    source = read(Path(module.__file__ or "")).replace(">>>", "...")
    if name == "functional":
        # It describes functions of C when it is imported, and that may be done once:
        # so the one function only, which knows all that its file knows.
        names = ", ".join(name for name in vars(module) if not name.startswith("__"))
        nodes = {getattr(node, "name", ""): node for node in ast.parse(source).body}
        text = ast.get_source_segment(source, nodes["multi_head_attention_forward"])
        return f"from {module.__name__} import {names}\n\n{text}\n"

    def absolute(match: re.Match[str]) -> str:
        return f"from {resolve_name(match[1], module.__package__)} import"

    return re.sub(r"^from (\.\S+) import", absolute, source, flags=re.MULTILINE)


def annotated(name: str, source: str) -> str:
    """A source with our claims at the ends of its lines, and the example behind it."""
    notes = notes_of(name)
    lines = source.split("\n")
    scopes = scope_of_lines(ast.parse(source), len(lines))
    example = notes.pop("example")
    for symbol, entries in notes.items():
        rest = (number for number, scope in scopes.items() if scope == symbol)
        for entry in entries:
            code, _, claim = entry.partition("  # ")
            found = (n - 1 for n in rest if lines[n - 1].strip().startswith(code))
            number = next(found, None)
            if number is None:
                package = MODULES[name].split(".")[0]
                missing = (
                    f"{name}.txt: after the lines before it, no line of `{symbol}` "
                    f"begins with `{code}` in {package} {version(package)}"
                )
                if package == "torch" and TorchVersion(version(package)) < "2.12":
                    pytest.skip(missing)
                pytest.fail(missing)
            lines[number] += f"  # {claim}" if claim else ""  # or it is passed over
    prompts = [f"    >>> {line}" for line in example]
    return "\n".join([*lines, "def examples():", '    """', *prompts, '    """', ""])


def traced(name: str, source: str) -> tuple[list[Claim], Trace]:
    """The claims in a copy, and what its example shows."""
    torch.manual_seed(2017)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"copy_of_{name}.py"
        path.write_text(source, encoding="utf-8")
        # Without the shape comments of the authors, which are in round brackets.
        ours = [c for c in claims(source) if c.at_end and c.text.startswith("[")]
        return ours, trace(path)


@cache
def run(name: str) -> tuple[list[Claim], Trace]:
    """The claims of an installed file and its trace, made once for all tests."""
    pytest.importorskip(MODULES[name].split(".")[0], reason="it is in the extra `test`")
    return traced(name, annotated(name, source_of(name)))


def wrong(found: list[Claim], record: Trace) -> list[Claim]:
    """The claims that do not hold."""
    return [f.claim for f in verify(found, record) if f.verdict == "wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_every_claim_holds(name: str) -> None:
    found, record = run(name)
    notes = notes_of(name)
    del notes["example"]
    said = [note for entries in notes.values() for note in entries if "  # " in note]
    # One a bracket, and none that has got lost.
    assert len(found) == sum(note.count("[") for note in said)
    assert {claim.symbol for claim in found} == notes.keys()
    assert [f.message for f in verify(found, record) if f.verdict != "verified"] == []


def altered(axes: Axes, names: set[str]) -> Iterator[Axes]:
    """Two entries swapped, one renamed, one that is another number or expression."""
    for i, j in combinations(range(len(axes)), 2):
        if axes[i] != axes[j]:
            swapped = list(axes)
            swapped[i], swapped[j] = axes[j], axes[i]
            yield tuple(swapped)
    for i, entry in enumerate(axes):
        others = set() if entry.isidentifier() else {f"{entry} + 1"}
        others |= {entry.replace(old, new) for old, new in ("*+", "+*", "+-")}
        for word in re.findall(r"\w+", entry):
            whole = rf"\b{word}\b"
            others |= {re.sub(whole, name, entry) for name in {*names, "fresh"}}
        for other in sorted(others - {entry}):
            yield (*axes[:i], other, *axes[i + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_every_altered_claim_is_found(name: str) -> None:
    found, record = run(name)
    count = 0
    for other, noticed in alterations(found, record, altered):
        assert noticed, f"{other.code}: {other.text} goes unnoticed"
        count += 1
    assert count > 5 * len(found)


# What is put for what in the code, and how a line begins whose claim is then wrong: the
# code still runs, and in the models its output has the right shape.
ERRORS = {
    "heads and their width are exchanged": (
        "gpt2",
        "-1, self.head_dim)",
        "self.head_dim, -1)",
        "key_states = key_states.view(",
    ),
    "heads and their width are exchanged, once more": (
        "bert",
        "-1, self.attention_head_size)",
        "self.attention_head_size, -1)",
        "query_layer = self.query(",
    ),
    "heads are joined without being transposed": (
        "bert",
        "attn_output.transpose(1, 2).contiguous()",
        "attn_output.contiguous()",
        "attn_output = attn_output.contiguous()",
    ),
    "heads are joined without being transposed, once more": (
        "llama",
        "attn_output.transpose(1, 2).contiguous()",
        "attn_output.contiguous()",
        "attn_output = attn_output.contiguous()",
    ),
    "keys are tiled, not repeated": (
        "llama",
        "[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep,",
        "[:, None, :, :, :].expand(batch, n_rep, num_key_value_heads,",
        "hidden_states = hidden_states[:, None",
    ),
    "the output is left with the sequence first": (
        "activation",
        "attn_output = attn_output.transpose(1, 0)",
        "attn_output = attn_output.contiguous()",
        "attn_output = attn_output.contiguous()",
    ),
    "the average is over the batch, not the heads": (
        "functional",
        "attn_output_weights.mean(dim=1)",
        "attn_output_weights.mean(dim=0)",
        "attn_output_weights = attn_output_weights.mean(",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "old", "new", "line"), ERRORS.values(), ids=ERRORS)
def test_an_error_in_the_code_is_found(
    name: str, old: str, new: str, line: str
) -> None:
    run(name)  # or skip
    source = annotated(name, source_of(name))
    assert old in source
    claimed = wrong(*traced(name, source.replace(old, new)))
    assert [claim for claim in claimed if claim.code.startswith(line)]
    assert not [claim for claim in claimed if claim.symbol.endswith("Model.forward")]


@pytest.mark.slow
def test_an_error_that_keeps_every_shape_is_not_found() -> None:
    # Queries for keys: what `pytest --shapes` cannot see.
    run("gpt2")
    source = annotated("gpt2", source_of("gpt2"))
    old = "query_states, key_states, value_states = self.c_attn"
    assert old in source
    new = "key_states, query_states, value_states = self.c_attn"
    assert wrong(*traced("gpt2", source.replace(old, new))) == []


@pytest.mark.slow
def test_sizes_that_coincide_are_weak_here_too() -> None:
    # As many texts as heads: neither is known from the other any more.
    run("llama")
    source = annotated("llama", source_of("llama"))
    assert source.count("(23, (5, ") == 2
    findings = verify(*traced("llama", source.replace("(23, (5, ", "(23, (6, ")))
    assert {finding.verdict for finding in findings} == {"verified", "unverified"}
    expected = "no example distinguishes `batch` from `heads` (both 6)"
    assert [finding for finding in findings if expected in finding.message]


@pytest.mark.slow
def test_a_line_that_is_gone_is_named() -> None:
    run("llama")
    source = source_of("llama").replace("    x2 = x", "    second = x")
    expected = (
        "llama.txt: after the lines before it, no line of `rotate_half` begins with "
        f"`x2 =` in transformers {version('transformers')}"
    )
    with pytest.raises(pytest.fail.Exception, match=re.escape(expected)):
        annotated("llama", source)


@pytest.mark.slow
def test_calls_are_found_through_their_wrappers() -> None:
    # Decorators, `nn.Module.__call__`, checkpointing and a table of functions lie
    # between one of these and the next, in other files.
    _, record = run("gpt2")
    call = next(c for c in record.calls if c.symbol == "eager_attention_forward")
    chain = [call.symbol]
    while call.parent is not None:
        call = record.calls[call.parent]
        chain.append(call.symbol)
    assert chain == [
        "eager_attention_forward",
        "GPT2Attention.forward",
        "GPT2Block.forward",
        "GPT2Model.forward",
    ]
    block = [v for s in call.steps for v in s.values if v.name == "hidden_states"]
    # One for each of the two layers, beside the sum before them, and three after them.
    assert [v.shape for v in block] == 6 * [(2, 7, 55)]


@pytest.mark.slow
def test_the_values_recorded_are_those_of_torch() -> None:
    _, record = run("gpt2")
    calls = [c for c in record.calls if c.symbol == "eager_attention_forward"]
    assert len(calls) == 8  # two layers, each of itself and of another text, twice
    for call in calls:
        data = {value.name: torch.tensor(value.data) for value in call.arguments}
        scores = data["query"] @ data["key"].mT / 11**0.5
        weights = (scores + data.get("attention_mask", 0)).softmax(dim=-1)
        returned = call.steps[-1].values[1]
        assert returned.name == "return[1]"
        torch.testing.assert_close(torch.tensor(returned.data), weights)
