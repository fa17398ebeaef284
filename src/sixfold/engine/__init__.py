"""The embedded inference engine: scheduler + block manager + model runner (+ sampler). It answers token prompts with token completions.

It knows nothing of tasks' answers, rewards or training: `engine` imports torch, the model room and `types`.
"""
