"""The report that the tutorial prints is that of such a program."""

import printed
from audit_programs import audit_of

from diffusers_lrlab.audit.report import lines_of

PROGRAM = "o = adam(); s = get_scheduler('cosine', o, 40, 400); train(o, 100, accumulation=4, step=s.step)"


def test_the_printed_report(tmp_path):
    block = printed.block_with("LR audit: AdamW", "")
    assert block.page == "docs/tutorials/which-curve-ran.md"
    assert block.code.splitlines() == lines_of(audit_of(PROGRAM, tmp_path), "Wrote lr_audit.png and lr_audit.json.")
