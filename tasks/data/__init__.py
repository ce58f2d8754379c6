"""From a user's files to packed sequences of token ids, with an exact position to resume from."""
