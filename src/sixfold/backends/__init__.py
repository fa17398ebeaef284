"""Samplers in other processes: vLLM, SGLang and a Sixfold server."""
