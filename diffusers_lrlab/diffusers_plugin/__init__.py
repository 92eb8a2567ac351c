"""Everything that touches diffusers' internals: registration of schedules and pipelines, the host's clock."""
