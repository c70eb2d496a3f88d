"""Record the accuracy of the translator for several seeds.

`python benchmarks/seeds.py FOLDER ...` loads the last weights in each folder, which is
a complete run of `headnotes train dates --seed N`, and writes their exact match on
2,000 held-out texts to `src/headnotes/models/recorded/seeds.json`.
"""

import argparse
import json
from pathlib import Path
from random import Random

from attention_bench.report import write
from headnotes.models import dates
from headnotes.models.cli import HELD_OUT
from headnotes.models.training import RECORDED, exact_match, load_weights


def measure(folder: Path) -> dict[str, int | float | str]:
    """The exact match of a run's last weights, and what made them."""
    model, metadata = load_weights(max(folder.glob("weights-*.safetensors")))
    pairs = dates.sample("test", HELD_OUT, Random(0))
    share, _ = exact_match(model, pairs)
    return {
        "seed": metadata["settings"]["seed"],
        "steps": metadata["step"],
        "commit": metadata["commit"][:7],
        "pairs": len(pairs),
        "exact_match": share,
    }


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    runs = [measure(folder) for folder in parser.parse_args().folders]
    text = json.dumps({"runs": runs}, indent=2) + "\n"
    print(text)
    write(RECORDED / "seeds.json", text)


if __name__ == "__main__":
    main()
