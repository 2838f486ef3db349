"""Planning and packing, without communication: which rank computes which rows, in which micro-batches and tensors."""
