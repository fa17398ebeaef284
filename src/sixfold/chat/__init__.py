"""Conversations as a tokenizer's chat template writes them: rendering, where a turn ends, think blocks that a prompt leaves open."""
