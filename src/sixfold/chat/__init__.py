"""Chat templates of tokenizers: rendering, the end of a turn, and open think blocks."""
