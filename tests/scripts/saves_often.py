"""A plug-in: states of stacks are saved after every update, in workers too."""

import diffusers_lrlab.study.stacked.stacks as stacks

stacks._SAVE_SECONDS = 0.0
