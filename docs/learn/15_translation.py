# %% [markdown]
# # A trained translation model, and what its heads learn
#
# This lesson looks into a small encoder-decoder Transformer that was trained to translate
# dates, such as *Sunday, May 3rd, 1998*, into ISO 8601, *1998-05-03*. It shows the
# cross-attention of every head, measures what each head contributes, and says what an
# attention map does and does not prove. It is for readers who have seen attention maps
# and want to know how far to trust them. You need
# [cross-attention](07_cross_attention.md), the [KV cache](11_kv_cache.md) and the
# [Transformer block](14_transformer_block.md). Reading time: 20 minutes.
#
# ## The model and its task
#
# The [translator](../source/models/translator.md) has two encoder and two decoder layers
# of four heads. Sources and targets are sequences of characters; the dates come from a
# [grammar](../source/models/dates.md) of five languages. A date belongs to the training
# or to the test by its hash, so no date of the test occurs in the training. `headnotes
# train dates` [trains](../source/models/training.md) it; this page loads the weights of
# such a run, after 10 %, 50 % and 100 % of its steps. The [attention
# explorer](../attention_explorer.md) plays the steps of the trained model for twelve texts,
# with the maps of all heads.

# %%
from random import Random

import torch

from headnotes.models import dates, heads
from headnotes.models.training import loss_and_accuracy, recorded
from headnotes.plots import display_attention

torch.set_grad_enabled(False)  # nothing is trained on this page
torch.set_num_threads(1)
snapshots = recorded()
last = max(snapshots)
model, record = snapshots[last]
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
print(f"seed {record['settings']['seed']}, commit {record['commit'][:7]}")

test = dates.sample("test", 500, Random(1))
held_out = dates.encode_pairs(test)
for step, (snapshot, _) in snapshots.items():
    loss, exact = loss_and_accuracy(snapshot, held_out)
    print(f"step {step:5,}: loss {loss:.4f}, {exact:.1%} of {len(test)} dates exact")
assert exact > 0.99

# %% [markdown]
# A date is *exact* if all of its characters are right. These are the losses of all steps:

# %% fold="Plotting code"
import matplotlib.pyplot as plt

INK, LIGHT = "#2f86d6", "#d55e00"


def draw_losses(losses, marks):
    """The loss of each step, and the steps whose weights are stored."""
    _, ax = plt.subplots(figsize=(6.2, 2.6))
    ax.plot(range(1, len(losses) + 1), losses, color=INK, linewidth=0.8)
    for step in marks:
        ax.axvline(step, color=LIGHT, linewidth=0.8, linestyle=":")
    ax.set(yscale="log", xlabel="step", ylabel="loss", xlim=(0, len(losses)))
    plt.show()


# %% alt="The loss of the training batches over all steps, on a logarithmic axis. It falls from more than 4 by three orders of magnitude; dotted lines mark 10 %, 50 % and 100 % of the steps."
draw_losses(record["losses"], snapshots)

# %% [markdown]
# ## Decoding, step by step
#
# The decoder generates one character at a time. It begins with the start token, and each
# new character becomes its next input. The cached keys and values of the source do not
# change; those of the target grow by one position per step. Here are the steps for one
# text, with the source character on which each head of the last cross-attention has its
# largest weight:

# %%
text = "sunday, may 3rd, 1998"


def maps_of(model, text):
    """The generated date, and the attention maps of its decoding."""
    source, source_lens = dates.encode([text])
    tokens = model.greedy(source, source_lens, 12)
    inputs = torch.cat([torch.tensor([[dates.START]]), tokens[:-1]])
    maps = heads.attention_maps(model, source, inputs, source_lens)
    (target,) = dates.decode(tokens)
    return target, {name: weights[:, :, 0] for name, weights in maps.items()}


target, maps = maps_of(model, text)
print("token ", *(f"head {h}".ljust(13) for h in range(4)))
for n, row in enumerate(maps["decoder.1.cross"]):  # [k_len, heads]
    token = [*target, "end"][n]
    largest, place = row.max(dim=0)
    seen = [
        f"{text[:k][-3:]}[{text[k]}]{text[k + 1 :][:3]}".ljust(9) + f"{weight:4.0%}"
        for k, weight in zip(place.tolist(), largest.tolist(), strict=True)
    ]
    print(f"{token:6}", *seen)
assert target == "1998-05-03"

# %% [markdown]
# The source character stands in brackets, between its neighbors.
#
# ## Cross-attention maps of every head
#
# A row is a generated character, a column a character of the source. These are the four
# heads of the first decoder layer, then the four of the second.

# %% fold="Plotting code"


def draw_cross(text, target, maps, layer):
    """The cross-attention of a layer: rows are the tokens that are generated."""
    weights = maps[f"decoder.{layer}.cross"]
    titles = [f"layer {layer}, head {h}" for h in range(weights.shape[-1])]
    display_attention([*target, "end"], [*text], weights, titles=titles)
    plt.show()


# %% alt="Four attention maps of the first decoder layer. Rows are the characters of the date 1998-05-03, columns those of the text ‘sunday, may 3rd, 1998’. The rows of the year have most weight on the year; many other rows spread over several characters."
draw_cross(text, target, maps, 0)

# %% alt="Four attention maps of the second decoder layer for the same text. Most rows have one or two bright cells: the year on the year, the rows of the day on the 3."
draw_cross(text, target, maps, 1)

# %% [markdown]
# The same layer for a text in another language, where the year has two digits and the
# order differs:

# %% alt="Four attention maps of the second decoder layer for the text ‘28. sept. 31’. The rows of the year, which are first, are bright at the end of the text, those of the day at its beginning."
german = "28. sept. 31"
target_german, maps_german = maps_of(model, german)
print(german, "->", target_german)
draw_cross(german, target_german, maps_german, 1)

# %% [markdown]
# ## What the heads attend to, measured
#
# Three maps are an anecdote. The grammar knows which characters of a text are its day, its
# month, its year and its weekday, so we can measure: while the decoder generates the year,
# how much of a head's weight is on the year of the source? And likewise for the others.
# Below is the mean over 200 held-out texts, beside the weight that uniform attention
# would have there.


# %% fold="Find the fields of a text"
from string import Formatter

FIELD = {"month": "month", "mon": "month", "m": "month", "mm": "month"}
FIELD |= {"d": "day", "dd": "day", "ordinal": "day", "spelled": "day"}
FIELD |= {"y": "year", "yy": "year", "weekday": "weekday"}
# Which rows of a map generate a field: the positions of 1998-05-03.
ROWS = {"year": slice(0, 4), "month": slice(5, 7), "day": slice(8, 10)}


def fields_of(day, language, form):
    """The field of each character of a text, or an empty string."""
    found = []
    for literal, name, _, _ in Formatter().parse(form):
        found += [""] * len(literal)
        if name:
            found += [FIELD[name]] * len(dates.write(day, language, f"{{{name}}}"))
    return found


def texts_with_fields(count):
    """Held-out pairs as a batch, and which characters belong to each field."""
    random, pairs, fields = Random(2), [], []
    while len(pairs) < count:
        language, form = random.choice(dates.FORMS)
        day = dates.draw_day(1969, 2068, random)
        if dates.split_of(day) == "test":
            text = dates.write(day, language, form)
            pairs.append(dates.Pair(text, day.isoformat()))
            fields.append(fields_of(day, language, form))
    batch = dates.encode_pairs(pairs)
    member = {
        field: torch.tensor(
            [
                [n < len(each) and each[n] == field for each in fields]
                for n in range(len(batch.source))
            ]
        )  # [source_len, batch_size]
        for field in ROWS
    }
    return batch, member


# %%
batch, member = texts_with_fields(200)
maps = heads.attention_maps(model, batch.source, batch.target[:-1], batch.source_lens)
names = [f"decoder.{layer}.cross" for layer in range(2)]
print("weight on the right field   year  month    day")
for name in names:
    for h in range(4):
        on_field = {
            field: torch.einsum(
                "ijb,jb->ib", maps[name][rows, ..., h], member[field].float()
            ).mean()
            for field, rows in ROWS.items()
        }
        print(f"{name}, head {h}     ", *(f"{x:6.0%}" for x in on_field.values()))
share = [(x.sum(0) / batch.source_lens).mean() for x in member.values()]
print("uniform weights            ", *(f"{x:6.0%}" for x in share))

# %% [markdown]
# With few exceptions, a head has several times the weight of uniform attention where the
# answer is. No head is *the* head for months: the tasks are shared.
#
# The hyphens are different. The weekday decides nothing, and yet the rows of the hyphens have
# weight there. A softmax must put its weight somewhere, also when nothing is needed: a
# head can learn to use characters without information for this, as in [attention
# sinks](13_sliding_windows_and_sinks.md).

# %% [markdown]
# ## What each head contributes: ablation
#
# A head with a clear map may still be useless: its output can be ignored, or another head
# can do the same. So we change one head at a time, and measure by how much the loss on
# held-out texts rises.
#
# - *Zero ablation* ([`without_head`](../source/models/heads.md#without_head)) removes what
#   the head adds to the output of its attention.
# - *Uniform weights* ([`with_uniform_head`](../source/models/heads.md#with_uniform_head))
#   leave the head the mean of its values, and remove only its choice among the keys.

# %%
part = dates.encode_pairs(test[:64])
base, _ = loss_and_accuracy(model, part)
costs = {}
for name, module in heads.attentions(model).items():
    for h in range(module.heads):
        zero, _ = loss_and_accuracy(heads.without_head(model, name, h), part)
        even, _ = loss_and_accuracy(heads.with_uniform_head(model, name, h), part)
        costs[f"{name}, head {h}"] = (zero - base).item(), (even - base).item()

# %% fold="Plotting code"


def draw_costs(costs):
    """The rise of the loss for each head, by zero ablation and by uniform weights."""
    _, ax = plt.subplots(figsize=(6.2, 5.2))
    places = range(len(costs))
    zero, even = zip(*costs.values(), strict=True)
    ax.barh([n - 0.2 for n in places], zero, 0.4, color=INK, label="zero ablation")
    ax.barh([n + 0.2 for n in places], even, 0.4, color=LIGHT, label="uniform weights")
    ax.set_yticks(places, costs, size=7)
    ax.invert_yaxis()
    ax.set(xlabel="rise of the loss")
    ax.legend(frameon=False)
    plt.show()


# %% alt="Two bars for each of the 24 heads: how much the loss rises when the head is removed, and when its weights are made uniform. A few heads cost far more than all others."
draw_costs(costs)

# %%
ranked = sorted(costs, key=lambda name: -costs[name][0])
print(f"loss of the whole model: {base:.4f}")
for name in [*ranked[:4], *ranked[-4:]]:
    zero, even = costs[name]
    print(f"{name:24} zero {zero:+.4f}   uniform {even:+.4f}")
assert costs[ranked[0]][0] > 100 * base
assert costs["decoder.1.cross, head 2"][0] < 0.01 < costs["decoder.1.cross, head 1"][0]

# %% [markdown]
# A few heads carry the model: without one of them, the loss is hundreds of times larger.
# Others cost nothing, although their maps look no worse. Head 2 of the last
# cross-attention has most of its weight on the right field in every case, as the table
# above shows, and the model does without it. Its work is done by the others, too. So the
# cost of removing one head is not the importance of what it does; that would need heads to
# be removed together.
#
# For most heads, uniform weights cost about as much as removal: what such a head
# contributes is its choice of keys.

# %% [markdown]
# ## The same head before, during and after training
#
# These are the weights of one head, that of the second layer's cross-attention whose
# removal costs most: untrained, and after 10 %, 50 % and 100 % of the steps.

# %%
from headnotes.models.training import Settings

torch.manual_seed(record["settings"]["seed"])
untrained = Settings(**record["settings"]).build().eval()
stages = {"untrained": untrained}
stages |= {f"step {step}": each for step, (each, _) in snapshots.items()}
costly = max(range(4), key=lambda h: costs[f"decoder.1.cross, head {h}"][0])
one = dates.encode_pairs([dates.Pair(text, target)])
stacked = torch.stack(
    [
        heads.attention_maps(each, one.source, one.target[:-1], one.source_lens)[
            "decoder.1.cross"
        ][:, :, 0, costly]
        for each in stages.values()
    ],
    dim=-1,
)
print(f"layer 1, head {costly}")

# %% alt="Four attention maps of one head. Untrained, the weights are spread over all characters; after 10 % of the steps they begin to concentrate, and at the end most rows have one or two bright cells."
_ = display_attention([*target, "end"], [*text], stacked, titles=[*stages])

# %% [markdown]
# ## What an attention map does not prove
#
# A column of a cross-attention map is a position of the *memory*, not a character: the
# encoder has mixed the characters by then. So a large weight on a character does not show
# that the information comes from it, and a small one does not show that it does not. The
# test is an intervention. We hide the columns of one field from the cross-attention, and
# measure how many of that field's characters the model still predicts.

# %%
memory, memory_mask = model.encode(batch.source, batch.source_lens)
wanted = batch.target[1:]
print("right characters   all columns   field hidden   most frequent character")
for field, rows in ROWS.items():
    shares = []
    for mask in (memory_mask, memory_mask & ~member[field]):
        best = model.decode(batch.target[:-1], memory, mask).argmax(-1)
        shares.append((best[rows] == wanted[rows]).float().mean())
    shares.append((wanted[rows] == wanted[rows].mode(1, True)[0]).float().mean())
    print(f"{field:18} {shares[0]:11.1%} {shares[1]:14.1%} {shares[2]:25.1%}")
    assert shares[0] > 0.99
    assert shares[1] < shares[2] + 0.15

# %% [markdown]
# Without the columns of a field, the model does little better than always giving the most
# frequent character. So here the information does stay with its characters, and the labels
# of the columns can be trusted. That is a result of the intervention; in a deeper encoder,
# it may be otherwise. What a map shows, and what it does not:
#
# - It shows which positions a head mixes, and with which weights: this is exact.
# - It does not show whether the model uses the result: ablate the head.
# - It does not show where the information comes from: hide or change the source.
#
# ## Mistakes, and their maps
#
# Of these held-out dates the trained model gets hardly any wrong, so here are mistakes of
# the model at half of the training:

# %%
half, _ = snapshots[last // 2]


def translate(model, text):
    """The date that a model generates for a text."""
    return dates.decode(model.greedy(*dates.encode([text]), 12))[0]


def mistakes_of(model):
    """The held-out pairs that a model gets wrong, with what it generates."""
    texts = dates.decode(model.greedy(held_out.source, held_out.source_lens, 12))
    pairs = zip(test, texts, strict=True)
    return [(pair, found) for pair, found in pairs if pair.target != found]


for step, each in ((last // 2, half), (last, model)):
    print(f"step {step:,}: {len(mistakes_of(each))} of {len(test)} dates are wrong")
for pair, found in mistakes_of(half)[:5]:
    print(f"  {pair.text}: {found}, not {pair.target}")

# %% [markdown]
# The digits are nearly always those of the text, in another order or place. The trained
# model fails on texts that no form of the grammar writes:

# %%
for other in ("3 may 1850", "vrijdag 1 mei 1998", "on may the 3rd of 1998"):
    print(f"{other}: {translate(model, other)}")

# %% [markdown]
# The training has no year before 1900, and no text in Dutch; the Dutch date is right, as its
# names resemble those of other languages. In the last text, the order is new; these are the
# maps:

# %% alt="Four attention maps of the second decoder layer for the text ‘on may the 3rd of 1998’, which is translated wrongly. The rows of the year and of the day are bright at the right characters; the rows of the month are bright at ‘of’."
target_wrong, maps_wrong = maps_of(model, other)
draw_cross(other, target_wrong, maps_wrong, 1)
assert target_wrong[5:7] == "02"

# %% [markdown]
# The rows of the month, `02`, have their weight on *of*, in the place where the training has
# a month: the model seems to take its *f* for February. Again the map suggests a cause,
# and an intervention tests it. We replace *of*:

# %%
months = set()
for letters in ("of", "om", "oj", "os"):
    changed = other.replace("of", letters)
    found = translate(model, changed)
    months.add(found[5:7])
    print(f"{changed}: {found}")
assert len(months) == 4

# %% [markdown]
# The month changes with these two letters, while *may* stands in the text unused. The map had
# suggested the right place.
#
# ## Speed, and the same model on `nn.Transformer`
#
# PyTorch's `nn.Transformer` computes the same function from the same weights. `python
# benchmarks/translator.py` trains both in turns, on the same batches and from the same
# start, and measures greedy decoding of 32 tokens with the KV cache and without it. This
# is what it recorded:

# %%
import json

from headnotes.models.training import RECORDED

compared = json.loads((RECORDED / "comparison.json").read_text(encoding="utf-8"))
print(f"{compared['device']}, {compared['threads']} thread, torch {compared['torch']}")
for name, figures in compared["training"].items():
    seconds = figures["median_cpu_seconds_of_a_step"]
    print(
        f"{name:15} {1 / seconds:.2f} training steps per second of CPU time, "
        f"{figures['exact_match']:.1%} exact after {compared['steps']} steps"
    )
decoding = compared["decoding"]
speedup = decoding["without_cache"] / decoding["with_cache"]
print(f"decoding with the cache: {speedup:.1f} times as fast")
ours, theirs = (
    each["median_cpu_seconds_of_a_step"] for each in compared["training"].values()
)
assert ours < 1.1 * theirs
assert speedup > 3

# %% [markdown]
# ## Try it
#
# Does the model know that February has 28 or 29 days? Translate *30 february 1998*, a date
# that no training text could have.

# %% fold="Answer"
print(translate(model, "30 february 1998"))

# %% [markdown]
# It writes what it reads: nothing in the training rewards a check of the calendar.
#
# ## In short
#
# - A model of 238,144 parameters, built from the modules of this site, translates held-out
#   dates in five languages almost without mistakes.
# - Its cross-attention maps are sharp, and can be measured: the weight on the field that
#   is being generated.
# - Only interventions show what is used: of 24 heads, a few carry the model, and others with
#   equally clear maps can be removed.
# - Hiding columns of the source shows where the information is.
#
# Next: the maps of other texts in the [attention explorer](../attention_explorer.md), the
# annotated [translator](../source/models/translator.md) and its
# [training](../source/models/training.md), or the [laws](../compare/laws.md) that test an
# attention module of your own.
