"""A schedule as a folder: its data, its plot and its card."""

from pathlib import Path

from ..core.files import check_new_folder, new_folder, write_text
from ..schedules.published import FILE, read_schedule_file, schedule_as_json
from ..schedules.registries import MOMENTUM_SCHEDULERS, SCHEDULERS
from ..schedules.resolve import merge_spec, resolve_schedule
from ..schedules.schedule import Schedule
from .cards import fill


def write_schedule_folder(
    folder: Path,
    lr_scheduler: str,
    momentum_scheduler: str | None = None,
    num_updates: int = 10_000,
    warmup_updates: int | None = None,
    license: str | None = None,
) -> None:
    """
    Writes `schedule.json`, `schedule.png` and a card into a new folder, whole or not at all.

    Schedules are names or spec strings. The plot is of a run of `num_updates` with `warmup_updates` of warm-up, by default a
    twentieth, or none for schedules without warm-up.
    """
    from huggingface_hub import ModelCardData

    from ..preview.plots import plot_previews
    from ..preview.schedules import Run, preview

    check_new_folder(folder)
    resolved = resolve_schedule(lr_scheduler, None, momentum_scheduler)
    name, kwargs = merge_spec(lr_scheduler, None)
    momentum_kwargs = resolved.momentum_kwargs if resolved.momentum else {}
    if momentum_scheduler is not None:
        _, momentum_kwargs = merge_spec(momentum_scheduler, None, MOMENTUM_SCHEDULERS)
    # As given: parameters derived from the length of a run must fit every run.
    given = Schedule(name, kwargs, resolved.momentum, momentum_kwargs)
    if warmup_updates is None:
        warmup_updates = 0 if {"no_warmup", "rises"} & SCHEDULERS[name].traits else num_updates // 20
    run = Run(num_updates, warmup_updates)
    shown = preview(lr_scheduler, run, momentum=momentum_scheduler)
    with new_folder(folder) as temporary:
        text = schedule_as_json(given)
        write_text(temporary / FILE, text)
        published = read_schedule_file(temporary / FILE, str(folder))
        plot_previews([shown], run, temporary / "schedule.png")
        tags = ["diffusers", "learning-rate-schedule", name]
        card = fill(
            "schedule_card.md",
            ModelCardData(library_name="diffusers_lrlab", tags=tags, license=license),
            title=folder.resolve().name,
            text=published.text,
            num_updates=num_updates,
            warmup=warmup_updates,
            json=text.rstrip(),
        )
        write_text(temporary / "README.md", card)
