"""The executor for runs side by side, in stacks."""

from __future__ import annotations

from ..runs.study_data import StudyData
from ..spec.spec import RunSpec
from ..stacked.stacks import check_stackable, run_stack, split_into_stacks


def run_stacked(specs: list[RunSpec], study: StudyData) -> None:
    """
    Runs side by side, in stacks of `study.stack_size`; a stack that was interrupted goes on.

    Raises:
        LabError: if a run cannot be part of a stack; it says which and why.
        Interrupted: after SIGINT or SIGTERM, with everything saved.
    """
    check_stackable(specs, study)
    for stack in split_into_stacks(specs, study):
        while study.folder.missing(stack):
            run_stack(stack, study)
