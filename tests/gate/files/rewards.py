def short(completion, task):
    return 1.0 / (1 + len(completion))
