"""A round of training, independent of the backend: roles, columns, losses, statistics, steps.

The entry point is `worker.TrainWorker`. This package imports no backend: it is given one (`protocols.TrainBackend`).
"""
