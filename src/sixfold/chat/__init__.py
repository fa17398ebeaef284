"""Chat templates of tokenizers: rendering, the end of a turn, and think blocks left open by a prompt."""
