"""The one model definition: a Hugging Face causal LM, run as body and head under an attention of ours. Imports nothing of ours but leaves."""
