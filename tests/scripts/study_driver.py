"""`lrlab` for tests that stop studies: saves after every update, and no pictures.

After every result it waits a little, so that there is time to stop it before the next one.
"""

import sys
import time

import diffusers_lrlab.study.report.report
import diffusers_lrlab.study.stacked.stacks as stacks
from diffusers_lrlab.cli.main import main
from diffusers_lrlab.study.results import StudyFolder

write = StudyFolder.write


def write_and_wait(folder, record):
    write(folder, record)
    time.sleep(0.3)


if __name__ == "__main__":
    stacks._SAVE_SECONDS = 0.0
    StudyFolder.write = write_and_wait
    diffusers_lrlab.study.report.report.write_report = lambda folder, *_: folder / "report" / "index.html"
    sys.exit(main())
