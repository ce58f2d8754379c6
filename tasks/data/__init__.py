"""From a user's files to packed sequences of token ids, with an exact position to resume from.

In the order of the bytes: `settings` what the user says; `sources` which files; `text_rows` and `columns` read rows;
`tokenizers`, `checks` and `tokenise` make token ids of them; `token_cache` keeps those; `documents` and `packing`
decide what stands where; `dataset` gives sequences, `loader` batches.
"""
