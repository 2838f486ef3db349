"""Data goes right: rollouts become columns, columns travel by a carrier, the trainer's source ranks read them."""
