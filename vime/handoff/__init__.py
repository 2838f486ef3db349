"""From rollouts to training: the ledger of prompt groups, stored payloads, and how trainer ranks read their rows."""
