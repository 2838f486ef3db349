"""Six agent programs over SDKs that nobody here wrote, and a judge that believes the engines alone (launch.py)."""
