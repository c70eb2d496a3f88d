"""Laws of how it is run: each is broken by something, and by what it should be."""

import pytest
import torch

from headnotes.laws import LAWS, check
from headnotes.laws.modes import __name__ as family
from specimens import AnswersOnTheCpu, assert_caught

NAMES = [name for name, law in LAWS.items() if law.test.__module__ == family]


@pytest.mark.parametrize("name", NAMES)
def test_each_law_is_broken_by_who_breaks_it(name: str, device: torch.device) -> None:
    assert_caught(name, device.type)


def test_an_answer_on_another_device_is_seen(device: torch.device) -> None:
    laws = ["dtype_and_device"]
    report = check(AnswersOnTheCpu, only=laws, device=device.type)
    assert report.ok == (device.type == "cpu")
