"""The mapping tables of CogVideoX."""

from conversion.cogvideox.transformer import transformer_table
from conversion.cogvideox.vae import vae_table
from conversion.rules import Tables
from conversion.t5 import t5_table

TABLES: Tables = {"text_encoder": t5_table, "transformer": transformer_table, "vae": vae_table}
