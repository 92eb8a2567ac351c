"""What everything stands on and nothing that knows diffusion: registry, specs, clock, random streams, options, files."""
