"""A schedule as a patch for a checkout of diffusers: `forms` -> `render` -> `insert`, driven by `patch`."""
