"""Maps are the weights that the model uses, and an ablation changes one head only."""

from random import Random

import pytest
import torch

from headnotes.models import dates, heads
from headnotes.models.training import Settings, statistics
from headnotes.models.translator import Translator

SMALL = Settings(d_model=12, heads=3, d_ff=17, layers=2)


@pytest.fixture
def model() -> Translator:
    return SMALL.build().eval()


@pytest.fixture
def batch() -> dates.Batch:
    return dates.encode_pairs(dates.sample("train", 5, Random(2)))


def test_a_map_holds_the_weights_of_the_attention(
    model: Translator, batch: dates.Batch
) -> None:
    seen = {}
    cross = model.decoder[1].cross_attention

    def keep(module: object, _: object, kwargs: dict[str, torch.Tensor]) -> None:
        seen.update(kwargs)

    cross.register_forward_pre_hook(keep, with_kwargs=True)
    maps = heads.attention_maps(model, batch.source, batch.target, batch.source_lens)
    model(batch.source, batch.target, batch.source_lens)
    _, weights = cross(**seen, need_weights=True)
    torch.testing.assert_close(maps["decoder.1.cross"], weights)
    assert list(maps) == list(heads.attentions(model))


def test_no_weight_is_on_padding_and_a_missing_mask_is_seen(
    model: Translator, batch: dates.Batch
) -> None:
    assert len(set(batch.source_lens.tolist())) > 1
    assert statistics(model, batch)["padding"] == 0
    everything = torch.full_like(batch.source_lens, len(batch.source))
    maps = heads.attention_maps(model, batch.source, batch.target, everything)
    lengths = batch.source_lens, torch.full_like(batch.source_lens, len(batch.target))
    assert heads.statistics(maps, *lengths)["padding"] > 1


def test_zero_ablation_removes_what_one_head_adds(
    model: Translator, batch: dates.Batch
) -> None:
    ablated = heads.without_head(model, "encoder.1", 2)
    before, after = model.encoder[1].attention, ablated.encoder[1].attention
    x = torch.randn(7, 2, 12)
    contexts = []
    before.output.register_forward_pre_hook(lambda _, args: contexts.append(args[0]))
    full = before(query=x, key=x, value=x)
    part = contexts[0][..., 8:] @ before.output.weight[:, 8:].T
    torch.testing.assert_close(after(query=x, key=x, value=x), full - part)


def test_uniform_weights_change_one_head_only(
    model: Translator, batch: dates.Batch
) -> None:
    changed = heads.with_uniform_head(model, "decoder.0.cross", 1)
    arguments = batch.source, batch.target, batch.source_lens
    before, after = (heads.attention_maps(m, *arguments) for m in (model, changed))
    name = "decoder.0.cross"
    torch.testing.assert_close(after[name][..., [0, 2]], before[name][..., [0, 2]])
    length = int(batch.source_lens[3])
    uniform = torch.full((len(batch.target), length), 1 / length)
    torch.testing.assert_close(after[name][:, :length, 3, 1], uniform)


def test_an_unknown_attention_and_an_unknown_head_are_refused(
    model: Translator,
) -> None:
    with pytest.raises(ValueError, match=r"'decoder\.0'; the model has encoder\.0, "):
        heads.without_head(model, "decoder.0", 0)
    with pytest.raises(ValueError, match=r"`head` \(=3\) must lie from 0 to 2"):
        heads.with_uniform_head(model, "encoder.0", 3)
