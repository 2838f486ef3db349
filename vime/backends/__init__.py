"""The heavy engines behind the protocols: megatron-core or FSDP2 trains, vLLM generates. They never import each other;
what the two trainers share lies here."""
