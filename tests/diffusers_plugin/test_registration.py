"""The schedules inside `diffusers.optimization` and `transformers.optimization`; in fresh processes where imports matter."""

import copy
import pickle
import re
import subprocess
import sys
import textwrap

import diffusers.optimization
import pytest
import torch
import transformers.optimization
from hosts import HAS_GREEDY, at_least
from tables import cases
from transformers.trainer_utils import SchedulerType

import diffusers_lrlab
from diffusers_lrlab.core.errors import LabError
from diffusers_lrlab.schedules.registries import SCHEDULERS

TABLES = {
    "diffusers": diffusers.optimization.TYPE_TO_SCHEDULER_FUNCTION,
    "transformers": transformers.optimization.TYPE_TO_SCHEDULER_FUNCTION,
}
OWN = {
    "diffusers": {name for name in SCHEDULERS if "host" in SCHEDULERS[name].traits},
    "transformers": {
        *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
        *("reduce_lr_on_plateau", "cosine_with_min_lr", "warmup_stable_decay"),
        *(["cosine_warmup_with_min_lr"] if at_least("transformers", 4, 56) else []),  # 4.49 lacks it
        *(["greedy"] if HAS_GREEDY else []),
    },
}


def new_names(library, has_feedback=False):
    """Those that a library lacks; transformers' programs give a loss to its own names alone."""
    names = [name for name in (*SCHEDULERS, *SCHEDULERS.aliases) if name not in OWN[library]]
    return [name for name in names if has_feedback or "feedback" not in SCHEDULERS[name].traits]


USE = """
import torch
optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
scheduler = get_scheduler("step:step_size=2,gamma=0.5", optimizer, num_warmup_steps=1, num_training_steps=5)
assert type(scheduler).__name__ == "CurveLR"
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
    """In forks of a process that has imported torch. The package by itself imports nothing heavy; diffusers' own stay."""
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


@cases("library", TABLES)
def test_the_enum_stays_an_enum_and_the_librarys_own_names_have_its_functions(library):
    functions, module = TABLES[library], sys.modules[f"{library}.optimization"]
    kind = SchedulerType if library == "transformers" else module.SchedulerType
    names, num = new_names(library, has_feedback=library == "diffusers"), len(kind)
    for spec in (*names, "rex:d=0.9", "linear:min_lr_ratio=0.1"):
        member = kind(spec)
        assert member is kind(spec) is pickle.loads(pickle.dumps(member)) is copy.deepcopy(member)
        assert (member.name, member.value) == (spec.upper(), spec)
        assert pickle.loads(pickle.dumps(functions[member]))
        assert library == "diffusers" or isinstance(member, str) and member == spec
    assert len(kind) == num, "spec strings are not listed"
    for name in names:
        assert kind(name) is getattr(kind, name.upper()) is kind[name.upper()]
        assert kind(name) in kind
    for name in OWN[library]:
        assert functions[kind(name)] is vars(module)[functions[kind(name)].__name__]
    assert module.get_scheduler.__module__ == module.__name__


SPECS = [
    *("wsd:decay_type=1-sqrt,num_decay_steps=0.2", "warmup_stable_decay:min_lr_ratio=0.1,warmup_type=cosine"),
    "join:schedules=[constant|rex:d=0.9],boundaries=[0.5],scales=[1|0.5]",
    'join:{"schedules": ["linear", "cosine:num_cycles=1.5"], "boundaries": [12]}',
    "piecewise:updates=[0|0.5|1.0],values=[1|0.1|0]",
    "mdlrc:min_momentum=0.2",
    # What diffusers' own get_scheduler does not reach of its own seven.
    *("linear:f_min=0.5", "polynomial:lr_end=1e-5", "cosine:warmup_type=cosine"),
    'piecewise_constant:{"step_rules": "1:5,0.1"}',
]
FOLLOW_LOSSES = ["reduce_lr_on_plateau", "reduce_lr_on_plateau:patience=2", "adaptive"]
FOLLOW_LOSSES += ["greedy", "greedy:smooth=true"] if HAS_GREEDY else []


def adamw():
    return torch.optim.AdamW([torch.zeros(1)], lr=1e-3)


@cases(
    ("library", "spec"),
    [(library, spec) for library in TABLES for spec in (*new_names(library), *SPECS)]
    + [("diffusers", spec) for spec in FOLLOW_LOSSES],
)
def test_every_name_and_spec_string_makes_what_our_own_get_scheduler_makes(library, spec):
    warmup = 0 if spec.startswith("piecewise_constant") else 4
    get_scheduler = sys.modules[f"{library}.optimization"].get_scheduler
    theirs = get_scheduler(spec, adamw(), num_warmup_steps=warmup, num_training_steps=20)
    ours = diffusers_lrlab.get_scheduler(spec, adamw(), warmup, 20)
    assert type(theirs) is type(ours)
    assert theirs.state_dict() == ours.state_dict()


@cases(
    ("library", "spec", "kwargs", "part"),
    [
        ("diffusers", "reduce_lr_on_plateau", {}, "PlateauWithWarmup needs a metric: call advance()"),
        ("diffusers", "cosin", {}, "Did you mean 'cosine'"),
        ("transformers", "cosin", {}, "Did you mean 'cosine'"),
        ("transformers", "rex:e=1", {}, "it takes d, min_lr"),
        ("transformers", "rex:d=0.9", {"scheduler_specific_kwargs": {"d": 0.8}}, "'d' is given twice"),
        ("transformers", "rex", {"num_training_steps": None}, "requires `num_training_steps`"),
    ],
)
def test_wrong_names_and_parameters_are_explained(library, spec, kwargs, part):
    get_scheduler = sys.modules[f"{library}.optimization"].get_scheduler
    with pytest.raises(ValueError, match=re.escape(part)):
        get_scheduler(spec, adamw(), **{"num_warmup_steps": 0, "num_training_steps": 20, **kwargs}).step()


def test_transformers_takes_no_schedule_whose_rate_would_never_change():
    for spec in ("adaptive", "reduce_lr_on_plateau:patience=2"):  # or would stay at that of warm-up
        with pytest.raises(LabError, match=f"'{spec}' follows a loss, .* Use that name, with lr_scheduler_kwargs"):
            SchedulerType(spec)
    with pytest.raises(ValueError, match="3 is not a valid SchedulerType"):
        SchedulerType(3)
