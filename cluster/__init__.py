"""The local Ray head: start, stop, submit, look. Imports nothing else of this project."""
