"""The server: an OpenAI-compatible HTTP interface to the embedded engine.

It can record the tokens, masks and log-probs of its answers for training. One thread steps the
engine (`rollout/engine_thread.py`). The event loop parses requests (`requests`, `chat_ask`) and
formats answers (`replies`). It gets tokens, texts and tool calls from the renderer
(`renderer/`). The server's dependencies are the extra `serve`.
"""
