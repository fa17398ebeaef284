"""The server: an OpenAI-compatible HTTP face on the embedded engine, which keeps the tokens, masks and log-probs of what it answered.

One thread steps the engine (`engine_thread`); the event loop parses requests (`requests`, `chat`), and shapes answers (`replies`). Its packages are
the extra `serve`.
"""
