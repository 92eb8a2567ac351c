"""The schedules inside `diffusers.optimization`; in fresh processes where it matters what is imported when."""

import copy
import pickle
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from diffusers import optimization
from diffusers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType
from hosts import HAS_GREEDY
from tables import cases

import diffusers_lrlab
from diffusers_lrlab.schedules.registries import SCHEDULERS

NEW_NAMES = [name for name in (*SCHEDULERS, *SCHEDULERS.aliases) if "host" not in SCHEDULERS[name].traits]
BUILT = [*NEW_NAMES, "greedy:smooth=true"] if HAS_GREEDY else [name for name in NEW_NAMES if name != "greedy"]


USE = """
import torch
optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
scheduler = get_scheduler("step:step_size=2,gamma=0.5", optimizer, num_warmup_steps=1, num_training_steps=5)
lrs = []
for _ in range(5):
    lrs.append(optimizer.param_groups[0]["lr"]); optimizer.step(); scheduler.step()
assert lrs == [0.0, 1.0, 1.0, 0.5, 0.5], lrs
"""
OF_TRANSFORMERS = "\nfrom transformers.trainer_utils import SchedulerType; assert SchedulerType('rex') == 'rex'"
IMPORTS = {
    "before": "import diffusers_lrlab\nfrom diffusers.optimization import get_scheduler" + USE,
    "after": "from diffusers.optimization import get_scheduler\nimport diffusers_lrlab" + USE,
    "twice": "import diffusers_lrlab, importlib\nimportlib.reload(diffusers_lrlab)\nfrom diffusers import get_scheduler"
    + USE,
    "before transformers": "import diffusers_lrlab, transformers" + OF_TRANSFORMERS,
    "after transformers": "import transformers.optimization, diffusers_lrlab" + OF_TRANSFORMERS,
}


@pytest.mark.slow
def test_names_work_whatever_is_imported_first():
    """In processes that are forked from one that has imported torch; diffusers' own function and schedules stay.

    The package by itself imports nothing heavy.
    """
    code = textwrap.dedent(
        f"""
        import os, sys
        child = os.fork()
        if not child:
            import diffusers_lrlab
            assert not {{"torch", "diffusers", "transformers"}} & set(sys.modules)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, "something heavy is imported"
        import torch
        assert not {{"diffusers", "diffusers_lrlab"}} & set(sys.modules)
        for name, imports in {IMPORTS!r}.items():
            child = os.fork()
            if not child:
                exec(imports, {{}})
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, name
        import diffusers.optimization as o
        get_scheduler, before = o.get_scheduler, dict(o.TYPE_TO_SCHEDULER_FUNCTION)
        import diffusers_lrlab
        assert o.get_scheduler is get_scheduler
        assert len(before) == 7
        assert all(o.TYPE_TO_SCHEDULER_FUNCTION[member] is function for member, function in before.items())
        """
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=300, check=True)


def test_the_enum_stays_an_enum():
    for name in NEW_NAMES:
        member = SchedulerType(name)
        assert member is SchedulerType(name) is getattr(SchedulerType, name.upper()) is SchedulerType[name.upper()]
        assert (member.name, member.value) == (name.upper(), name)
        assert member in SchedulerType
        assert member in TYPE_TO_SCHEDULER_FUNCTION
        assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member
    num, spec = len(SchedulerType), SchedulerType("step:gamma=0.5")
    assert spec is SchedulerType("step:gamma=0.5") is pickle.loads(pickle.dumps(spec))
    assert len(SchedulerType) == num, "spec strings are not listed"
    pickle.dumps(TYPE_TO_SCHEDULER_FUNCTION[spec])


SPECS = [
    *("wsd:decay_type=1-sqrt,num_decay_steps=0.2", "warmup_stable_decay:min_lr_ratio=0.1,warmup_type=cosine"),
    "join:schedules=[constant|rex:d=0.9],boundaries=[0.5],scales=[1|0.5]",
    'join:{"schedules": ["linear", "cosine:num_cycles=1.5"], "boundaries": [12]}',
    "piecewise:updates=[0|0.5|1.0],values=[1|0.1|0]",
    *("mdlrc:min_momentum=0.2", "reduce_lr_on_plateau:patience=2"),
    # What diffusers' own get_scheduler does not reach of its own seven.
    *("linear:f_min=0.5", "polynomial:lr_end=1e-5", "cosine:warmup_type=cosine"),
    'piecewise_constant:{"step_rules": "1:5,0.1"}',
]


def adamw():
    return torch.optim.AdamW([torch.zeros(1)], lr=1e-3)


@cases("spec", [*BUILT, *SPECS])
def test_every_name_and_spec_string_makes_what_our_own_get_scheduler_makes(spec):
    warmup = 0 if spec.startswith("piecewise_constant") else 4
    theirs = optimization.get_scheduler(spec, adamw(), num_warmup_steps=warmup, num_training_steps=20)
    ours = diffusers_lrlab.get_scheduler(spec, adamw(), warmup, 20)
    assert type(theirs) is type(ours)
    assert theirs.state_dict() == ours.state_dict()


@cases(
    ("name", "part"),
    [
        ("reduce_lr_on_plateau", "PlateauWithWarmup needs a metric: call advance()"),
        ("cosin", "Did you mean 'cosine'"),
    ],
)
def test_wrong_names_are_explained(name, part):
    with pytest.raises(ValueError, match=re.escape(part)):
        optimization.get_scheduler(name, adamw(), num_warmup_steps=0, num_training_steps=20).step()
