"""Schedules as patches for a checkout of diffusers: `bodies` -> `render` -> `insert`, called by `patch`."""
