"""The tests of a schedule as source code for diffusers, with expected values from our curves."""

from datetime import date
from typing import Any

import numpy as np

from ..core.progress import Progress
from ..schedules.resolve import resolve_schedule
from .bodies import BODIES
from .render import WIDTH, function_name, literal

_LR, _TOTAL, _WARMUP = 10.0, 10, 2
# The first, in warmup, its end, in the middle, the last, the end, past it.
_STEPS = (0, 1, 2, 5, 9, 10, 12)

LICENSE = """\
# coding=utf-8
# Copyright {year} HuggingFace Inc.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""
_TEST_FILE = (
    LICENSE
    + '''
import pytest
import torch

from diffusers.optimization import get_scheduler


def get_optimizer(lr={lr}):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def get_learning_rates(scheduler, steps={steps}):
    """The learning rates in a run of 10 steps: at its start and end, around its warmup of 2 steps, and past its end."""
    learning_rates = []
    for _ in range(max(steps) + 1):
        learning_rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return [learning_rates[step] for step in steps]
'''
)
# Names that a test file must have before tests are added.
TEST_HELPERS = ("pytest", "torch", "get_optimizer", "get_learning_rates")


def empty_test_file() -> str:
    return _TEST_FILE.format(year=date.today().year, lr=_LR, steps=_STEPS)


def tests_source(name: str) -> str:
    """The test class of a schedule, with expected values from our curves, not from the code under test."""
    function, body = function_name(name), BODIES[name]
    cases: list[tuple[int, dict[str, Any]]] = [(_WARMUP, {}), (0, {})]
    cases += [(_WARMUP, dict(example)) for example in body.examples]
    lines = [
        f"class Test{name.title().replace('_', '')}Schedule:",
        "    @pytest.mark.parametrize(",
        '        ("num_warmup_steps", "kwargs", "expected"),',
        "        [",
        *(line for warmup, kwargs in cases for line in _row(name, warmup, kwargs)),
        "        ],",
        "    )",
        "    def test_learning_rates(self, num_warmup_steps, kwargs, expected):",
        f"        scheduler = {function}(get_optimizer(), num_warmup_steps, {_TOTAL}, **kwargs)",
        "        assert get_learning_rates(scheduler) == pytest.approx(expected, rel=1e-12)",
        "",
        "    def test_get_scheduler(self):",
        f'        scheduler = get_scheduler("{name}", get_optimizer(), num_warmup_steps={_WARMUP}, '
        f"num_training_steps={_TOTAL})",
        f"        expected = {function}(get_optimizer(), num_warmup_steps={_WARMUP}, num_training_steps={_TOTAL})",
        "        assert get_learning_rates(scheduler) == get_learning_rates(expected)",
    ]
    for argument, value in body.refused.items():
        lines += [
            "",
            f"    def test_invalid_{argument}(self):",
            rf'        with pytest.raises(ValueError, match=r"{argument} \("):',
            f"            {function}(get_optimizer(), {_WARMUP}, {_TOTAL}, {argument}={literal(value)})",
        ]
    return "\n".join(lines) + "\n"


def _row(name: str, warmup: int, kwargs: dict[str, Any]) -> list[str]:
    """A test case, in one line if it fits, as diffusers' formatter would write it."""
    rates = resolve_schedule(name, kwargs).at(Progress(np.array(_STEPS), _TOTAL, warmup), _LR)[0]
    parts = [str(warmup), literal(kwargs), repr([float(f"{rate:.13g}") for rate in rates])]
    line = f"            ({', '.join(parts)}),"
    if len(line) <= WIDTH:
        return [line]
    return ["            (", *(f"                {part}," for part in parts), "            ),"]
