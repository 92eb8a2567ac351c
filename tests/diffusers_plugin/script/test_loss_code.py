"""The code of a training loop that computes its loss."""

import pytest
import torch

from diffusers_lrlab.diffusers_plugin.script.loss_code import find_loss_code
from diffusers_lrlab.diffusers_plugin.script.source import HostScript, NotRecognised

LOOP = """
loader = DataLoader(data)
for step, batch in enumerate(loader):
    {first}
    with accelerator.accumulate(model):
        {before}
        loss = x.square().mean()
        accelerator.backward(loss)
        optimizer.step()
"""


def code_of(folder, first="pass", before="x = batch * 2", text=LOOP):
    (folder / "script.py").write_text(text.format(first=first, before=before))
    return find_loss_code(HostScript(str(folder / "script.py")))


@pytest.mark.parametrize(
    ("first", "before"),
    [
        ("pass", "x = batch * factor"),
        ("y = batch * factor", "x = y; total += 3"),
        ("if step < 3: continue", "x = batch.clone(); x *= factor; shown.append(x)"),
        ("def double(of): return factor * of", "x = double(batch); accelerator.log(1)"),
        ("pass", "batch *= 2; x = batch; x.mul_(factor / 2)"),
        ("parts = []", "parts.append(batch); parts.extend([]); x = parts[0] * factor"),
        ("pass", "x = batch * 1; x.view(-1).mul_(factor)"),
        ("import torch", "x = torch.empty(2); torch.mul(batch, factor, out=x)"),
        ("import torch", "x = torch.empty(2); torch.mul(batch, factor, out=x.view(-1))"),
        ("from torch.nn import functional as F", "x = batch * factor - 1; F.relu(x, inplace=True); x.add_(1)"),
        ("import torch", "x = batch - 4; torch.nn.init.zeros_(x); torch.relu_(x); x += batch * factor"),
        ("import torch", "x, i = torch.empty(2), torch.empty(2).long(); torch.sort(batch * factor, out=(x, i))"),
    ],
    ids=[
        "plain",
        "before_the_block",
        "after_continue",
        "own_function",
        "in_place",
        "own_list",
        "method_of_view",
        "out",
        "out_of_view",
        "functional_in_place",
        "trailing_underscore",
        "out_tuple",
    ],
)
def test_the_code_of_a_loss(tmp_path, first, before):
    """It is what the loss follows from, and nothing else."""
    code = code_of(tmp_path, first, before)
    assert (code.batch, code.counter) == ("batch", "step")
    variables = {"batch": torch.tensor([1.0, 3.0]), "factor": 2}
    exec(code.statements, variables)
    assert eval(code.loss, variables) == 20


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"before": "x = batch; accelerator.backward(x)"}, "calls accelerator.backward 2 times"),
        (
            {"text": "loader = make()\nfor batch in loader: accelerator.backward(batch)"},
            "does not iterate over a DataLoader",
        ),
        ({"before": "x = mean = mean_of(batch); x -= 1; old += x; x = old"}, "depends on earlier batches .old, line 6"),
        ({"before": "x = batch.mean(); mean.mul_(0.9).add_(x); x = x - mean"}, "depends on earlier batches .mean."),
        ({"before": "x = batch; state.last = x; x = x - state.last"}, "depends on earlier batches .state.last, line 6"),
        ({"before": "kept.view(-1).mul_(0.9); x = batch + kept"}, "depends on earlier batches .kept.view"),
        ({"before": "x = torch.mul(batch, 2, out=kept)"}, "depends on earlier batches .kept, line 6"),
        ({"before": "torch.relu_(kept); x = batch + kept"}, "depends on earlier batches .kept, line 6"),
        ({"before": "seen.append(batch); x = sum(seen)"}, "has a side effect .append, line 6"),
        ({"before": "seen.update(x=batch); x = seen['x']"}, "has a side effect .update, line 6"),
        ({"before": "x = accelerator.gather(batch)"}, "has a side effect .gather, line 6"),
        ({"before": "for x in batch: break"}, "has jumps"),
        ({"text": LOOP.replace("DataLoader(data)", "DataLoader(data, batch_sampler=own)")}, "a custom sampler"),
        ({"text": LOOP.replace("step, batch", "step, (batch, y)")}, "unpacks its batches"),
        ({"text": LOOP.replace("accelerator.accumulate(model)", "other()")}, "is not a statement of"),
    ],
    ids=[
        "two_backwards",
        "unknown_loader",
        "running_sum",
        "running_mean",
        "attribute",
        "in_place_view",
        "out",
        "trailing_underscore",
        "append",
        "update",
        "gather",
        "break",
        "custom_sampler",
        "unpacked_batch",
        "not_in_accumulate",
    ],
)
def test_loops_that_are_refused(tmp_path, how, reason):
    with pytest.raises(NotRecognised, match=reason):
        code_of(tmp_path, **how)


WHOLE = """
def ids():
    return torch.ones(1, 2).repeat(args.train_batch_size, 1)
fixed = {made}
{loop}"""


@pytest.mark.parametrize(
    ("made", "before", "line"),
    [
        ("ids()", "x = torch.cat([batch, fixed])", 4),
        ("torch.zeros(args.train_batch_size, 2)", "x = batch + fixed", 4),
        ("1", "x = batch + one.expand(args.train_batch_size, 2)", 10),
        ("ids()", "x = batch", None),
        ("1", "x = batch * fixed; shown = x.repeat(args.train_batch_size)", None),
    ],
    ids=["by_function", "by_zeros", "in_the_loop", "unused", "only_logged"],
)
def test_what_is_made_for_whole_batches(tmp_path, made, before, line):
    """As `add_time_ids` of instruct_pix2pix_sdxl; what the loss does not follow from is nothing to it."""
    statement = code_of(tmp_path, "pass", before, text=WHOLE.replace("{loop}", LOOP).replace("{made}", made)).sized_statement
    assert (statement and statement.lineno) == line


def test_models_that_are_switched_for_a_part_of_the_loss(tmp_path):
    """As adapters are in diffusion_dpo, for the predictions of the model without them."""
    before = "accelerator.unwrap_model({}).disable(); x = unet(batch); accelerator.unwrap_model({}).enable()"
    with pytest.raises(NotRecognised, match=r"switches a model while .*line 6.: .*unwrap_model.unet..disable.."):
        code_of(tmp_path, "pass", before.replace("{}", "unet"))
    code_of(tmp_path, "pass", before.replace("{}", "shown"))
