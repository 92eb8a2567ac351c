"""Registration with diffusers and transformers: schedules, models and pipelines."""
