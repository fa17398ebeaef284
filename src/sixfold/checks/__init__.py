"""Checks of completions by reward functions, in processes that can be killed. No torch.

The way of one check, from a trajectory that has ended to the user's function and back:

    rollout/driver.py       an episode has ended
    checks/scorer.py        makes one check per reward; later combines their results
    checks/queue.py         the check waits for a free process
    checks/process.py       sends it, and reads the reply
    checks/worker.py        runs in that process, and calls the reward
    environment/rewards.py  passes the arguments that the function expects

`environment` makes the scorer of each step. It calls functions that were given from Python in the
process of the run, without the queue. How bytes reach another process is in `processes/`.
"""
