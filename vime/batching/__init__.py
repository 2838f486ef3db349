"""Rows to ranks to micro-batches to packed tensors: planning and packing, no communication."""
