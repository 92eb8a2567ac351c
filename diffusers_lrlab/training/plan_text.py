"""The plan of a run as text, which `--dry_run` prints."""

from typing import Any

from ..core.spec import shown_spec
from ..core.words import counted, plural, singular, times
from ..data.labels import describe_classes
from ..diagnostics.gradient_probes import NUM_PROBES
from ..optimizers.entries import OPTIMIZERS
from ..optimizers.timescales import BASE_BATCH, NO_EFFECT, scaling_warning
from ..schedules.schedule import describe_schedule, double_decay
from ..timesteps.registries import LOSS_WEIGHTINGS, TIMESTEP_SAMPLERS
from ..timesteps.sampling import contradiction
from .kinds import component_of
from .model import describe_model, width_in_words
from .plan import Plan
from .prepare import launcher_compiles
from .resolve import describe_choices

_TIMESTEP_WORDS = {
    "timestep_sampler": "sampler",
    "loss_weighting": "weighting",
    "timestep_lr": "learning rate",
    "noise": "noise",
}
_INDENT = " " * 15  # of further lines


def describe_plan(plan: Plan) -> str:
    config, layout = plan.config, plan.layout
    last, item = plan.num_updates - 1, singular(plan.kind.name)
    marks = [(share, min(round(share / 100 * plan.num_updates), last)) for share in range(0, 101, 25)]

    def over_run(values: Any) -> str:
        return ", ".join(f"{values[update]:.3g} ({share} %)" for share, update in marks)

    num_images = counted(plan.num_images, f"training {item}") if plan.num_images else f"a stream of training {plural(item)}"
    workers = f", read by {counted(plan.num_workers, 'worker process')}" if plan.num_workers else ""
    start = "" if plan.start is None else f", from the weights of {plan.start.name_or_path}"
    start += f" at {plan.start.commit[:8]}" if plan.start is not None and plan.start.commit else ""
    compiled = ", compiled for training" if launcher_compiles() else ""
    epochs = f", {counted(plan.num_epochs, 'epoch', '.4g')}" if plan.num_epochs else ""
    follows = ", then following the validation loss" if plan.schedule.follows_metric else ""
    auto = "auto, found before the run; with the default peak: " if config.finds_learning_rate else ""
    scaled = (
        f"; the peak is {plan.learning_rate:.3g}: {config.learning_rate:g} for {BASE_BATCH}, scaled by {config.scale_lr} to "
    )
    momentum = f", momentum {over_run(plan.momenta)}" if plan.schedule.sets_momentum else ""
    often = times(plan.num_validations) if plan.num_validations > 1 else "once, at the end"
    precision = "" if config.mixed_precision in (None, "no") else config.mixed_precision
    log = "lrlab/timesteps.parquet, " if config.log_timestep_bins else ""
    labels = f"{config.label_column!r}, {describe_classes(plan.classes.names)}" if plan.classes is not None else ""
    labels += f", dropped with probability {config.label_dropout:g}" if config.label_dropout else ""
    lines = {
        "data": f"{config.dataset_name or config.train_data_dir}: {num_images}, {plan.num_held_out} held out, "
        f"{plan.data_shape}{workers}",
        "labels": labels,
        "model": f"{describe_model(config, plan.model_config)}, {counted(plan.num_parameters, 'parameter', ',')}"
        f"{start}{compiled}",
        "autoencoder": autoencoder_in_words(plan.autoencoder) if plan.autoencoder else "",
        "objective": "; ".join([config.objective, *(f"{name.lower()} {value}" for name, value in plan.process.describe())]),
        "precision": f"{precision}; --mixed_precision no for float32" if precision else "",
        "batch": f"{counted(layout.global_batch, item)} an update = {layout.micro_batch} x "
        f"{counted(layout.accumulation, 'micro-batch')} x {counted(layout.num_processes, 'process')}",
        "length": f"{counted(plan.num_updates, 'update')}{epochs}, "
        f"{counted(plan.num_updates * layout.global_batch, item, ',')} seen",
        "schedule": f"{describe_schedule(plan.schedule)}, {counted(plan.warmup_updates, 'update')} of warm-up{follows}",
        "learning rate": f"{auto}{over_run(plan.lrs)}"
        + (f"{scaled}{layout.global_batch}" if config.scale_lr != "none" else ""),
        "width": width_in_words(plan.width, plan.optimizer_kwargs.get("weight_decay", 0.0), _INDENT),
        "timesteps": ", ".join(f"{_TIMESTEP_WORDS[option]} {spec}" for option, spec in describe_choices(vars(config))),
        "optimizer": shown_spec(config.optimizer, config.optimizer_kwargs) + _per_update_in_words(plan) + momentum,
        "weight decay": _decay_in_words(plan),
        "validation": f"loss of {counted(plan.num_held_out, f'held-out {item}')}, {often}" if plan.num_validations else "",
        "samples": _samples_in_words(plan),
        "warning": f"\n{_INDENT}".join(_warnings(plan)),
        "output": f"{config.output_dir}/: model_index.json, {component_of(config)}/, scheduler/, README.md, "
        f"lrlab/metrics.jsonl, {log}lrlab/run.json, lrlab/*.png, checkpoint-N/ every "
        f"{counted(config.checkpointing_steps, 'update')}",
    }
    return "\n".join(f"{name:>13}  {text}" for name, text in lines.items() if text)


def autoencoder_in_words(found: dict[str, Any]) -> str:
    """The class of an autoencoder, its source, and the start of its weights' hash."""
    source = "/".join(filter(None, (found["name_or_path"], found["subfolder"])))
    commit = f", commit {found['revision'][:12]}" if found["revision"] else ""
    return f"{found['class_name']} {source}{commit}, weights {found['weights_sha256'][:12]}"


def _samples_in_words(plan: Plan) -> str:
    config = plan.config
    if not config.evaluation:
        return "none, by --no_evaluation"
    when = "at the end"
    if config.save_images_epochs is not None:
        when = f"every {counted(config.save_images_epochs, 'epoch')}, and {when}"
    elif plan.num_previews:
        when = f"{times(plan.num_previews)} during the run, and {when}"
    measured = f"; {config.distance_samples} for the metrics" if config.distance_samples else ""
    num = config.eval_batch_size if plan.classes is None else len(plan.classes.to_show(config.eval_batch_size))
    samples, steps = counted(num, singular(plan.kind.name)), counted(config.num_inference_steps, "step")
    guided = "" if config.guidance_scale == 1 else f", guidance {config.guidance_scale:g},"
    return f"{samples} in {steps}{guided} {when}{measured}"


def _warnings(plan: Plan) -> list[str]:
    """Warnings about valid choices that are probably not intended."""
    config = plan.config
    sampler, weighting, kwargs = config.timestep_sampler, config.loss_weighting, config.timestep_sampler_kwargs
    warnings: list[str | None] = [*plan.warnings, contradiction(sampler, plan.process.prediction_type)]
    if "middle" in TIMESTEP_SAMPLERS[sampler].traits & LOSS_WEIGHTINGS[weighting].traits:
        warnings.append(
            f"{sampler!r} samples the middle noise levels more often and {weighting!r} weights them more: together they "
            "leave little weight on the rest. Use one of them."
        )
    needed, seen = kwargs.get("history", 0) * config.num_train_timesteps, plan.num_updates * plan.layout.global_batch
    if seen < needed:
        warnings.append(
            f"{sampler!r} stays uniform until all {counted(config.num_train_timesteps, 'timestep')} have been drawn "
            f"{times(kwargs['history'])}. That takes over {counted(needed, 'image')}, and this run sees {seen}. Lower "
            "history, or train for longer."
        )
    if plan.layout.global_batch == 1 and (kwargs["draw"] != "independent" or config.noise == "immiscible"):
        chosen = config.noise if config.noise == "immiscible" else kwargs["draw"]
        warnings.append(f"{chosen!r} has no effect on updates of a single image. Use a larger batch.")
    if config.timestep_grad_every and config.timestep_grad_every > plan.num_updates:
        warnings.append(
            f"--timestep_grad_every {config.timestep_grad_every} never comes in {counted(plan.num_updates, 'update')}."
        )
    if config.timestep_grad_every and plan.num_held_out < NUM_PROBES:
        warnings.append(
            f"Gradient noise scales need {NUM_PROBES} held-out images, and there are {plan.num_held_out}: only norms will "
            "be measured. Raise --num_validation_images."
        )
    warnings.append(scaling_warning(config.scale_lr, OPTIMIZERS[config.optimizer]))
    if not plan.schedule.follows_metric:
        start = config.start_momentum
        warnings.append(double_decay(plan.schedule, plan.learning_rate, start, plan.warmup_updates, plan.num_updates))
    return [warning for warning in warnings if warning]


def _per_update_in_words(plan: Plan) -> str:
    """The settings that come from parameters in images."""
    given, numbers = plan.config.optimizer_kwargs, plan.optimizer_kwargs
    names = {name: title for name, title in (("beta2", "beta2"), ("weight_decay", "weight decay")) if name not in given}
    found = [f"{title} {numbers[name]:.6g}" for name, title in names.items() if name in numbers]
    images = given.get("images_per_update") or plan.layout.global_batch
    return f": {' and '.join(found)} for {counted(images, singular(plan.kind.name))} an update" if found else ""


def _decay_in_words(plan: Plan) -> str:
    """Over how many updates, images and epochs weights are forgotten."""
    timescale = plan.decay_timescale
    if timescale is None:
        return ""
    words = f"{plan.optimizer_kwargs['weight_decay']:.4g}; {timescale.in_words(plan.num_updates)}"
    if timescale.removed < NO_EFFECT:
        return words
    images = round(timescale.updates * plan.layout.global_batch)
    epochs = f", {counted(images / plan.num_images, 'epoch', '.3g')}" if plan.num_images else ""
    return f"{words} ({counted(images, singular(plan.kind.name), ',')}{epochs})"
