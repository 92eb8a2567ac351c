"""The report that the tutorial prints is that of its program."""

import printed
from audit_programs import audit_of

from diffusers_lrlab.audit.report import lines_of


def test_the_printed_report(tmp_path):
    block = printed.block_with("LR audit: AdamW", "")
    program = printed.block_with("for micro_batch in range(400)", "python")
    assert block.page == program.page == "docs/tutorials/which-curve-ran.md"
    assert block.code.splitlines() == lines_of(audit_of(program.code, tmp_path), "Wrote lr_audit.png and lr_audit.json.")
