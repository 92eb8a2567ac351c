"""Registration with diffusers: schedules, models and pipelines."""
