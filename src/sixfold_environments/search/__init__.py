"""Search over a local corpus with BM25: the index, corpora, made-up facts, and the tools."""
