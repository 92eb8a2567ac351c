"""The ground floor, without any diffusion: registry, spec strings, clock, random streams, options, files."""
