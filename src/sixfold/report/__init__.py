"""What a run says of itself: the metrics schema, loggers, the live display, rollout dumps, and the HTML report. No torch."""
