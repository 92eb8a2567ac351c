"""What the launcher's options would do in a script, and what the script does wrong by itself, told from its text alone."""

import ast
from collections.abc import Callable
from typing import NamedTuple

from .hook_table import HOOKS
from .script.source import HostScript, NotRecognised, called_in


def recognisers() -> dict[str, Callable[[HostScript], str]]:
    """By option: what it acts on in a script; [`NotRecognised`] says why there is nothing."""
    return {entry.title: entry.find for entry in HOOKS.values() if entry.recognise is not None}


def explain(script: HostScript) -> str:
    """A line for each option, and one for each fault."""
    width = max(map(len, recognisers()))
    lines = [script.path]
    for option, recognise in recognisers().items():
        try:
            found = recognise(script)
        except NotRecognised as reason:
            found = f"not here: {reason}"
        lines.append(f"  {option:<{width}}  {found}")
    lines.append("By itself, this script")
    lines += [f"  {fault.text}" for fault in faults(script)] or ["  does nothing that is known to be wrong"]
    return "\n".join(lines)


class Fault(NamedTuple):
    """What a script does wrong: a name for tables, and the sentence."""

    name: str
    text: str


def faults(script: HostScript) -> list[Fault]:
    """What a script does to its learning rate, at a resume, to its weights and gradients, where that is not what it says."""
    found = [_clock_fault(script, call) for call in script.schedule_calls]
    found += [_resume_fault(script), _weight_fault(script), _clip_fault(script)]
    return [fault for fault in found if fault is not None]


def _clock_fault(script: HostScript, call: ast.Call) -> Fault | None:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    warmup, length = (given.get(name, "") for name in ("num_warmup_steps", "num_training_steps"))

    def fault(name: str, effect: str, remedy: str = "--fix_lr_clock mends it") -> Fault:
        return Fault(name, f"makes its schedule {length} steps long ({called_in([call])}): {effect}. {remedy}.")

    if not script.is_prepared(call):
        found = _fault_of_own_steps(script, call, warmup, length)
        return found and fault(*found)
    if "gradient_accumulation_steps" in warmup + length:
        return fault("LR: accumulation", "right only without gradient accumulation and in one process")
    # accelerate steps a schedule once in each process, unless it splits batches.
    splits = any(keyword.arg == "split_batches" for made in script.calls("Accelerator") for keyword in made.keywords)
    if "num_training_steps_for_scheduler" in length:
        return fault("LR: processes", "too long by the number of processes, since it splits batches") if splits else None
    if "num_processes" in length and script.assigns("num_training_steps_for_scheduler"):
        return fault("LR: epochs", "it computes the length by epochs and does not use it", "Give it --max_train_steps")
    if "num_processes" in length:
        return fault("LR: epochs", "by epochs, without --max_train_steps, too long by the number of processes")
    return fault("LR: processes", "right only in one process") if length and not splits else None


def _fault_of_own_steps(script: HostScript, call: ast.Call, warmup: str, length: str) -> tuple[str, str] | None:
    """Of a schedule that is not prepared: each process steps its own, in each micro-batch or once in an update."""
    accumulates = ["gradient_accumulation_steps" in text for text in (length, warmup)]
    by_micro_batch = script.is_stepped_in_micro_batches(call)
    where = "in each micro-batch" if by_micro_batch else "once in an update"
    own = f"it is not prepared, so that the script alone steps it, {where}"
    if "num_processes" in length:
        return "LR: processes", f"{own}; right only in one process"
    if "loader" in length and "max_train_steps" not in length:
        at = "" if by_micro_batch else "without gradient accumulation and "
        return "LR: processes", f"{own}; right only {at}in one process"
    if not script.mentions("gradient_accumulation_steps"):
        return None
    wrong = length and any(each != by_micro_batch for each, text in zip(accumulates, (length, warmup), strict=True) if text)
    return ("LR: accumulation", f"{own}; right only without gradient accumulation") if wrong else None


def _resume_fault(script: HostScript) -> Fault | None:
    if not any(each.mentions("resume_from_checkpoint") or each.calls("load_state") for each in (script, *script.beside)):
        return Fault("no resume", "cannot go on from a checkpoint.")
    if script.assigns("resume_step") or script.calls("skip_first_batches"):
        return None
    return Fault(
        "resume: data",
        "reads an epoch's data from the beginning again when it resumes in the middle of it. --exact_resume mends it.",
    )


def _weight_fault(script: HostScript) -> Fault | None:
    sums = [node for node in ast.walk(script.tree) if isinstance(node, ast.BinOp) and ast.unparse(node) == "base_weight + 1"]
    if not sums:
        return None
    return Fault(
        "weights",
        f"weighs by min(SNR, gamma) / SNR + 1 (line {sums[0].lineno}), with --snr_gamma and a model that predicts velocity, "
        "where min(SNR, gamma) / (SNR + 1) is meant. Use --loss_weighting min_snr in place of --snr_gamma.",
    )


def _clip_fault(script: HostScript) -> Fault | None:
    """What `filter` and `map` return can be read once, and the optimizer comes first."""
    calls = [call for call in script.calls("clip_grad_norm_") if call.args]
    names = {ast.unparse(call.args[0]) for call in calls}
    names |= {value for name in names for value in script.values(name)}  # params_to_clip = lora_layers
    for name in sorted(names):
        kinds = {value.split("(")[0] for value in script.values(name)}
        if kinds and kinds <= {"filter", "map"}:
            text = (
                f"{name} is a {min(kinds)}(), which its optimizer has read to the end, so that --max_grad_norm does nothing"
            )
            return Fault("clipping", f"clips no gradient ({called_in(calls)}): {text}. Make it a list.")
    return None
