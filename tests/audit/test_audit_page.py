"""The report that the tutorial prints is that of its program."""

import printed
from audit_programs import audit_of

from diffusers_lrlab.audit.report import lines_of


def test_the_printed_report(tmp_path):
    page = "docs/tutorials/which-curve-ran.md"
    (block,) = (each for each in printed.blocks("") if each.page == page and "LR audit: AdamW" in each.code)
    program = printed.block_with("for micro_batch in range(400)", "python")
    assert program.page == page
    assert block.code.splitlines() == [*lines_of(audit_of(program.code, tmp_path)), "Wrote lr_audit.png and lr_audit.json."]
