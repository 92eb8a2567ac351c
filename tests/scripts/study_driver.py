"""`lrlab` for tests that stop studies: torch's own products, saves after every update, and no pictures.

After every result it waits a little, so that there is time to stop it before the next one.
"""

import sys
import time

import diffusers_lrlab.study.report.report
import diffusers_lrlab.study.stacked.fastest_backends as backends
import diffusers_lrlab.study.stacked.stacks as stacks
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.study.runs.results import StudyFolder
from diffusers_lrlab.study.stacked.matmul_backends import STOCK

write = StudyFolder.write


def write_and_wait(folder, record):
    write(folder, record)
    time.sleep(0.3)


if __name__ == "__main__":
    backends.fastest_backends = lambda *_: STOCK  # which of them is fastest is for the clock to say
    stacks._SAVE_SECONDS = 0.0
    StudyFolder.write = write_and_wait
    diffusers_lrlab.study.report.report.write_report = lambda folder, *_: folder / "report" / "index.html"
    sys.exit(main())
