"""From text files to packed sequences: read -> tokenise -> pack -> index."""
