"""What a round of training is, whatever engine computes it: roles, columns, losses, statistics, steps.

`worker.TrainWorker` is the door. This room imports no backend: it is handed one (`seams.TrainBackend`).
"""
