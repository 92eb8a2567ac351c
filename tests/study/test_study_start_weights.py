"""Arms that start from weights, in stacks; they are known by their content."""

import pytest
import torch
from small_studies import ONE, SPEC, TINY, records, study, write_spec

from diffusers_lrlab import MLPDenoiser
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import load_spec

START = {"pretrained_model_name_or_path": "start"}
BASE = {key: value for key, value in SPEC["base"].items() if key != "model_config_name_or_path"}
pytestmark = pytest.mark.usefixtures("bare")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    torch.manual_seed(3)
    MLPDenoiser(**{key: value for key, value in TINY.items() if key != "_class_name"}).save_pretrained(folder / "start")
    return folder


def test_an_arm_that_starts_from_weights(start):
    out = study(start, start / "both", **ONE, base=BASE, arms={"whole": START})
    (record,) = records(out).values()
    assert record["run"]["executor"]["name"] == "stacked"
    assert len(record["train"]["started_from"]["sha256"]) == 64
    assert str(start) not in str(record["config"])


def test_other_weights_are_another_run(start):
    def ids():
        return [run.id for run in expand(load_spec(write_spec(start, **ONE, base=BASE, arms={"whole": START})))]

    before = ids()
    assert ids() == before
    MLPDenoiser(**{key: value for key, value in TINY.items() if key != "_class_name"}).save_pretrained(start / "start")
    after = ids()
    assert after != before
    file = start / "start" / "config.json"
    file.write_text(file.read_text().replace('"coordinate_scale": 25.0', '"coordinate_scale": 5.0'))
    assert ids() != after


def test_weights_that_do_not_fit_an_arm_are_named_with_it(start):
    arms = {"wrong": {**START, "denoiser": "mlp:num_layers=3"}}
    with pytest.raises(LabError, match="In the arm 'wrong' on 'dino'.*without parameters"):
        expand(load_spec(write_spec(start, **ONE, base=BASE, arms=arms)))
