"""Formulas: tensors in, tensors out. No state, no devices, no communication."""
