"""vLLM: command line, life of engines and router, control over HTTP, and the engine's side of weight transfer."""
