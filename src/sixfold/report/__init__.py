"""Reports of a run: metrics schema, loggers, live display, rollout dumps and HTML report. No
torch.
"""
