"""Latents: images encoded once by an autoencoder of diffusers, in shards that training reads memory-mapped."""
