"""What a round of training is, whatever engine computes it: roles, columns, losses, statistics, steps.

`worker.TrainWorker` is the door. This package imports no backend: it is handed one (`protocols.TrainBackend`).
"""
