"""The mapping tables of CogVideoX."""

from cogvideox_flax.conversion.cogvideox.transformer import transformer_table
from cogvideox_flax.conversion.cogvideox.vae import vae_table
from cogvideox_flax.conversion.rules import Tables
from cogvideox_flax.conversion.t5 import t5_table

TABLES: Tables = {"text_encoder": t5_table, "transformer": transformer_table, "vae": vae_table}
