"""Faults in a script's own text: learning rate, resume, loss weights and gradient clipping that do not do what they say."""

import ast
from typing import NamedTuple

from .source import HostScript, lines_of


class Fault(NamedTuple):
    """Its name in tables, and a sentence without a subject."""

    name: str
    text: str


def find_faults(script: HostScript) -> list[Fault]:
    found = [_schedule_fault(script, call) for call in script.schedule_calls]
    found += [_resume_fault(script), _weight_fault(script), _clip_fault(script)]
    return [fault for fault in found if fault is not None]


def _schedule_fault(script: HostScript, call: ast.Call) -> Fault | None:
    """Of a schedule that accelerate steps: once per process at each update, or once if it splits batches."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    warmup, length = (given.get(name, "") for name in ("num_warmup_steps", "num_training_steps"))
    variable = next((ast.unparse(node.targets[0]) for node in script.nodes(ast.Assign) if node.value is call), None)
    found = _length_fault(script, warmup, length) if _is_prepared(script, variable) else None
    if found is None:
        return None
    name, effect, *remedy = found
    text = f"makes its schedule {length} steps long ({lines_of([call])}): {effect}"
    return Fault(name, f"{text}. {remedy[0] if remedy else '--fix_lr_clock corrects it'}.")


def _is_prepared(script: HostScript, schedule: str | None) -> bool:
    """Whether a schedule is passed to accelerate, which is assumed if the variable is unknown."""
    given = [argument for name in ("prepare", "prepare_scheduler") for call in script.calls(name) for argument in call.args]
    return schedule is None or any(isinstance(each, ast.Starred) or ast.unparse(each) == schedule for each in given)


def _length_fault(script: HostScript, warmup: str, length: str) -> tuple[str, ...] | None:
    if "gradient_accumulation_steps" in warmup + length:
        return "LR: accumulation", "correct only without gradient accumulation and in one process"
    splits = any(keyword.arg == "split_batches" for made in script.calls("Accelerator") for keyword in made.keywords)
    if "num_training_steps_for_scheduler" in length:
        too_long = "too long by the number of processes, because it splits batches"
        return ("LR: processes", too_long) if splits else None
    if "num_processes" in length and script.assigns("num_training_steps_for_scheduler"):
        return "LR: epochs", "it computes the length by epochs but does not use it", "Give it --max_train_steps"
    if "num_processes" in length:
        return "LR: epochs", "by epochs, without --max_train_steps, too long by the number of processes"
    return ("LR: processes", "correct only in one process") if length and not splits else None


def _resume_fault(script: HostScript) -> Fault | None:
    if not script.mentions("resume_from_checkpoint") and not script.calls("load_state"):
        return Fault("no resume", "cannot resume from a checkpoint, unless a module of its own does so.")
    if script.assigns("resume_step") or script.calls("skip_first_batches"):
        return None
    text = "rereads an epoch's data from the beginning when it resumes in mid-epoch."
    return Fault("resume: data", text)


def _weight_fault(script: HostScript) -> Fault | None:
    sums = [node for node in script.nodes(ast.BinOp) if ast.unparse(node) == "base_weight + 1"]
    if not sums:
        return None
    return Fault(
        "weights",
        f"uses the weight min(SNR, gamma) / SNR + 1 (line {sums[0].lineno}) with --snr_gamma and a model that predicts "
        "velocity, instead of min(SNR, gamma) / (SNR + 1). Use --loss_weighting min_snr instead of --snr_gamma.",
    )


def _clip_fault(script: HostScript) -> Fault | None:
    """The iterator of `filter` or `map` can be read once, and the optimizer reads it first."""
    calls = [call for call in script.calls("clip_grad_norm_") if call.args]
    names = {ast.unparse(call.args[0]) for call in calls}
    names |= {value for name in names for value in script.values(name)}  # params_to_clip = lora_layers
    for name in sorted(names):
        makers = {value.split("(")[0] for value in script.values(name)}
        if makers and makers <= {"filter", "map"}:
            reason = f"{name} is a {min(makers)}(), already consumed by its optimizer, so --max_grad_norm has no effect"
            return Fault("clipping", f"clips no gradient ({lines_of(calls)}): {reason}. Make it a list.")
    return None
