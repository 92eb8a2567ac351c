"""The loss of held-out rows in diffusers' own scripts, unmodified, on tiny random models."""

import json
import shutil

import pytest

from diffusers_lrlab.core.streams import split_rows

from .cases import command, run
from .test_scripts import CHECKOUT, EXAMPLES, IN_TURN, UPDATES, differing, inputs, weights  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="DIFFUSERS_CHECKOUT does not name a checkout of diffusers"),
]


def trained(case, inputs, output, launcher, changed=None):  # noqa: F811
    arguments = [(changed or {}).get(each, each) for each in command(case, EXAMPLES, inputs, output, UPDATES)]
    done = run(arguments, launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    return weights(output), done.stderr


def without_held_out(images, folder):
    """A copy without the row that is held back, of an image or of a pair."""
    ((held_out,), _) = split_rows(8, 1)
    shutil.copytree(images, folder)
    for path in folder.glob(f"{held_out}[.-]*"):
        path.unlink()
    rows = (folder / "metadata.jsonl").read_text().splitlines(keepends=True)
    (folder / "metadata.jsonl").write_text("".join(row for number, row in enumerate(rows) if number != held_out))
    return folder


@pytest.mark.parametrize("case", IN_TURN)
def test_validations_leave_no_trace(tmp_path, inputs, case):  # noqa: F811
    """The weights are those of the bare script on the images that are left; of DreamBooth, where their order on the disk
    counts, those of a run that measures at its ends only."""
    options = ["--validation_fraction=0.2", "--strict"]
    seen, stderr = trained(case, inputs, tmp_path / "seen", [*options, "--validation_steps=7"])
    if case.data != "folder":
        left = without_held_out(inputs / case.data, tmp_path / "images")
        unseen, _ = trained(case, inputs, tmp_path / "unseen", None, {str(inputs / case.data): str(left)})
    else:
        unseen, _ = trained(case, inputs, tmp_path / "unseen", [*options, "--validation_steps=1000"])
    assert differing(unseen, seen) == []
    rows = [json.loads(line) for line in (tmp_path / "seen" / "lrlab" / "validation.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [0, 7, 14, UPDATES]
    assert len({row["validation_loss"] for row in rows}) == 4
    assert all(0 < row["validation_loss"] < 10 for row in rows)
    assert "the held-out loss (1 of 8 rows) was" in stderr
