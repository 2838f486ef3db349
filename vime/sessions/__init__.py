"""Sessions of agents: what the engine sampled for them is recorded token for token and becomes samples of a group."""
