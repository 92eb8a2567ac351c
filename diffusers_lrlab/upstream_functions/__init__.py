"""What [`diffusers_lrlab.upstream`] writes into a checkout of diffusers, as text: `forms` -> `render` -> `insert`."""
