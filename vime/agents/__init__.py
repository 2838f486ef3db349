"""Agents inside a run: a program or a function answers each prompt through a session of its own (docs/agents.md)."""
