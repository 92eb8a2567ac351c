"""Studies with several lengths of each run: a trunk and its branches are, to the bit, the runs by themselves."""

import json

import pytest
from small_studies import BASE, counted_updates, records, study, without_times

pytestmark = pytest.mark.usefixtures("blank_pictures", "bare")

ARMS = {"cosine": {"lr_scheduler": "cosine"}, "wsd": {"lr_scheduler": "wsd:num_decay_steps=0.4,decay_type=linear"}}
BY_BRANCHES = {
    "base": {key: value for key, value in BASE.items() if key != "max_train_steps"} | {"lr_warmup_steps": 2},
    "arms": ARMS,
    "datasets": ["dino"],
    "seeds": 2,
    "horizons": [10, 20, 40],
}
# The same runs without the axis: nothing is shared between data sets.
SEPARATE = {**BY_BRANCHES, "base": {**BY_BRANCHES["base"], "validation_steps": 3}, "horizons": None}
SEPARATE["datasets"] = {f"dino@{num}": {"dataset_name": "dino", "max_train_steps": num} for num in (10, 20, 40)}
LEAVES = {10: 7, 20: 13, 40: None}  # the first update of a cool-down still has the rate of the plateau


def without_branch(record):
    record = without_times(record)
    record["run"]["executor"] = None
    return record


@pytest.fixture(scope="module")
def separate(home):
    return study(home, home / "separate", "--executor=local", **SEPARATE)


@pytest.fixture(scope="module")
def computed(home):
    """The study by its branches, computed run by run, and the updates that this took."""
    with counted_updates() as updates:
        return study(home, home / "branches", "--executor=local", **BY_BRANCHES), len(updates)


def test_branches_are_the_separate_runs_to_the_bit(separate, computed):
    folder, num_updates = computed
    expected, found = records(separate), records(folder)
    assert list(expected) == list(found)  # with the hash of everything that determines the result
    for name, record in found.items():
        assert json.dumps(without_branch(record)) == json.dumps(without_branch(expected[name])), name
        if record["run"]["arm"] == "wsd":
            weights = [run / "weights" / f"{name}.safetensors" for run in (separate, folder)]
            assert weights[0].read_bytes() == weights[1].read_bytes()
    # Of each seed: three cosines, the trunk, and what two branches add to it.
    assert num_updates == 2 * (10 + 20 + 40 + 40 + (10 - 7) + (20 - 13))
