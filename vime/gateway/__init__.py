"""The HTTP door through which rollout jobs that are not part of the run become producers of its ledger."""
