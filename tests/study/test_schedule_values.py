"""A schedule as a value and its spec string are one thing to a run and a study."""

import json

from diffusers_lrlab import TrainingConfig
from diffusers_lrlab.schedules import constant, join, rex
from diffusers_lrlab.schedules.resolve import resolve_schedule
from diffusers_lrlab.study.spec.expansion import expand
from diffusers_lrlab.study.spec.reading import read_spec
from diffusers_lrlab.training.resolve import resolve_config

JOINED = "join:schedules=[constant|rex:d=0.9],boundaries=[0.5]"


def study_of(schedule):
    return {
        "base": {"max_train_steps": 5},
        "arms": {"a": {"lr_scheduler": schedule}},
        "datasets": ["dino"],
        "seeds": 1,
        "metrics": ["kl"],
    }


def test_a_run_and_a_study_have_one_record_for_both_spellings():
    value = join([constant(), rex(d=0.9)], boundaries=[0.5])
    configs = [resolve_config(TrainingConfig(lr_scheduler=spec, output_dir="run")) for spec in (value, JOINED)]
    first, second = (json.dumps(config.to_dict()) for config in configs)
    assert first == second
    assert configs[0].schedule == resolve_schedule(JOINED)
    digests = [expand(read_spec(study_of(spec), "s"))[0].digest for spec in (value, JOINED)]
    assert digests[0] == digests[1]
