"""Weights go to the engines: the version ledger, the bucket plan, the content hash, and the transports to the
engines."""
