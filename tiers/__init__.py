"""Where the bytes live: layer layout, shared-memory arena, zarr shards, residency and the actors that own them.

Imports nothing else of this project.
"""
