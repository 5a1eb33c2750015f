"""The mapping tables of HunyuanVideo-1.5."""
