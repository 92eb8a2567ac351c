"""`python docs/cards.py` writes the cards of models in model_cards/ again, from the files beside them.

For a change of what cards say. The cards of studies stay as they were measured.
"""

import contextlib
import json
from pathlib import Path

from diffusers_lrlab.core.files import write_text
from diffusers_lrlab.core.manifest import write_manifest
from diffusers_lrlab.hub.card import model_card_text

CARDS = Path(__file__).parents[1] / "model_cards"
LICENCE = "apache-2.0"  # of this repository, and so of the results in it


def text_of(folder: Path) -> str:
    """The text of the card in a folder."""
    record = json.loads((folder / "lrlab" / "run.json").read_text(encoding="utf-8"))
    with contextlib.chdir(folder.parent):  # the example loads from where a reader is, not from this machine's path
        return model_card_text(Path(folder.name), record, LICENCE)


if __name__ == "__main__":
    for each in sorted(path.parent.parent for path in CARDS.glob("*/lrlab/run.json")):
        text = text_of(each)
        if text != (each / "README.md").read_text(encoding="utf-8"):
            write_text(each / "README.md", text)
            write_manifest(each)
            print(f"Wrote {each / 'README.md'}.")
