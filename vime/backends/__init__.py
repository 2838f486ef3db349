"""The two heavy engines behind the seams: megatron-core trains, vLLM generates. They never import each other."""
